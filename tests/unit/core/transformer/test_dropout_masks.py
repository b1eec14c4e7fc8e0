"""Dropout: shares, scales, and one byte an element."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.tensor_parallel import RandomStream
from megatron.core.transformer import dropout
from megatron.core.transformer.dropout import drop


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.999, 1e-3])
def test_the_share_of_zeros(probability):
    count = 200_001
    torch.manual_seed(5)
    zeros = (drop(torch.ones(count), probability) == 0).sum().item()
    deviation = (count * probability * (1 - probability)) ** 0.5  # of a binomial distribution
    assert abs(zeros - count * probability) < 4 * deviation


def test_extreme_probabilities():
    torch.manual_seed(5)
    assert not drop(torch.ones(1000), 1 - 2**-40).any()
    torch.manual_seed(5)
    assert (drop(torch.ones(1000), 2**-40) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mask_is_all_that_is_kept_and_serves_the_gradient(dtype):
    x = torch.randn(40, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = dropout(x, 0.3, RandomStream.root(1), training=True)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bool, x.numel())]
    result.backward(torch.full_like(result, 3.0))
    left = result != 0
    # Scaled once, in at least float32, and rounded once.
    exact = torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(result[left], (x.to(exact) / 0.7).to(dtype)[left], rtol=2e-7, atol=0)
    torch.testing.assert_close(x.grad, torch.where(left, 3 / 0.7, 0.0).to(dtype), rtol=2e-7, atol=0)


def test_elements_are_dropped_independently():
    torch.manual_seed(2)
    left = (drop(torch.ones(100_000), 0.5) != 0).double() - 0.5
    for distance in (1, 2, 3, 50_000):
        # A sum of independent products of +-1/2, over the square root of their number.
        assert abs((left * left.roll(distance)).sum().item()) < 4 * 0.25 * 100_000**0.5


def test_equal_streams_give_equal_masks():
    x = torch.ones(64, 8)

    def mask(key):
        return dropout(x, 0.5, RandomStream.root(key), training=True) != 0

    first = mask(1)
    torch.rand(3)
    assert torch.equal(mask(1), first)
    assert not torch.equal(mask(2), first)
    assert dropout(x, 0.5, RandomStream.root(1), training=False) is x
