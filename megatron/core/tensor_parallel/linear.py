"""Linear products joined with the communication that comes before or after them.

A column-parallel product (Shoeybi et al. 2019, section 3) takes what every rank has and gives each rank some
output columns; a row-parallel one takes each rank's input columns and gives every rank the sum. Under
sequence parallelism (Korthikanti et al. 2022, section 4.2.2) what every rank had is split along the sequence:
the column product gathers its input first, and the row product scatters its sum.

As one autograd function a product and its communication can do what they could not apart: keep the shard in
place of the gathered input, send one gradient while the other is computed, and leave the weight's gradient
for later (:class:`~megatron.core.weight_gradients.DeferredGradients`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.communication import (
    Handle,
    all_gather,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.core.tensor_parallel.mappings import apply_function, scatter_sum
from megatron.core.weight_gradients import DeferredGradients


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Operator f and a product. forward: x @ weight.T + bias. backward: its own, x's gradient summed.

    Without sequence parallelism the backward all-reduces the gradient of ``x`` while that of ``weight`` is
    computed. With it the forward all-gathers ``x``, which is not kept; the backward gathers it again while
    the gradient of the gathered input is computed, and reduce-scatters that while the gradient of ``weight``
    is.

    A gradient of ``weight`` that is left for later holds ``x`` and the gradient of the output, and gathers
    ``x`` (under sequence parallelism) when it is formed, in the same order on all ranks: no memory is spent
    on the gathered input meanwhile, and no more is sent than at once.

    Args:
        x: [s, b, i] replicated, or [s/tp, b, i] sharded on dim 0 over tp under sequence parallelism.
        weight: [o/tp, i], sharded on dim 0.
        bias: [o/tp], sharded on dim 0, or None.
        group: the tensor-parallel group.
        sequence_parallel: whether ``x`` is a part of the sequence.
        deferred: takes the gradient of ``weight`` over while it is deferring.

    Returns:
        [s, b, o/tp], sharded on the last dim.
    """
    if group.size() == 1 and deferred is None:
        return F.linear(x, weight, bias)
    split = _Split(group, sequence_parallel and group.size() > 1, deferred)
    return apply_function(_ColumnLinear, x, weight, bias, split)


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool = False,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """A product and operator g. forward: x @ weight.T, summed, + bias. backward: its own.

    Without sequence parallelism the forward all-reduces and the backward sends nothing. With it the forward
    reduce-scatters along the sequence and the backward all-gathers the gradient, once for both products: a
    gradient of ``weight`` that is left for later holds the gathered gradient.

    Args:
        x: [s, b, i/tp], sharded on the last dim.
        weight: [o, i/tp], sharded on dim 1.
        bias: [o], replicated, or None. Under sequence parallelism its gradient is partial.
        group: the tensor-parallel group.
        sequence_parallel: whether the output is to be a part of the sequence.
        deferred: takes the gradient of ``weight`` over while it is deferring.

    Returns:
        [s, b, o] replicated, or [s/tp, b, o] sharded on dim 0 over tp under sequence parallelism.

    Raises:
        ValueError: if a sequence that is to be split does not divide over the group.
    """
    if group.size() == 1 and deferred is None:
        return F.linear(x, weight, bias)
    split = _Split(group, sequence_parallel and group.size() > 1, deferred)
    return apply_function(_RowLinear, x, weight, bias, split)


@dataclass(frozen=True)
class _Split:
    """What is not a tensor."""

    group: ProcessGroup
    sequence_parallel: bool
    deferred: DeferredGradients | None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, split: _Split) -> Tensor:
        _save(ctx, x, weight, split)
        return F.linear(all_gather(x, split.group) if split.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        split: _Split = ctx.split
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        at_once = needs_weight and not _deferring(split)
        grad_x = grad_weight = None
        whole_x, gathered, summed = x, Handle(), Handle()
        if at_once and split.sequence_parallel:
            whole_x, gathered = _start_gather(x, split.group)  # runs during the first product
        if needs_x:
            partial = gradient @ weight  # [s, b, i]
            if split.sequence_parallel:
                grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
                summed = start_reduce_scatter(grad_x, partial, split.group)  # runs during the second
            else:
                grad_x = partial
                summed = start_all_reduce(grad_x, split.group)
        gathered.wait()
        if at_once:
            grad_weight = _weight_gradient(gradient, whole_x)
        elif needs_weight:
            _defer_column(ctx.parameter, gradient, x, split)
        grad_bias = _rows(gradient).sum(0) if needs_bias else None
        summed.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, split: _Split) -> Tensor:
        _save(ctx, x, weight, split)
        if split.group.size() == 1:
            return F.linear(x, weight, bias)
        partial = F.linear(x, weight)  # [s, b, o]
        if split.sequence_parallel:
            output = scatter_sum(partial, split.group)
        else:
            output = all_reduce(partial, split.group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        split: _Split = ctx.split
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        whole, gathered = gradient, Handle()
        if split.sequence_parallel and (needs_x or needs_weight):
            whole, gathered = _start_gather(gradient, split.group)
        grad_bias = _rows(gradient).sum(0) if needs_bias else None
        gathered.wait()
        grad_x = whole @ weight if needs_x else None  # [s, b, i/tp]
        grad_weight = None
        if needs_weight and _deferring(split):
            split.deferred.put(ctx.parameter, lambda: _weight_gradient(whole, x))  # type: ignore[union-attr]
        elif needs_weight:
            grad_weight = _weight_gradient(whole, x)
        return grad_x, grad_weight, grad_bias, None


def _save(ctx: Any, x: Tensor, weight: nn.Parameter, split: _Split) -> None:
    ctx.save_for_backward(x, weight)
    ctx.split = split
    # What recomputation saves for the backward is a detached twin; a gradient that comes later needs the
    # parameter itself to go to.
    ctx.parameter = None if split.deferred is None else weight


def _deferring(split: _Split) -> bool:
    return split.deferred is not None and split.deferred.deferring


def _defer_column(parameter: nn.Parameter, gradient: Tensor, x: Tensor, split: _Split) -> None:
    def recipe() -> Tensor:
        return _weight_gradient(gradient, all_gather(x, split.group) if split.sequence_parallel else x)

    assert split.deferred is not None
    split.deferred.put(parameter, recipe)


def _start_gather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Handle]:
    """[s/tp, b, k] sharded on dim 0 -> [s, b, k], to be touched after the handle is waited for."""
    whole = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return whole, start_all_gather(whole, x.contiguous(), group)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # [s * b, k]


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """[s, b, o] and [s, b, i] -> [o, i]."""
    return _rows(gradient).t() @ _rows(x)
