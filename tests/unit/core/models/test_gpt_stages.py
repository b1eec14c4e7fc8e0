"""Stages of a model, names of its parameters, refusals."""

import math

import pytest
import torch

from megatron.core.models import ModelStage
from megatron.core.parameter import named_parameters
from tests.unit.core.models.shapes import FLOAT32, STREAM, batch, build, gpt2_shape, llama_shape


def _two_stages(config):
    first = build(config, stage=ModelStage(range(1), pre_process=True, post_process=False))
    last = build(config, stage=ModelStage(range(1, 2), pre_process=False, post_process=True))
    return first, last


def _assert_gradients_add_up(parts, whole):
    grads = {}
    for part in parts:
        for named in named_parameters(part):
            grads[named.name] = grads.get(named.name, 0) + named.parameter.grad
    for named in named_parameters(whole):
        torch.testing.assert_close(grads.pop(named.name), named.parameter.grad, rtol=1e-12, atol=1e-12)
    assert not grads


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("config_of", [gpt2_shape, llama_shape])
def test_two_stages_are_the_whole_model(config_of, dropout):
    config = config_of(hidden_dropout=dropout, attention_dropout=dropout)
    whole, (first, last), data = build(config), _two_stages(config), batch(config)
    positions = torch.arange(config.seq_length).flip(0).expand(3, -1)
    expected = whole(**data, position_ids=positions, stream=STREAM)
    expected.backward()

    sent = first(tokens=data["tokens"], position_ids=positions, stream=STREAM)
    received = sent.detach().requires_grad_()
    labels, mask = data["labels"], data["loss_mask"]
    loss = last(hidden_states=received, position_ids=positions, labels=labels, loss_mask=mask, stream=STREAM)
    loss.backward()
    sent.backward(received.grad)

    assert sent.shape == (config.seq_length, 3, config.hidden_size)
    assert torch.equal(loss, expected)
    _assert_gradients_add_up((first, last), whole)


@pytest.mark.parametrize("config_of", [gpt2_shape, llama_shape])
@pytest.mark.parametrize("recompute", ["uniform", "block", None])
def test_parts_without_layers_are_the_ends_of_the_whole_model(config_of, recompute):
    options = {"recompute_granularity": "full", "recompute_method": recompute} if recompute else {}
    config = config_of(hidden_dropout=0.2, **options)
    first = build(config, stage=ModelStage(range(0), pre_process=True, post_process=False))
    middle = build(config, stage=ModelStage(range(2), pre_process=False, post_process=False))
    last = build(config, stage=ModelStage(range(2, 2), pre_process=False, post_process=True))
    assert {named.name.split(".")[0] for named in named_parameters(first)} == {"embedding"}
    data = batch(config)
    hidden = middle(hidden_states=first(tokens=data["tokens"], stream=STREAM), stream=STREAM)
    loss = last(hidden_states=hidden, labels=data["labels"], loss_mask=data["loss_mask"], stream=STREAM)
    loss.backward()
    whole = build(config)
    expected = whole(**data, stream=STREAM)
    expected.backward()
    assert torch.equal(loss, expected)
    _assert_gradients_add_up((first, middle, last), whole)


def test_two_chunks_of_one_rank_share_the_matrix_of_a_tied_model():
    config = gpt2_shape()
    first = build(config, stage=ModelStage(range(1), pre_process=True, post_process=False))
    table = first.embedding.word_embeddings.weight
    assert table.facts.tied  # until it is known that the other end is here too
    last = build(
        config,
        stage=ModelStage(range(1, 2), pre_process=False, post_process=True),
        word_embeddings=table,
    )
    assert not table.facts.tied
    assert table.facts.copy_of is None
    assert [named.name for named in named_parameters(last) if named.parameter is table] == [
        "embedding.word_embeddings.weight"
    ]
    data = batch(config)
    hidden = first(tokens=data["tokens"], stream=STREAM)
    loss = last(hidden_states=hidden, labels=data["labels"], loss_mask=data["loss_mask"], stream=STREAM)
    loss.backward()
    whole = build(config)
    expected = whole(**data, stream=STREAM)
    expected.backward()
    assert torch.equal(loss, expected)
    reference = {named.name: named.parameter.grad for named in named_parameters(whole)}
    for named in (*named_parameters(first), *named_parameters(last)):
        torch.testing.assert_close(named.parameter.grad, reference[named.name], rtol=1e-12, atol=1e-12)


def test_a_matrix_that_two_stages_hold_is_tied_on_both():
    def tied(*parts):
        return {named.name for part in parts for named in named_parameters(part) if named.facts.tied}

    first, last = _two_stages(gpt2_shape())
    assert tied(first) == tied(last) == {"embedding.word_embeddings.weight"}
    assert tied(*_two_stages(llama_shape())) == set()
    assert tied(build(gpt2_shape())) == set()


def test_a_tied_model_over_two_stages_starts_with_equal_copies():
    first, last = _two_stages(gpt2_shape())
    copy = last.output_layer.weight
    assert copy.facts.copy_of == "embedding.word_embeddings.weight"
    assert torch.equal(copy, first.embedding.word_embeddings.weight)


def test_a_matrix_of_its_own_is_no_copy():
    model = build(llama_shape())
    assert model.output_layer.weight.facts.copy_of is None
    assert not torch.equal(model.output_layer.weight, model.embedding.word_embeddings.weight)


def test_names_and_shapes_in_the_whole_model():
    config = llama_shape(add_qkv_bias=True, qk_layernorm=True)
    shapes = {named.name: tuple(named.facts.global_shape) for named in named_parameters(build(config))}
    layer = {
        "input_layernorm.weight": (32,),
        "self_attention.linear_qkv.weight": (64, 32),
        "self_attention.linear_qkv.bias": (64,),
        "self_attention.linear_proj.weight": (32, 32),
        "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,),
        "pre_mlp_layernorm.weight": (32,),
        "mlp.linear_fc1.weight": (80, 32),
        "mlp.linear_fc2.weight": (32, 40),
    }
    expected = {f"decoder.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    expected |= {
        "embedding.word_embeddings.weight": (53, 32),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (53, 32),
    }
    assert shapes == expected


def test_output_projections_start_smaller_by_the_depth_of_the_whole_model():
    config = gpt2_shape(num_layers=8)
    first = build(config, stage=ModelStage(range(2), pre_process=True, post_process=False))
    for named in named_parameters(first):
        if named.facts.init_std is None:
            continue
        small = "linear_proj" in named.name or "linear_fc2" in named.name
        assert named.facts.init_std == pytest.approx(0.02 / math.sqrt(16) if small else 0.02)


def test_weight_decay_spares_biases_and_norms():
    model = build(gpt2_shape(qk_layernorm=True))
    decayed = {named.name.split(".")[-2] for named in named_parameters(model) if named.facts.weight_decay}
    spared = {named.name for named in named_parameters(model) if not named.facts.weight_decay}
    matrices = {
        "word_embeddings",
        "position_embeddings",
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }
    assert decayed == matrices
    assert all(name.endswith(".bias") or "layernorm" in name for name in spared)


def test_float32_loss_is_float32_and_bf16_loss_too():
    config = gpt2_shape()
    data = batch(config)
    exact = build(config)(**data, stream=STREAM)
    single = build(config, FLOAT32)(**data, stream=STREAM)
    half = build(config, FLOAT32).bfloat16()(**data, stream=STREAM)
    assert (exact.dtype, single.dtype, half.dtype) == (torch.float64, torch.float32, torch.float32)
    assert single.item() == pytest.approx(exact.item(), rel=1e-5)
    assert half.item() == pytest.approx(exact.item(), rel=1e-2)


def test_refusals_name_the_flags():
    config = gpt2_shape()
    model = build(config)
    with pytest.raises(ValueError, match="--max-position-embeddings 12"):
        model(tokens=torch.zeros(1, 13, dtype=torch.long), stream=STREAM)
    with pytest.raises(ValueError, match="tokens"):
        model(stream=STREAM)
    last = build(config, stage=ModelStage(range(1, 2), pre_process=False, post_process=True))
    with pytest.raises(ValueError, match="hidden states"):
        last(stream=STREAM)
