"""Tensors of the whole model, and the rectangles of them that a rank holds.

A checkpoint knows whole tensors by their name and true shape, and never ranks: what a rank holds of a tensor
is a list of axis-aligned rectangles, each with the local memory that backs it. A tensor-parallel shard is one
rectangle, the gate and up rows of a fused SwiGLU weight are two, a flat slice of an optimizer buffer is at
most a few, and rows of vocabulary padding lie in none.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.checkpoint.errors import CheckpointError
from megatron.core.parameter import ParameterFacts


@dataclass(frozen=True)
class Rectangle:
    """An axis-aligned part of a tensor: first index and extent along each dim, empty tuples for a scalar."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index along each dim."""
        return tuple(first + extent for first, extent in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: "Rectangle") -> "Rectangle | None":
        """What both cover, or None where that is nothing."""
        first = tuple(map(max, self.offset, other.offset))
        shape = tuple(stop - start for start, stop in zip(first, map(min, self.end, other.end), strict=True))
        return Rectangle(first, shape) if all(extent > 0 for extent in shape) else None

    def inside(self, outer: "Rectangle") -> tuple[slice, ...]:
        """This rectangle as an index into a tensor that holds ``outer``, which contains it."""
        return tuple(
            slice(first - origin, first - origin + extent)
            for first, extent, origin in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def __str__(self) -> str:
        spans = (f"{start}:{stop}" for start, stop in zip(self.offset, self.end, strict=True))
        return f"[{', '.join(spans)}]"


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of the whole model with the part of it that this rank holds, which may be nothing."""

    name: str
    """Name in the whole model, the same on every rank."""
    global_shape: tuple[int, ...]
    """True shape in the whole model: no padding, all ranks together."""
    dtype: torch.dtype
    shards: tuple[tuple[Rectangle, torch.Tensor], ...]
    """Rectangles of the whole tensor, each with a local tensor (or view) of its shape and dtype."""

    def __post_init__(self) -> None:
        whole = Rectangle((0,) * len(self.global_shape), self.global_shape)
        for rectangle, tensor in self.shards:
            if tuple(tensor.shape) != rectangle.shape or tensor.dtype != self.dtype:
                raise ValueError(
                    f"{self.name}: rectangle {rectangle} of {self.dtype} is backed by a tensor of shape "
                    f"{tuple(tensor.shape)}, {tensor.dtype}"
                )
            _check_bounds(self.name, whole, rectangle)

    @property
    def local_bytes(self) -> int:
        """Bytes of the rectangles that this rank holds."""
        return sum(rectangle.size for rectangle, _ in self.shards) * self.dtype.itemsize


def whole_tensor(name: str, tensor: torch.Tensor) -> ShardedTensor:
    """A tensor that this rank holds whole; scalars and empty tensors too."""
    shape = tuple(tensor.shape)
    return ShardedTensor(name, shape, tensor.dtype, ((Rectangle((0,) * len(shape), shape), tensor),))


def sharded_parameter(
    name: str, tensor: torch.Tensor, facts: ParameterFacts, *, primary_only: bool
) -> ShardedTensor:
    """A parameter, or anything shaped like it (its main weight, its moments), as a sharded tensor.

    Args:
        name: its name in the checkpoint, usually a prefix for the part and the parameter's own name.
        tensor: local tensor, sharded on ``facts.dim`` over tp, with rows of padding perhaps.
        facts: where its rows lie in the whole parameter.
        primary_only: True to save (what other ranks hold as well is given by one of them alone, and a tied
            copy gives nothing), False to load (every piece is filled; rows of padding are left as they are).

    Returns:
        One rectangle for each piece that isn't empty, backed by views of ``tensor``.
    """
    shards = []
    for piece in facts.pieces:
        left_to_others = primary_only and (not piece.primary or facts.copy_of is not None)
        if piece.length and not left_to_others:
            offset, shape = [0] * len(facts.global_shape), list(facts.global_shape)
            offset[facts.dim], shape[facts.dim] = piece.start, piece.length
            view = tensor.detach().narrow(facts.dim, piece.local, piece.length)
            shards.append((Rectangle(tuple(offset), tuple(shape)), view))
    return ShardedTensor(name, facts.global_shape, tensor.dtype, tuple(shards))


def sharded_slice(
    name: str,
    flat: torch.Tensor,
    facts: ParameterFacts,
    local_shape: Sequence[int],
    start: int,
    *,
    primary_only: bool,
) -> ShardedTensor:
    """A run of a parameter's elements, or of anything shaped like it, as a sharded tensor.

    Args:
        name: its name in the checkpoint.
        flat: [k], elements ``start`` to ``start + k`` of the flattened local tensor; may be empty.
        facts: where the local tensor's rows lie in the whole parameter.
        local_shape: shape of the local tensor.
        start: first element of the run.
        primary_only: True to save, False to load, as in :func:`sharded_parameter`.

    Returns:
        For each piece at most 2 d - 1 rectangles, d the number of dims: the whole rows in the run, and what
        it begins and ends with. They are backed by views of ``flat``.
    """
    dim = facts.dim
    shards = []
    pieces = () if primary_only and facts.copy_of is not None else facts.pieces
    position = 0
    for box in _flat_boxes(tuple(local_shape), start, start + flat.numel()):
        values = flat.detach()[position : position + box.size].view(box.shape)
        position += box.size
        for piece in pieces:
            first = max(box.offset[dim], piece.local)
            length = min(box.end[dim], piece.local + piece.length) - first
            if length > 0 and (piece.primary or not primary_only):
                offset, shape = list(box.offset), list(box.shape)
                offset[dim], shape[dim] = piece.start + first - piece.local, length
                view = values.narrow(dim, first - box.offset[dim], length)
                shards.append((Rectangle(tuple(offset), tuple(shape)), view))
    return ShardedTensor(name, facts.global_shape, flat.dtype, tuple(shards))


def share_among_replicas(tensors: Iterable[ShardedTensor], rank: int, size: int) -> list[ShardedTensor]:
    """The tensors that replica ``rank`` of ``size`` writes, when all hold the same; bytes are spread evenly.

    Every replica (the ranks of one data-parallel group) calls this with the same tensors in the same order.
    Each tensor goes whole to one of them, the largest first, always to the replica with the fewest bytes so
    far.
    """
    everything = list(tensors)
    loads = [(0, replica) for replica in range(size)]
    owner = {}
    for index in sorted(range(len(everything)), key=lambda i: -everything[i].local_bytes):
        load, owner[index] = loads[0]
        heapq.heapreplace(loads, (load + everything[index].local_bytes, owner[index]))
    return [tensor for index, tensor in enumerate(everything) if owner[index] == rank]


def check_tiling(name: str, global_shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> None:
    """Check that the rectangles cover a tensor exactly: no gap, no overlap, nothing outside.

    Disjoint rectangles inside the tensor whose sizes add up to its own leave no gap, so only overlaps are
    searched for, by a sweep along the dim with the most distinct offsets: n log n for the tilings that occur.

    Raises:
        CheckpointError: naming the tensor and the two rectangles that overlap, or a part that is not covered.
    """
    whole = Rectangle((0,) * len(global_shape), global_shape)
    for rectangle in rectangles:
        _check_bounds(name, whole, rectangle)
    solid = [rectangle for rectangle in rectangles if rectangle.size]
    _check_disjoint(name, solid)
    if sum(rectangle.size for rectangle in solid) != whole.size:
        raise CheckpointError(
            f"tensor {name} of shape {global_shape}: no rank holds {_first_gap(whole, solid)} of it"
        )


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Elements ``start`` to ``stop`` of a flattened tensor as rectangles, in their order."""
    if start >= stop:
        return
    inner = math.prod(shape[1:])
    row, first = divmod(start, inner)
    last_row, rest = divmod(stop, inner)
    if first:
        end = min(inner, stop - row * inner)
        for box in _flat_boxes(shape[1:], first, end):
            yield Rectangle((row, *box.offset), (1, *box.shape))
        row += 1
    if row < last_row:
        yield Rectangle((row, *(0 for _ in shape[1:])), (last_row - row, *shape[1:]))
    if rest and row <= last_row:
        for box in _flat_boxes(shape[1:], 0, rest):
            yield Rectangle((last_row, *box.offset), (1, *box.shape))


def _check_bounds(name: str, whole: Rectangle, rectangle: Rectangle) -> None:
    same_rank = len(rectangle.offset) == len(rectangle.shape) == len(whole.shape)
    if not (
        same_rank
        and all(extent >= 0 for extent in rectangle.shape)
        and all(first >= 0 for first in rectangle.offset)
        and all(stop <= limit for stop, limit in zip(rectangle.end, whole.shape, strict=True))
    ):
        raise CheckpointError(
            f"tensor {name} of shape {whole.shape}: the rectangle at {rectangle.offset} of shape "
            f"{rectangle.shape} is not inside it"
        )


def _check_disjoint(name: str, rectangles: Sequence[Rectangle]) -> None:
    if len(rectangles) < 2:
        return
    dims = range(len(rectangles[0].shape))
    sweep = max(dims, key=lambda dim: len({rectangle.offset[dim] for rectangle in rectangles}), default=None)
    if sweep is None:
        raise CheckpointError(f"scalar {name} is given {len(rectangles)} times")
    active: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle.offset[sweep]):
        active = [other for other in active if other.end[sweep] > rectangle.offset[sweep]]
        for other in active:
            if rectangle.intersection(other) is not None:
                raise CheckpointError(
                    f"tensor {name}: two ranks or pieces give {other} and {rectangle}, which overlap"
                )
        active.append(rectangle)


def _first_gap(whole: Rectangle, rectangles: Sequence[Rectangle]) -> Rectangle:
    """A part of ``whole`` that none of the rectangles covers; there is one."""
    uncovered = [whole]
    for rectangle in rectangles:
        uncovered = [rest for box in uncovered for rest in _subtract(box, rectangle)]
    return uncovered[0]


def _subtract(box: Rectangle, taken: Rectangle) -> list[Rectangle]:
    """``box`` without ``taken``, as rectangles."""
    common = box.intersection(taken)
    if common is None:
        return [box]
    parts = []
    offset, end = list(box.offset), list(box.end)
    for dim in range(len(offset)):
        for start, stop in ((offset[dim], common.offset[dim]), (common.end[dim], end[dim])):
            if start < stop:
                first, last = offset.copy(), end.copy()
                first[dim], last[dim] = start, stop
                parts.append(Rectangle(tuple(first), tuple(map(int.__sub__, last, first))))
        offset[dim], end[dim] = common.offset[dim], common.end[dim]
    return parts
