"""Both forms of core attention against float64 algebra; what the plain one keeps."""

import math

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.device import fuses_dropout
from megatron.core.transformer.core_attention import (
    choose_core_attention,
    fused_attention,
    fused_attention_without_dropout,
    unfused_attention,
)
from megatron.core.transformer.dropout import drop
from tests.unit.core.models.shapes import gpt2_shape

CPU = torch.device("cpu")


def _heads(dtype, s=7, b=2, n=4, g=4, d=8):
    """Queries, keys and values, cut out of one tensor as the projection gives them."""
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(s, b, g, n // g + 2, d, dtype=torch.float64, generator=generator).to(dtype)
    query, key, value = fused.requires_grad_().split((n // g, 1, 1), dim=3)
    return fused, (query.reshape(s, b, n, d), key.squeeze(3), value.squeeze(3))


def _one_head_at_a_time(query, key, value, causal, kept=None):
    """float64; ``kept`` [b, n, s, s] multiplies the probabilities."""
    s, b, n, d = query.shape
    columns = []
    for sequence in range(b):
        for head in range(n):
            of_group = head // (n // key.size(2))
            q, k, v = query[:, sequence, head], key[:, sequence, of_group], value[:, sequence, of_group]
            scores = q.double() @ k.double().T / math.sqrt(d)
            if causal:
                scores = scores.masked_fill(torch.ones(s, s).triu(1) == 1, -math.inf)
            probabilities = scores.exp() / scores.exp().sum(-1, keepdim=True)
            if kept is not None:
                probabilities = probabilities * kept[sequence, head]
            columns.append(probabilities @ v.double())
    return torch.stack(columns, 1).view(s, b, n * d)


@pytest.mark.parametrize("attend", [fused_attention, fused_attention_without_dropout, unfused_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_values_and_gradients_equal_float64_algebra(attend, causal, groups):
    fused, heads = _heads(torch.float64, g=groups)
    result = attend(*heads, causal=causal, dropout_probability=0.0)
    expected = _one_head_at_a_time(*heads, causal)
    assert result.shape == (7, 2, 32)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    direction = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    (gradient,) = torch.autograd.grad(result, fused, direction)
    (expected_gradient,) = torch.autograd.grad(expected, fused, direction)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2])
def test_dropped_probabilities_are_dropped_in_the_gradient_too(groups):
    fused, heads = _heads(torch.float64, g=groups)
    torch.manual_seed(11)
    result = unfused_attention(*heads, causal=True, dropout_probability=0.3)
    torch.manual_seed(11)
    # The plain steps draw one mask for all heads, in the order [b, n, s, s].
    kept = drop(torch.ones(2, 4, 7, 7, dtype=torch.float64), 0.3)
    assert kept.unique().tolist() == [0.0, 1 / 0.7]
    expected = _one_head_at_a_time(*heads, True, kept)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(result.square().sum(), fused)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), fused)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attend", [fused_attention, unfused_attention])
def test_bf16_is_as_exact_as_its_rounding(attend):
    _, heads = _heads(torch.bfloat16, s=300, d=32)
    result = attend(*heads, causal=True, dropout_probability=0.0).double()
    expected = _one_head_at_a_time(*heads, True)
    # Probabilities and output are rounded to 2^-9 of themselves, scores (some of 4) too: a softmax in bf16
    # would be off by 300 roundings.
    assert (result - expected).norm() / expected.norm() < 2**-7


def _kept(attend, dtype, probability, **sizes):
    _, heads = _heads(dtype, **sizes)
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(*heads, causal=True, dropout_probability=probability)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_the_plain_steps_keep_what_the_paper_counts():
    # Korthikanti et al. 2022, section 4.1: Q, K, V 6 s b h; softmax 2, mask 1, dropout output 2 a s^2 b.
    s, b, n, d = 32, 2, 4, 8
    qkv, scores = 6 * s * b * n * d, n * s * s * b
    assert _kept(unfused_attention, torch.bfloat16, 0.1, s=s) == qkv + 5 * scores
    assert _kept(unfused_attention, torch.bfloat16, 0.0, s=s) == qkv + 2 * scores
    # The fused kernel: its output, 2 s b h, and a float32 for each row of scores.
    assert _kept(fused_attention, torch.bfloat16, 0.0, s=s) == qkv + 2 * s * b * n * d + 4 * n * s * b


def test_grouped_keys_and_values_are_not_repeated():
    s, b, n, g, d = 32, 2, 8, 2, 8
    fused = 2 * s * b * (n + 2 * g) * d
    rearranged_queries = 2 * s * b * n * d
    kept = _kept(unfused_attention, torch.bfloat16, 0.0, s=s, n=n, g=g)
    assert kept == fused + rearranged_queries + 2 * n * s * s * b


def test_the_backend_decides():
    for backend in ("unfused", "local"):
        assert choose_core_attention(gpt2_shape(attention_backend=backend), CPU) is unfused_attention
    for backend in ("auto", "flash", "fused"):
        config = gpt2_shape(attention_backend=backend)
        assert choose_core_attention(config, torch.device("cuda", 0)) is fused_attention
        assert not fuses_dropout(CPU)
        assert choose_core_attention(config, CPU) is fused_attention_without_dropout
