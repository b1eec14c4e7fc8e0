"""A small residual network made of units, and orders of its forwards and backwards, for tests of ZeRO-3."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from megatron.core.parameter import Placement, make_parameter, replicated_facts

Order = Sequence[tuple[str, int]]
"""Passes in the order that they run: ("forward" or "backward", micro-batch)."""

ORDERS: dict[str, Order] = {
    "one after another": [(kind, number) for number in range(4) for kind in ("forward", "backward")],
    "1f1b": [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("forward", 2),
        ("backward", 1),
        ("forward", 3),
        ("backward", 2),
        ("backward", 3),
    ],
    "gpipe": [(kind, number) for kind in ("forward", "backward") for number in range(4)],
}


class Layer(nn.Module):
    """x [n, w] -> [n, w]; two matrices and a bias."""

    def __init__(self, width: int, inner: int, placement: Placement, generator: torch.Generator) -> None:
        super().__init__()
        for name, shape in {"up": (inner, width), "down": (width, inner), "bias": (width,)}.items():
            self.register_parameter(name, _parameter(shape, placement, generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.up.t()) @ self.down.t() + self.bias


class Network(nn.Module):
    """x [n, w] -> a scalar; one matrix at both ends, which belongs to no layer."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        *,
        width: int = 6,
        inner: int = 7,
        layers: int = 3,
        recompute: int = 0,
    ) -> None:
        """Make it, the same from every call; ``recompute`` layers together are run again (0: none)."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        placement = Placement(dtype, torch.device("cpu"))
        self.ends = _parameter((width, width), placement, generator)
        self.layers = nn.ModuleList(Layer(width, inner, placement, generator) for _ in range(layers))
        self.recompute = recompute

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.ends
        layers, step = list(self.layers), self.recompute or len(self.layers)
        for first in range(0, len(layers), step):
            unit = nn.Sequential(*layers[first : first + step])
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(unit, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = unit(hidden)
        return (hidden @ self.ends.t()).square().sum() / 64


def run(network: nn.Module, inputs: Sequence[torch.Tensor], order: Order, factor: float = 1.0) -> None:
    """Forwards and backwards of micro-batches, as the pipeline engine does them."""
    graphs = {}
    for kind, number in order:
        if kind == "forward":
            graphs[number] = get_gradient_edge(network(x=inputs[number]) * factor)
        else:
            torch.autograd.backward(graphs.pop(number), torch.ones((), dtype=inputs[number].dtype))


def _parameter(shape: tuple[int, ...], placement: Placement, generator: torch.Generator) -> nn.Parameter:
    parameter = make_parameter(shape, replicated_facts(shape, 0), placement)
    parameter.data.copy_(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)
    return parameter
