"""SwiGLU's gradient and the rows of its fused weight; widths that don't divide."""

import pytest
import torch

from megatron.core.config import TransformerConfig
from megatron.core.transformer.mlp import MLP, gate_and_up_pieces, swiglu
from tests.unit.core.models.shapes import FLOAT64, over


def test_swiglu_by_hand():
    gate, up = torch.tensor([0.0, 1.0, -2.0]), torch.tensor([5.0, 3.0, 0.5])
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(swiglu(torch.cat((gate, up))), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_swiglu_gradients_to_second_digit_of_rounding(rows):
    x = torch.randn(rows, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(swiglu, (x.requires_grad_(),))


def test_swiglu_keeps_its_input_alone():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        swiglu(torch.ones(2, 3, 8, requires_grad=True))
    assert kept == [(2, 3, 8)]


def test_a_rank_has_matching_gate_and_up_rows():
    # f = 6 over 2 ranks: whole rows are g0..g5 u0..u5.
    pieces = [gate_and_up_pieces(6, rank, 2) for rank in range(2)]
    spans = [[(piece.local, piece.start, piece.length) for piece in own] for own in pieces]
    assert spans == [[(0, 0, 3), (3, 6, 3)], [(0, 3, 3), (3, 9, 3)]]


class _ThreeRanks:
    def rank(self):
        return 0

    def size(self):
        return 3


def test_a_width_that_does_not_divide_is_refused():
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=3, seq_length=4, ffn_hidden_size=10
    )
    with pytest.raises(ValueError, match=r"--ffn-hidden-size 10 .* 3; the nearest that does is 12"):
        MLP(config, parallel=over(_ThreeRanks()), placement=FLOAT64)
