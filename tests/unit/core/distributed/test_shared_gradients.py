"""Which elements tensor-parallel ranks share, where each rank has a slice of its own."""

from itertools import pairwise

import pytest
import torch

from megatron.core.distributed.own_bucket import Part
from megatron.core.distributed.shared_gradients import shared_elements
from megatron.core.parameter import NamedParameter, ParameterFacts, Piece, Placement, make_parameter

WIDTH = 5
# Two groups of 2 + 2 query rows and 3 key and value rows, over four ranks: two ranks share each group's.
PIECES = [
    [Piece(0, 0, 2), Piece(2, 4, 3)],
    [Piece(0, 2, 2), Piece(2, 4, 3, primary=False)],
    [Piece(0, 7, 2), Piece(2, 11, 3)],
    [Piece(0, 9, 2), Piece(2, 11, 3, primary=False)],
]


def local_parameter(pieces: list[Piece], *, bias: bool) -> NamedParameter:
    shape, global_shape = ((5,), (14,)) if bias else ((5, WIDTH), (14, WIDTH))
    facts = ParameterFacts(global_shape, 0, tuple(pieces), None)
    return NamedParameter(
        "qkv", make_parameter(shape, facts, Placement(torch.float64, torch.device("cpu"))), facts
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cuts", [(0, 25), (0, 7, 12, 13, 25), (0, 10, 10, 25)])
def test_what_is_summed_is_the_sum_over_all_holders(cuts: tuple[int, ...], bias: bool):
    """Add up flat tensors as an all-reduce does, and compare with sums over whole tensors."""
    cuts = tuple(cut // WIDTH for cut in cuts) if bias else cuts
    named = [local_parameter(pieces, bias=bias) for pieces in PIECES]
    gradients = [torch.randn(one.parameter.numel(), dtype=torch.float64) for one in named]
    expected = [gradient.clone() for gradient in gradients]
    shared = slice(2 if bias else 2 * WIDTH, None)
    for one, other in ((0, 1), (2, 3)):
        total = gradients[one][shared] + gradients[other][shared]
        expected[one][shared] = expected[other][shared] = total
    sizes = 0
    for start, stop in pairwise(cuts):  # the slices of the data-parallel ranks
        if start == stop:
            continue
        parts = [Part(one, start, stop, 0) for one in named]
        found = [shared_elements(part, PIECES, rank) for rank, part in enumerate(parts)]
        assert len({size for _, size in found}) == 1
        flat = torch.zeros(found[0][1], dtype=torch.float64)
        for (ranges, _), gradient in zip(found, gradients, strict=True):
            for (first, last), place in ranges:
                flat[place : place + last - first] += gradient[start:stop][first:last]
        for (ranges, _), gradient in zip(found, gradients, strict=True):
            for (first, last), place in ranges:
                gradient[start:stop][first:last] = flat[place : place + last - first]
        sizes += found[0][1]
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-15, atol=0)
    # Two groups' shared rows and no more travel, over all slices together.
    assert sizes == 2 * 3 * (1 if bias else WIDTH)


def test_what_is_split_or_replicated_is_not_shared():
    split = [[Piece(0, 0, 7)], [Piece(0, 7, 7)]]
    replicated = [[Piece(0, 0, 14, primary=rank == 0)] for rank in range(2)]
    for pieces in (split, replicated):
        part = Part(local_parameter(pieces[0], bias=True), 0, 5, 0)
        assert shared_elements(part, pieces, 0) == ([], 0)
