"""Where a tensor-parallel layout changes: pairs of conjugate autograd functions.

Each function says what it does as "forward: X. backward: Y"; its conjugate does X in the backward and Y in
the forward. f and g are the operators of Megatron-LM (Shoeybi et al. 2019, section 3), g-bar and its
conjugate, which take their place under sequence parallelism, those of Korthikanti et al. 2022, section 4.2.2.
Linear layers join them with their products: :mod:`megatron.core.tensor_parallel.linear`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import all_gather, all_reduce, reduce_scatter


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """``function.apply(*args)``, typed, for a function of one result."""
    apply: Callable[..., Tensor] = function.apply
    return apply(*args)


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


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """forward: all-gather along the sequence. backward: reduce-scatter.

    [s/tp, ...] sharded on dim 0 -> [s, ...] replicated; the gradient goes from partial to sharded. The
    backward is right where each rank does its own share of what follows.
    """
    if group.size() == 1:
        return x
    return apply_function(_GatherSequence, x, group)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Operator g-bar. forward: reduce-scatter along the sequence. backward: all-gather.

    [s, ...] partial -> [s/tp, ...] sharded on dim 0.

    Raises:
        ValueError: if the sequence does not divide over the group.
    """
    if group.size() == 1:
        return x
    return apply_function(_ReduceScatterSequence, x, group)


def scatter_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group and keep this rank's part of dim 0; no autograd.

    [s, ...] partial -> [s/tp, ...] sharded on dim 0.

    Raises:
        ValueError: if the sequence does not divide over the group.
    """
    if x.shape[0] % group.size():
        raise ValueError(
            f"--sequence-parallel splits a sequence over --tensor-model-parallel-size {group.size()} ranks, "
            f"which {x.shape[0]} tokens do not divide over; a --seq-length that is a multiple of "
            f"{group.size()} (times --context-parallel-size) does"
        )
    return reduce_scatter(x, group)


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    gathered = all_gather(x, group)
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
        return all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

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


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group), None
