"""GPT whose sequences are split over tensor- and context-parallel ranks against float64 algebra."""

import pytest
import torch

from megatron.core.communication import all_reduce
from megatron.core.context_parallel import take_local
from megatron.core.models import ModelStage
from megatron.core.parameter import named_parameters
from megatron.core.tensor_parallel import defer_weight_gradients, initialize_parameters
from megatron.core.transformer import AttentionContext, RotaryEmbedding, TransformerLayer
from megatron.core.weight_gradients import DeferredGradients
from tests.distributed.core.models.collectives import recorded_collectives
from tests.distributed.core.models.dense_comparison import (
    assert_close,
    assert_gradients,
    dense_loss_and_weights,
)
from tests.harness import make_state, run_ranks
from tests.unit.core.models import dense_gpt
from tests.unit.core.models.shapes import FLOAT64, STREAM, batch, build, gpt2_shape, llama_shape, over

EMBEDDING_ALONE = ModelStage(range(0), pre_process=True, post_process=False)


def _layer_collectives(config):
    group = make_state(tp=2).group("tp")
    parallel = over(group, sequence_parallel=True)
    layer = TransformerLayer(config, 0, parallel=parallel, placement=FLOAT64, causal=True)
    initialize_parameters(layer, seed=0)
    hidden = torch.ones(3, 3, config.hidden_size, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding.for_heads(config.head_dim, 1.0, 1e4).angles(6, None, hidden.dtype, hidden.device)
    with recorded_collectives() as forward:
        output = layer(hidden, AttentionContext(rotary=rotary), STREAM)
    assert output.shape == hidden.shape
    with recorded_collectives() as backward:
        output.sum().backward()
    return forward, backward


@pytest.mark.parametrize("shape", [gpt2_shape, llama_shape])
def test_a_layer_costs_two_gathers_and_two_scatters_each_way_and_two_gathers_for_weights(shape):
    # Korthikanti et al. 2022, section 4.2.2: ten passes of (t - 1)/t of [s, b, h], against eight without.
    gather = ("all_gather_single", (6, 3, 32), 6 * 3 * 32 * 8)
    scatter = ("reduce_scatter_single", (3, 3, 32), 3 * 3 * 32 * 8)
    for forward, backward in run_ranks(2, _layer_collectives, shape()):
        assert forward == [gather, scatter, gather, scatter]
        # Of the MLP and then of attention: the output's gradient, the input again, the input's gradient.
        assert backward == [gather, gather, scatter] * 2


def _model_collectives(config):
    group = make_state(tp=2).group("tp")
    model, data = build(config, parallel=over(group, sequence_parallel=True)), batch(config)
    with recorded_collectives() as seen:
        model(**data, stream=STREAM).backward()
    return seen


def test_embedding_and_head_cost_a_gather_and_a_scatter_each():
    config = gpt2_shape(num_layers=1, seq_length=8)
    tokens, hidden = 8 * 3, 8 * 3 * 32 * 8
    counted = int(batch(config)["loss_mask"].sum())
    assert 0 < counted < tokens
    for seen in run_ranks(2, _model_collectives, config):
        names = [collective.name for collective in seen]
        assert names.count("all_gather_single") == 6 + 2
        assert names.count("reduce_scatter_single") == 4 + 2
        # The loss: three numbers for each token that counts.
        reduced = [collective.bytes for collective in seen if collective.name == "all_reduce"]
        assert sum(reduced) == 3 * counted * 8
        sizes = {collective.bytes for collective in seen if collective.name != "all_reduce"}
        assert sizes == {hidden, hidden // 2}  # what is gathered, and a rank's part of what is scattered


def _recomputed_equals_kept(changes):
    """Loss and gradients of this rank, bit for bit, with dropout on heads and hidden states."""
    group = make_state(tp=2).group("tp")
    results = []
    for recompute in ({}, {"recompute_granularity": "full", "recompute_method": "uniform"}):
        config = gpt2_shape(seq_length=8, **changes, **recompute)
        model = build(config, parallel=over(group, sequence_parallel=True))
        with recorded_collectives() as seen:
            loss = model(**batch(config), stream=STREAM)
            loss.backward()
        results.append((loss, [named.parameter.grad for named in named_parameters(model)], len(seen)))
    (loss, grads, collectives), (again_loss, again_grads, again_collectives) = results
    assert torch.equal(loss, again_loss)
    assert all(torch.equal(grad, again) for grad, again in zip(grads, again_grads, strict=True))
    return again_collectives - collectives


def test_recomputation_repeats_masks_and_collectives():
    # The forward's two gathers and two scatters of each of the two layers once more.
    assert run_ranks(2, _recomputed_equals_kept, {"hidden_dropout": 0.3, "attention_dropout": 0.3}) == [8, 8]


def _deferred_equals_at_once(changes):
    """Every gradient of two passes, bit for bit, with the weights' gradients formed at once and later."""
    group = make_state(tp=2).group("tp")
    for recompute in ({}, {"recompute_granularity": "full", "recompute_method": "uniform"}):
        config = llama_shape(seq_length=8, qk_layernorm=True, **changes, **recompute)
        model = build(config, parallel=over(group, sequence_parallel=True))
        deferred = DeferredGradients()
        defer_weight_gradients(model, deferred)
        grads = []
        for deferred.deferring in (False, True):
            model.zero_grad()
            losses = [model(**batch(config), stream=STREAM.fold(micro_batch)) for micro_batch in range(2)]
            for loss in losses:
                loss.backward()
                deferred.close_pass()
            missing = [named.name for named in named_parameters(model) if named.parameter.grad is None]
            for _ in losses:
                deferred.run_pass()
            grads.append([named.parameter.grad for named in named_parameters(model)])
        assert all(torch.equal(grad, later) for grad, later in zip(*grads, strict=True))
        assert deferred.owed == 0
    return missing


def test_deferred_weight_gradients_of_a_model_are_those_formed_at_once():
    linear = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    expected = {f"decoder.layers.{number}.{name}.weight" for number in range(2) for name in linear}
    for missing in run_ranks(2, _deferred_equals_at_once, {"hidden_dropout": 0.3, "attention_dropout": 0.3}):
        assert set(missing) == expected


def _embedding_masks():
    """What dropout leaves of the embedding's output on one of 2 x 2 ranks, by what is split."""
    config = gpt2_shape(hidden_dropout=0.5, seq_length=8)
    tokens = batch(config)["tokens"]
    state = make_state(tp=2, cp=2)
    tp, cp = state.group("tp"), state.group("cp")
    masks = []
    for parallel in (over(), over(tp), over(tp, sequence_parallel=True), over(tp, cp)):
        model = build(config, stage=EMBEDDING_ALONE, parallel=parallel)
        masks.append(model(tokens=take_local(tokens, 1, parallel.cp), stream=STREAM) != 0)
    model = build(config, stage=EMBEDDING_ALONE, parallel=over(tp, cp, sequence_parallel=True))
    masks.append(model(tokens=take_local(tokens, 1, cp), stream=STREAM) != 0)
    return masks


def test_dropout_masks_differ_on_shards_of_a_sequence_and_agree_where_it_is_replicated():
    def differ(mask, other):
        assert 0.35 < mask.double().mean() < 0.65
        return 0.35 < (mask != other).double().mean() < 0.65  # as independent masks do in half the elements

    ranks = run_ranks(
        4, _embedding_masks
    )  # tp inside cp: 0 and 1 have one part of a sequence, 2 and 3 the other
    one, tp, tp_shard, cp, both = zip(*ranks, strict=True)
    assert all(torch.equal(mask, one[0]) for mask in (*one, *tp))
    assert tp_shard[0].shape == cp[0].shape == (4, 3, 32)
    assert both[0].shape == (2, 3, 32)
    assert differ(tp_shard[0], tp_shard[1])
    assert torch.equal(cp[0], cp[1])
    assert torch.equal(cp[2], cp[3])
    assert differ(cp[0], cp[2])
    assert all(differ(both[i], both[j]) for i in range(4) for j in range(i))


def _stages(config):
    """A model in three parts, one with the embedding alone and one with the loss alone."""
    group = make_state(tp=2).group("tp")
    parallel = over(group, sequence_parallel=True)
    first = build(config, stage=EMBEDDING_ALONE, parallel=parallel)
    middle = build(
        config, stage=ModelStage(range(2), pre_process=False, post_process=False), parallel=parallel
    )
    last = build(
        config,
        stage=ModelStage(range(2, 2), pre_process=False, post_process=True),
        parallel=parallel,
        word_embeddings=first.embedding.word_embeddings.weight,
    )
    data = batch(config)
    expected, weights = dense_loss_and_weights(config, data)
    hidden = middle(hidden_states=first(tokens=data["tokens"], stream=STREAM), stream=STREAM)
    assert hidden.shape == (4, 3, 32)
    loss = last(hidden_states=hidden, labels=data["labels"], loss_mask=data["loss_mask"], stream=STREAM)
    loss.backward()
    assert_close(loss, expected, 1e-12 * expected.item(), "loss")
    for part in (first, middle, last):
        assert_gradients(part, weights, group)


def test_parts_that_share_their_ends_equal_dense_algebra():
    run_ranks(2, _stages, gpt2_shape(seq_length=8))


def _context_parallel(tp, sequence_parallel, comm_type):
    """Losses, logits and gradients of sequences over two ranks, with and without documents in them."""
    state = make_state(tp=tp, cp=2)
    group, cp = state.group("tp"), state.group("cp")
    parallel = over(group, cp, sequence_parallel=sequence_parallel, cp_comm_type=comm_type)
    documents = {
        "segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2], [0] * 8, [0] + [1] * 7]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], list(range(8)), [0, *range(7)]]),
    }
    for config in (gpt2_shape(seq_length=8, label_smoothing=0.1), llama_shape(seq_length=8)):
        for extra in ({}, documents):
            data = {**batch(config), **extra}
            data["loss_mask"][:2, 2:7] = 0  # ranks count unequal numbers of tokens
            expected, weights = dense_loss_and_weights(config, data)
            local = {
                name: value if name == "segment_ids" else take_local(value, 1, cp)
                for name, value in data.items()
            }
            model = build(config, parallel=parallel)
            loss = model(**local, stream=STREAM)
            loss.backward()
            assert_close(all_reduce(loss.detach(), cp), expected, 1e-12 * expected.item(), "loss")
            for named in named_parameters(model):
                all_reduce(named.parameter.grad, cp)
            assert_gradients(model, weights, group)
        scores = dense_gpt.logits(config, weights, data["tokens"]).transpose(0, 1)
        logits = model(tokens=local["tokens"], stream=STREAM)
        assert_close(logits, take_local(scores, 0, cp), 1e-11, "logits")


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "comm_type"), [(1, False, "p2p"), (2, True, "p2p"), (2, False, "all_gather")]
)
def test_context_parallel_models_equal_dense_algebra(tp, sequence_parallel, comm_type):
    run_ranks(2 * tp, _context_parallel, tp, sequence_parallel, comm_type)


def _refusals():
    """What is said of sequences that do not divide, and of one that is too long only as a whole."""
    tp, cp = make_state(tp=2).group("tp"), make_state(cp=2).group("cp")
    config = gpt2_shape(seq_length=8)
    said = []
    for parallel, length in ((over(tp, sequence_parallel=True), 7), (over(cp=cp), 7), (over(cp=cp), 8)):
        model = build(config, stage=EMBEDDING_ALONE, parallel=parallel)
        with pytest.raises(ValueError, match=r"sequence|--seq-length") as error:
            model(tokens=torch.zeros(1, length, dtype=torch.long), stream=STREAM)
        said.append(str(error.value))
    return said


def test_sequences_that_cannot_be_split_are_refused():
    for indivisible, odd, long in run_ranks(2, _refusals):
        assert "--sequence-parallel" in indivisible
        assert "7 tokens" in indivisible
        assert "--seq-length 14 does not divide" in odd
        assert "16 tokens" in long
        assert "--max-position-embeddings 12" in long
