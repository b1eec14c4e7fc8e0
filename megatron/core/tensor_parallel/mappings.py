"""Where a tensor-parallel layout changes: pairs of conjugate autograd functions.

All communication of tensor parallelism is here. Each function says what it does as "forward: X. backward: Y";
its conjugate does X in the backward and Y in the forward. f and g are the operators of Megatron-LM (Shoeybi
et al. 2019, section 3).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """``function.apply(*args)``, typed, for a function of one result."""
    apply: Callable[..., Tensor] = function.apply
    return apply(*args)


def sum_over_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over ``group`` in place and return it; no autograd. x: partial -> replicated."""
    if group.size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
    return x


def maximum_over_group(x: Tensor, group: ProcessGroup) -> Tensor:
    """Elementwise maximum of ``x`` over ``group``, in place, and return it; no autograd."""
    if group.size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def copy_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Operator f. forward: identity. backward: all-reduce.

    Replicated -> replicated; the gradient goes from partial to replicated.
    """
    if group.size() == 1:
        return x
    return apply_function(_Copy, x, group)


def reduce_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Operator g. forward: all-reduce. backward: identity.

    Partial -> replicated. ``x`` is summed in place, so hand over the fresh output of an op and do not use it
    again.
    """
    if group.size() == 1:
        return x
    return apply_function(_Reduce, x, group)


def gather_from_tensor_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """forward: all-gather along ``dim``. backward: keep this rank's slice.

    Sharded on ``dim`` -> replicated. The backward is right where what follows is computed alike on every
    rank, so that the incoming gradient is replicated.
    """
    if group.size() == 1:
        return x
    return apply_function(_Gather, x, group, dim)


def scatter_to_tensor_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """forward: keep this rank's slice along ``dim``. backward: all-gather.

    Replicated -> sharded on ``dim``.

    Raises:
        ValueError: if the size of ``dim`` does not divide by the group's size.
    """
    if group.size() == 1:
        return x
    if x.shape[dim] % group.size():
        raise ValueError(f"dim {dim} of size {x.shape[dim]} does not divide over {group.size()} ranks")
    return apply_function(_Scatter, x, group, dim)


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
    """Operator f and a product. forward: x @ weight.T + bias. backward: its own, x's gradient all-reduced.

    The all-reduce runs while the gradient of ``weight`` is computed.

    Args:
        x: [s, b, i], replicated.
        weight: [o/tp, i], sharded on dim 0.
        bias: [o/tp], sharded on dim 0, or None.
        group: the tensor-parallel group.

    Returns:
        [s, b, o/tp], sharded on the last dim.
    """
    if group.size() == 1:
        return F.linear(x, weight, bias)
    return apply_function(_ColumnLinear, x, weight, bias, group)


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    x = x.contiguous()
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(gathered, x, group=group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size()), dim=dim)


def _own_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A gradient that arrives may be shared with another branch of the graph, so it is summed in a copy.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        return sum_over_group(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return sum_over_group(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(gradient, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.group, ctx.dim), None, None


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = work = grad_weight = grad_bias = None
        if needs_x:
            grad_x = gradient @ weight  # [s, b, i]
            work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        rows = gradient.reshape(-1, gradient.shape[-1])  # [s * b, o/tp]
        if needs_weight:
            grad_weight = rows.t() @ x.reshape(-1, x.shape[-1])  # [o/tp, i]
        if needs_bias:
            grad_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None
