"""Norms against hand-written float64 statistics."""

import pytest
import torch

from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import initialize_parameters
from megatron.core.transformer import LayerNorm, RMSNorm
from tests.unit.core.models.shapes import over


def _norm(kind, dtype, size=256):
    placement = Placement(dtype, torch.device("cpu"))
    norm = kind(size, epsilon=1e-5, parallel=over(), placement=placement)
    initialize_parameters(norm, seed=0)
    return norm


def _exact(kind, x):
    x = x.double()
    if kind is LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_statistics_are_exact_for_inputs_far_from_zero(kind, dtype, bound):
    # 1000 + 3 n: a bf16 sum over 256 such numbers, or a float16 square, would be far off or infinite.
    x = (1000 + 30 * torch.randn(8, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = _exact(kind, x)
    result = _norm(kind, dtype)(x)
    assert result.dtype == dtype
    assert (result.double() - exact).abs().max() / exact.abs().max() < bound


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_gradients(kind):
    norm = _norm(kind, torch.float64, size=5)
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(norm, (x.requires_grad_(),))


class _TwoRanks:
    def rank(self):
        return 1

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("parallel", "over_local_heads", "partial"),
    [
        (over(_TwoRanks()), False, False),
        (over(_TwoRanks()), True, True),
        (over(_TwoRanks(), sequence_parallel=True), False, True),
        (over(_TwoRanks(), sequence_parallel=True), True, True),
        (over(sequence_parallel=True), True, False),
    ],
)
def test_gradients_are_partial_where_the_input_is_sharded(parallel, over_local_heads, partial):
    placement = Placement(torch.float64, torch.device("cpu"))
    norm = LayerNorm(
        4, epsilon=1e-5, parallel=parallel, placement=placement, over_local_heads=over_local_heads
    )
    assert norm.weight.facts.partial_over_tp == norm.bias.facts.partial_over_tp == partial


def test_parameters_are_replicated_ones_without_decay():
    norm = _norm(LayerNorm, torch.float32)
    assert norm.weight.tolist() == [1.0] * 256
    assert norm.bias.tolist() == [0.0] * 256
    assert not norm.weight.facts.weight_decay
    assert not norm.weight.facts.split
