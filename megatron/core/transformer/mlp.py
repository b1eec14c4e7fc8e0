"""The feed-forward half of a layer, its inner width split over the tensor-parallel group."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Piece, Placement
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import apply_function


class MLP(nn.Module):
    """``linear_fc2(activation(linear_fc1(x)))`` (Shoeybi et al. 2019, section 3), with GELU or SwiGLU.

    GELU is the exact one, x times the normal distribution's cumulative function. With SwiGLU (Shazeer 2020,
    eq. 6) ``linear_fc1`` gives a gate and an input, both of width f. One all-reduce of [s, b, h] in the
    forward (``linear_fc2``) and one in the backward (``linear_fc1``), or under sequence parallelism an
    all-gather and a reduce-scatter in each, and an all-gather for the weight gradient of ``linear_fc1``.
    """

    def __init__(self, config: TransformerConfig, *, parallel: ModelParallel, placement: Placement) -> None:
        """Make the two linear layers.

        Args:
            config: shape of the model.
            parallel: how ranks share the model.
            placement: format and device of the parameters.

        Raises:
            ValueError: if the inner width does not divide over the group.
        """
        super().__init__()
        self.gated = config.swiglu
        f, size = config.ffn_size, parallel.tp.size()
        if f % size:
            raise ValueError(
                f"--ffn-hidden-size {f} does not divide by --tensor-model-parallel-size {size}; "
                f"the nearest that does is {-(-f // size) * size}"
            )
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * f if self.gated else f,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std,
            bias=config.add_bias_linear,
            pieces=gate_and_up_pieces(f, parallel.tp.rank(), size) if self.gated else None,
        )
        self.linear_fc2 = RowParallelLinear(
            f,
            config.hidden_size,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] replicated -> [s, b, h] replicated; [s/tp, b, h] both under sequence parallelism."""
        inner = self.linear_fc1(hidden_states)  # [s, b, f/tp], or [s, b, 2f/tp] gated
        activated = swiglu(inner) if self.gated else F.gelu(inner)  # [s, b, f/tp]
        output: torch.Tensor = self.linear_fc2(activated)
        return output


def gate_and_up_pieces(ffn_size: int, tp_rank: int, tp_size: int) -> tuple[Piece, ...]:
    """A rank's rows of the fused SwiGLU weight: its gate rows, then its input rows.

    The whole weight is [all gate rows; all input rows], 2f rows.
    """
    rows = ffn_size // tp_size
    first = tp_rank * rows
    return (
        Piece(local=0, start=first, length=rows),
        Piece(local=rows, start=ffn_size + first, length=rows),
    )


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [s, b, 2f/tp] (gate, then up) -> [s, b, f/tp], both sharded on the last dim."""
    return apply_function(_SwiGLU, gate_and_up)


class _SwiGLU(torch.autograd.Function):
    """forward: silu(gate) * up. backward: both gradients, into one tensor.

    Keeps its input alone: silu(gate) is cheaper to form again than to hold.
    """

    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_and_up)
        gate_grad, up_grad = grad.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=gate_grad)
        return grad
