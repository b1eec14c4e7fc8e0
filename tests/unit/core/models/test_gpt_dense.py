"""GPTModel on one rank against plain float64 algebra, for every choice of architecture."""

import pytest
import torch

from megatron.core.parameter import named_parameters
from tests.unit.core.models import dense_gpt
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape, true_weights

SHAPES = {
    "gpt2": gpt2_shape(),
    "gpt2_untied_smoothed": gpt2_shape(untie_embeddings_and_output_weights=True, label_smoothing=0.1),
    "gpt2_no_positions_no_bias": gpt2_shape(position_embedding_type="none", add_bias_linear=False),
    "gpt2_partial_rope": gpt2_shape(
        position_embedding_type="rope", rotary_percent=0.5, rotary_base=500, norm_epsilon=1e-3
    ),
    "gpt2_qk_norm_wide_heads": gpt2_shape(qk_layernorm=True, kv_channels=10),
    "llama": llama_shape(),
    "llama_tied_one_group": llama_shape(num_query_groups=1, untie_embeddings_and_output_weights=False),
    "qwen2_like": llama_shape(add_qkv_bias=True),
    "qwen3_like": llama_shape(qk_layernorm=True, kv_channels=16),
    "swiglu_with_bias": llama_shape(add_bias_linear=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_loss_logits_and_gradients_equal_dense_algebra(name):
    config = SHAPES[name]
    model, data = build(config), batch(config)
    weights = true_weights(model)
    expected_logits = dense_gpt.logits(config, weights, data["tokens"])
    expected = dense_gpt.loss_sum(config, weights, **data)
    expected.backward()

    logits = model(tokens=data["tokens"], stream=STREAM)
    loss = model(**data, stream=STREAM)
    loss.backward()

    assert logits.shape == (config.seq_length, 3, config.vocab_size)
    torch.testing.assert_close(logits.transpose(0, 1), expected_logits, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert {named.name for named in named_parameters(model)} == set(weights)
    for named in named_parameters(model):
        rows = named.facts.global_shape[0]
        assert named.parameter.shape[1:] == named.facts.global_shape[1:]
        reference = weights[named.name].grad
        bound = 1e-11 * max(1.0, reference.abs().max().item())
        torch.testing.assert_close(named.parameter.grad[:rows], reference, rtol=0, atol=bound)
        assert not named.parameter.grad[rows:].any(), f"padding of {named.name} has a gradient"


@pytest.mark.parametrize("config", [gpt2_shape(), llama_shape()], ids=["gpt2", "llama"])
def test_packed_documents_see_neither_each_other_nor_each_others_positions(config):
    model, data = build(config), batch(config)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], list(range(9)), [0, 0, 1, 2, 3, 4, 5, 6, 0]])
    extra = {"position_ids": positions, "segment_ids": segments}
    weights = true_weights(model)
    expected = dense_gpt.loss_sum(config, weights, **data, **extra)
    expected.backward()
    loss = model(**data, **extra, stream=STREAM)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for named in named_parameters(model):
        reference = weights[named.name].grad
        torch.testing.assert_close(named.parameter.grad[: reference.size(0)], reference, rtol=0, atol=1e-10)
    # The middle document of the first row, alone:
    packed = model(tokens=data["tokens"], **extra, stream=STREAM)[3:7, 0]
    alone = model(tokens=data["tokens"][:1, 3:7], stream=STREAM)[:, 0]
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)


def test_a_wholly_masked_batch_contributes_zero():
    config = gpt2_shape()
    model, data = build(config), batch(config)
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    loss = model(**data, stream=STREAM)
    loss.backward()
    assert loss.item() == 0
    assert all(not named.parameter.grad.any() for named in named_parameters(model))
