import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.parameter import Piece, Placement, named_parameters
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_parameters,
)
from tests.harness import make_state, run_ranks

V, PADDED, H, FF = 101, 112, 8, 24
TOKENS = torch.randint(0, V, (3, 5), generator=torch.Generator().manual_seed(2))
UPSTREAM = torch.randn(3, 5, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def piece_views(tensor, facts):
    """The rows of a local tensor that lie in the whole one, a view for each piece."""
    return [tensor.narrow(facts.dim, piece.local, piece.length) for piece in facts.pieces if piece.length]


class Net(nn.Module):
    """Embedding, a gated column layer (a piece of each half) and a row layer."""

    def __init__(self, group, dtype=torch.float64):
        super().__init__()
        layout = {"group": group, "placement": Placement(dtype, torch.device("cpu")), "init_std": 0.5}
        own = FF // group.size()
        gated = (Piece(0, group.rank() * own, own), Piece(own, FF + group.rank() * own, own))
        self.table = VocabParallelEmbedding(V, PADDED, H, **layout)
        self.column = ColumnParallelLinear(H, 2 * FF, pieces=gated, **layout)
        self.row = RowParallelLinear(FF, H, **layout)
        initialize_parameters(self, 1234)
        with torch.no_grad():
            # Biases start at zero; give them values that show where they land.
            for piece, local in zip(gated, self.column.bias.split(own), strict=True):
                local.copy_(torch.arange(piece.start, piece.start + own) / 10)
            self.row.bias.copy_(torch.arange(H) / 5)

    def forward(self, tokens):
        gate, up = self.column(self.table(tokens)).chunk(2, dim=-1)
        return self.row(F.silu(gate) * up)


def dense():
    """Output and gradients of the whole model, from the weights that one rank draws."""
    parameters = run_ranks(1, _whole_parameters)[0]
    for tensor in parameters.values():
        tensor.requires_grad_()
    hidden = F.embedding(TOKENS, parameters["table.weight"])
    gate, up = F.linear(hidden, parameters["column.weight"], parameters["column.bias"]).chunk(2, dim=-1)
    output = F.linear(F.silu(gate) * up, parameters["row.weight"], parameters["row.bias"])
    output.backward(UPSTREAM)
    return output.detach(), parameters


def _whole_parameters():
    net = Net(make_state().group("tp"))
    return {
        named.name: torch.cat(piece_views(named.parameter.detach(), named.facts), named.facts.dim)
        for named in named_parameters(net)
    }


def _run(tp):
    group = make_state(tp=tp).group("tp")
    net = Net(group)
    counts = {"forward": [], "backward": []}
    phase = "forward"
    original = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        counts[phase].append(tuple(tensor.shape))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        output = net(TOKENS)
        phase = "backward"
        output.backward(UPSTREAM)
    finally:
        dist.all_reduce = original
    pieces = {
        named.name: [
            (piece.start, values, gradient)
            for piece, values, gradient in zip(
                [piece for piece in named.facts.pieces if piece.length],
                piece_views(named.parameter.detach(), named.facts),
                piece_views(named.parameter.grad, named.facts),
                strict=True,
            )
        ]
        for named in named_parameters(net)
    }
    padding = net.table.weight.grad[net.table.shard.valid :].abs().sum().item()
    return output.detach(), pieces, padding, counts


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_the_dense_model_in_float64(tp):
    expected, parameters = dense()
    dims = {"row.weight": 1}
    for output, pieces, padding, counts in run_ranks(tp, _run, tp):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        for name, parts in pieces.items():
            for start, values, gradient in parts:
                dim = dims.get(name, 0)
                whole = parameters[name].detach().narrow(dim, start, values.shape[dim])
                assert torch.equal(values, whole)  # weights are drawn alike in every layout
                reference = parameters[name].grad.narrow(dim, start, values.shape[dim])
                torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12)
        assert padding == 0.0
        # One sum behind the embedding and the row layer; one sum of the column layer's input gradient.
        once = [(3, 5, H)]
        assert counts == (
            {"forward": [], "backward": []} if tp == 1 else {"forward": once * 2, "backward": once}
        )


def _shared_rows(tp):
    """A column layer of 2 query groups over 4 ranks, each key row on two of them."""
    group = make_state(tp=tp).group("tp")
    pair, half = divmod(group.rank(), 2)
    pieces = (Piece(0, 4 * group.rank(), 4), Piece(4, 16 + 3 * pair, 3, primary=half == 0))
    placement = Placement(torch.float64, torch.device("cpu"))
    layer = ColumnParallelLinear(H, 22, group=group, placement=placement, init_std=0.5, pieces=pieces)
    initialize_parameters(layer, 7)
    x = torch.linspace(-1, 1, 2 * H, dtype=torch.float64).view(2, 1, H).requires_grad_()
    output = layer(x)
    output.sum().backward()
    return output.detach(), x.grad, layer.weight.detach()


def test_rows_shared_by_ranks_are_equal_and_their_input_gradients_add_up():
    ranks = run_ranks(4, _shared_rows, 4)
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(ranks[first][2][4:], ranks[second][2][4:])
    assert not torch.equal(ranks[0][2][4:], ranks[2][2][4:])
    x = torch.linspace(-1, 1, 2 * H, dtype=torch.float64).view(2, 1, H)
    summed = sum(weight.sum(0) for _, _, weight in ranks).expand(2, 1, H)
    for output, gradient, weight in ranks:
        torch.testing.assert_close(output, x @ weight.t(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, summed, rtol=1e-12, atol=1e-12)


def _mixed_precision():
    net = Net(make_state(tp=2).group("tp"), torch.bfloat16)
    output = net(TOKENS)
    output.backward(UPSTREAM.bfloat16())
    return output.detach(), {named.name: named.parameter.grad for named in named_parameters(net)}


def test_bfloat16_is_bfloat16_throughout_and_near():
    expected, _ = dense()
    for output, gradients in run_ranks(2, _mixed_precision):
        assert output.dtype == torch.bfloat16
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
        assert (output.double() - expected).abs().max() < 0.02 * expected.abs().max()
