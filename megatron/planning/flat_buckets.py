"""The flat buckets of a rank's parameters, on paper: how ``megatron.core.distributed`` lays them out.

Their sizes are what data parallelism sends; where a rank's own slice of them begins and ends decides how much
tensor-parallel ranks and the two ends of a tied embedding have to add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.planning.parameters import LocalParameter

ALIGNMENT = 64
"""Elements that every parameter begins at a multiple of."""


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's elements that a rank updates, and its place in the bucket."""

    parameter: LocalParameter
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """One past its last place."""
        return self.offset + self.stop - self.start

    @property
    def shared(self) -> int:
        """Elements of it that other tensor-parallel ranks hold too, those of all of them counted once."""
        first = self.parameter.shared_from
        if first is None:
            return 0
        return self.parameter.holders * max(self.stop - max(self.start, first), 0)


@dataclass(frozen=True)
class FlatBucket:
    """One bucket, whole, and the slice of it that a rank updates."""

    size: int
    """Elements, gaps and padding counted."""
    pieces: tuple[Piece, ...]
    """What the slice holds."""


def flat_buckets(
    parameters: Sequence[LocalParameter], bucket_size: int | None, slices: int, rank: int
) -> list[FlatBucket]:
    """Buckets in backward order.

    Args:
        parameters: of all model chunks of a rank.
        bucket_size: elements after which one is closed; None for a single one. Tied parameters have a bucket
            of their own.
        slices: data-parallel ranks that divide each bucket; 1 if nothing is divided.
        rank: which of the slices.
    """
    return [_bucket(group, slices, rank) for group in _groups(parameters, bucket_size)]


def divided_bucket(parameters: Sequence[LocalParameter], ranks: int, rank: int) -> FlatBucket:
    """One bucket of a unit whose parameters are divided by rows, each by itself (ZeRO-3).

    Its size is that of all ranks' rows together, each rank's padded to those of the first.
    """
    pieces: list[Piece] = []
    offset = size = 0
    for parameter in sorted(parameters, key=_later_use):
        rows = -(-parameter.rows // ranks)
        first = min(rank * rows, parameter.rows)
        stop = min(first + rows, parameter.rows)
        if first < stop:
            pieces.append(Piece(parameter, first * parameter.row_size, stop * parameter.row_size, offset))
        offset += _round_up(rows * parameter.row_size, ALIGNMENT)
        size += ranks * rows * parameter.row_size
    return FlatBucket(size, tuple(pieces))


def summed_over_tp(buckets: Sequence[FlatBucket]) -> int:
    """Elements of the flat tensor in which tensor-parallel ranks add up what each has a part of."""
    size = 0
    for bucket in buckets:
        partial = [piece for piece in bucket.pieces if piece.parameter.partial]
        size += sum(stop - start for start, stop in _runs(partial, bucket.pieces))
        size += sum(piece.shared for piece in bucket.pieces)
    return size


def summed_over_ends(buckets: Sequence[FlatBucket]) -> int:
    """Elements that the two stages that hold a tied embedding add up."""
    size = 0
    for bucket in buckets:
        tied = [piece for piece in bucket.pieces if piece.parameter.tied]
        size += sum(stop - start for start, stop in _runs(tied, bucket.pieces))
    return size


def _bucket(parameters: Sequence[LocalParameter], slices: int, rank: int) -> FlatBucket:
    starts: list[tuple[LocalParameter, int]] = []
    used = 0
    for parameter in parameters:
        starts.append((parameter, used))
        used += _round_up(parameter.size, ALIGNMENT)
    size = _round_up(used, ALIGNMENT * slices)
    first, last = rank * size // slices, (rank + 1) * size // slices
    pieces = []
    for parameter, begin in starts:
        start, stop = max(begin, first), min(begin + parameter.size, last)
        if start < stop:
            pieces.append(Piece(parameter, start - begin, stop - begin, start - first))
    return FlatBucket(size, tuple(pieces))


def _groups(parameters: Sequence[LocalParameter], bucket_size: int | None) -> Iterator[list[LocalParameter]]:
    """The members of each bucket, in the order of their places."""
    tied = [parameter for parameter in parameters if parameter.tied]
    group: list[LocalParameter] = []
    for parameter in reversed(parameters):
        if parameter.tied:  # there is one at most
            if group:
                yield sorted(group, key=_later_use)
            yield tied
            group = []
            continue
        if group and bucket_size is not None and sum(one.size for one in group) >= bucket_size:
            yield sorted(group, key=_later_use)
            group = []
        group.append(parameter)
    if group:
        yield sorted(group, key=_later_use)


def _later_use(parameter: LocalParameter) -> tuple[bool, bool, bool]:
    return not parameter.weight_decay, not parameter.split, parameter.partial


def _runs(chosen: Sequence[Piece], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Ranges of the chosen pieces; neighbours join over the gap between them."""
    ranges: list[tuple[int, int]] = []
    joins = False
    for piece in pieces:
        taken = any(piece is one for one in chosen)
        if taken:
            ranges.append((ranges.pop()[0] if joins else piece.offset, piece.end))
        joins = taken
    return ranges


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
