"""GPT over 2 and 4 tensor-parallel ranks against plain float64 algebra, and what it communicates."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.models import ModelStage
from megatron.core.parameter import named_parameters
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.core.transformer import (
    AttentionContext,
    RotaryEmbedding,
    SelfAttention,
    TransformerLayer,
    dropout,
)
from tests.distributed.core.models.collectives import recorded_collectives
from tests.distributed.core.models.dense_comparison import (
    assert_close,
    assert_gradients,
    dense_loss_and_weights,
    shapes,
    whole_gradient,
)
from tests.harness import make_state, run_ranks
from tests.unit.core.models import dense_gpt
from tests.unit.core.models.shapes import (
    FLOAT64,
    STREAM,
    batch,
    build,
    gpt2_shape,
    llama_shape,
    over,
)


def _compare_with_dense(tp, sequence_parallel):
    group = make_state(tp=tp).group("tp")
    for name, config in shapes(seq_length=8 if sequence_parallel else 9).items():
        data = batch(config)
        model = build(config, parallel=over(group, sequence_parallel=sequence_parallel))
        expected, weights = dense_loss_and_weights(config, data)
        expected_logits = dense_gpt.logits(config, weights, data["tokens"]).transpose(0, 1)
        loss = model(**data, stream=STREAM)
        loss.backward()
        assert_close(loss, expected, 1e-12 * expected.item(), name)
        assert_gradients(model, weights, group, name)
        logits = model(tokens=data["tokens"], stream=STREAM)
        assert_close(logits, expected_logits, 1e-11, f"{name}: logits")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor parallel", "sequence parallel"])
@pytest.mark.parametrize("tp", [2, 4])
def test_loss_logits_and_gradients_equal_dense_algebra(tp, sequence_parallel):
    run_ranks(tp, _compare_with_dense, tp, sequence_parallel)


def _layer_collectives(config):
    group = make_state(tp=2).group("tp")
    layer = TransformerLayer(config, 0, parallel=over(group), placement=FLOAT64, causal=True)
    initialize_parameters(layer, seed=0)
    hidden = torch.ones(6, 3, config.hidden_size, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding.for_heads(config.head_dim, 1.0, 1e4).angles(6, None, hidden.dtype, hidden.device)
    with recorded_collectives() as forward:
        output = layer(hidden, AttentionContext(rotary=rotary), STREAM)
    with recorded_collectives() as backward:
        output.sum().backward()
    return forward, backward


@pytest.mark.parametrize("shape", [gpt2_shape, llama_shape])
def test_a_layer_costs_two_all_reduces_forward_and_two_backward(shape):
    one = ("all_reduce", (6, 3, 32), 6 * 3 * 32 * 8)
    for forward, backward in run_ranks(2, _layer_collectives, shape()):
        assert forward == [one, one]
        assert backward == [one, one]


def _model_collectives(config):
    model, data = build(config, parallel=over(make_state(tp=2).group("tp"))), batch(config)
    with recorded_collectives() as seen:
        model(tokens=data["tokens"], labels=data["labels"], stream=STREAM).backward()
    return seen


def test_embedding_and_head_cost_one_all_reduce_each_and_the_loss_three_numbers_a_token():
    # Shoeybi et al. 2019, section 3: 2 + 2 in the layer, one after the embedding, one before the head.
    config = gpt2_shape(num_layers=1)
    for seen in run_ranks(2, _model_collectives, config):
        assert {collective.name for collective in seen} == {"all_reduce"}
        hidden_bytes, token_bytes = 9 * 3 * 32 * 8, 9 * 3 * 8
        assert [collective.bytes for collective in seen].count(hidden_bytes) == 6
        assert sum(collective.bytes for collective in seen) == 6 * hidden_bytes + 3 * token_bytes


def _drop(config):
    """This rank's hidden dropout mask, its heads under dropout of probabilities, and the layer's output."""
    group = make_state(tp=2).group("tp")
    ones = torch.ones(6, 3, config.hidden_size, dtype=torch.float64)
    hidden_mask = dropout(ones, 0.5, RandomStream.root(1), training=True) != 0
    attention = SelfAttention(config, parallel=over(group), placement=FLOAT64, causal=False)
    with torch.no_grad():
        for named in named_parameters(attention):
            named.parameter.fill_(0.5)  # all heads alike: what differs between ranks is the mask
    seen = []
    attention.linear_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    output = attention(ones, AttentionContext(), RandomStream.root(1))
    return hidden_mask, seen[0], output.detach()


def test_dropout_masks_agree_where_replicated_and_differ_where_sharded():
    ranks = run_ranks(2, _drop, gpt2_shape(attention_dropout=0.5))
    (mask, heads, output), (other_mask, other_heads, other_output) = ranks
    assert torch.equal(mask, other_mask)
    assert 0.4 < mask.double().mean() < 0.6
    assert heads.shape == other_heads.shape == (6, 3, 16)
    assert not torch.equal(heads, other_heads)
    assert torch.equal(output, other_output)


def _recomputed_equals_kept(changes):
    """Loss and gradients of this rank, bit for bit, with dropout on heads and hidden states."""
    group = make_state(tp=2).group("tp")
    results = []
    for recompute in ({}, {"recompute_granularity": "full", "recompute_method": "uniform"}):
        config = gpt2_shape(**changes, **recompute)
        model = build(config, parallel=over(group))
        with recorded_collectives() as seen:
            loss = model(**batch(config), stream=STREAM)
            loss.backward()
        results.append((loss, [named.parameter.grad for named in named_parameters(model)], len(seen)))
    (loss, grads, collectives), (again_loss, again_grads, again_collectives) = results
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(grad, again) for grad, again in zip(grads, again_grads, strict=True))
    return again_collectives - collectives


def test_recomputation_under_tensor_parallelism_repeats_masks_and_collectives():
    changes = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    # The forward's two all-reduces of each of the two layers once more.
    assert run_ranks(2, _recomputed_equals_kept, changes) == [4, 4]


def _stages(config):
    """Two stages of two ranks each, the stage boundary crossed by hand; gradients of tied copies summed."""
    state = make_state(tp=2, pp=2)
    first = state.rank("pp") == 0
    stage = ModelStage(range(1) if first else range(1, 2), pre_process=first, post_process=not first)
    model, data = build(config, stage=stage, parallel=over(state.group("tp"))), batch(config)
    pipe = state.group("pp")
    boundary = torch.empty(config.seq_length, 3, config.hidden_size, dtype=torch.float64)
    upstream, downstream = (dist.get_global_rank(pipe, rank) for rank in (0, 1))
    if first:
        sent = model(tokens=data["tokens"], stream=STREAM)
        dist.send(sent.detach(), downstream)
        dist.recv(boundary, downstream)
        sent.backward(boundary)
    else:
        dist.recv(boundary, upstream)
        boundary.requires_grad_()
        loss = model(
            hidden_states=boundary, labels=data["labels"], loss_mask=data["loss_mask"], stream=STREAM
        )
        loss.backward()
        dist.send(boundary.grad, upstream)
    _, weights = dense_loss_and_weights(config, data)
    for named in named_parameters(model):
        grad = whole_gradient(named, state.group("tp"))
        tied = not config.untie_embeddings_and_output_weights
        if named.name == "embedding.word_embeddings.weight" and tied:
            dist.all_reduce(grad, group=state.embedding_group)
        assert_close(grad, weights[named.name].grad, 1e-10, named.name)
    return sorted({named.name for named in named_parameters(model)})


@pytest.mark.parametrize("shape", [gpt2_shape, llama_shape])
def test_tensor_and_pipeline_parallel_together_equal_dense_algebra(shape):
    names = run_ranks(4, _stages, shape())
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names[0]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names[2]
