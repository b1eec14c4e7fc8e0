"""Flat storage: the parameters and gradients of a rank in a few contiguous buckets.

Buckets follow the backward pass (the last module's parameters come first), so that a bucket is complete as
early as may be and its reduction overlaps with what is left of the backward. Inside a bucket parameters are
sorted by what happens to them later, so that weight decay, norms and updates run over long contiguous ranges.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron.core.parameter import NamedParameter, ParameterFacts

ALIGNMENT = 64
"""Elements that every parameter's start is a multiple of: whole cache lines in every number format."""

Range = tuple[int, int]
"""First element of a flat tensor, and one past the last."""


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one parameter in its bucket. Every slot is equal to itself only."""

    named: NamedParameter
    start: int
    """First element in the bucket's flat tensors."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.named.parameter.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat tensor of the bucket, in the parameter's local shape."""
        return flat[self.start : self.stop].view(self.named.parameter.shape)


class Bucket:
    """Contiguous parameters of one dtype with their gradients, reduced and updated together.

    Attributes:
        slots: the parameters, in the order of their places.
        weights: flat [n], the model's dtype; the parameters' own storage.
        gradients: flat [n], at least float32. Gaps between parameters are zero in both.
        counted_ranges: what this rank counts in norms: primary pieces, no tied copy, no vocabulary padding. A
            range may run over alignment gaps.
        counted_size: number of true parameter elements in them.
        uncounted_ranges: the rest: other ranks' duplicates, and padding.
    """

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        slots: list[Slot] = []
        size = 0
        for named in sorted(parameters, key=_later_use):
            slots.append(Slot(named, size))
            size += -(-named.parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = parameters[0].parameter
        self.slots = tuple(slots)
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(
            size, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device
        )
        for slot in slots:
            parameter = slot.named.parameter
            view = slot.view(self.weights)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = None
        self.counted_ranges = _counted_ranges(self.slots)
        self.counted_size = sum(stop - start for slot in slots for start, stop in _primary_ranges(slot))
        self.uncounted_ranges = _complement(self.counted_ranges, size)

    def decay_ranges(self, weight_decay: bool) -> list[Range]:
        """The contiguous runs of parameters that weight decay applies to, or does not."""
        ranges: list[Range] = []
        runs = groupby(self.slots, key=lambda slot: slot.named.facts.weight_decay)
        for decays, run in runs:
            if decays == weight_decay:
                members = list(run)
                ranges.append((members[0].start, members[-1].stop))
        return ranges


class ParameterBuffers:
    """All parameters of this rank, moved into buckets; every parameter becomes a view of its bucket.

    Attributes:
        parameters: in the order given (the module tree's), each parameter object once.
        buckets: in backward order.
    """

    def __init__(self, parameters: Sequence[NamedParameter], *, bucket_size: int | None) -> None:
        """Move ``parameters``; a bucket is closed once it has ``bucket_size`` elements (None: one bucket).

        Raises:
            ValueError: if there is no parameter, if they lie on several devices, or on a bucket size below 1.
        """
        if bucket_size is not None and bucket_size < 1:
            raise ValueError(f"--ddp-bucket-size {bucket_size}: must be at least 1")
        unique: dict[int, NamedParameter] = {}
        for named in parameters:
            unique.setdefault(id(named.parameter), named)
        self.parameters = tuple(unique.values())
        devices = {named.parameter.device for named in self.parameters}
        if len(devices) != 1:
            raise ValueError(
                f"the parameters of a rank must lie on one device, found {sorted(map(str, devices))}"
            )
        self.device = devices.pop()
        self.buckets = tuple(Bucket(group) for group in _backward_groups(self.parameters, bucket_size))

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Every parameter's bucket and place, bucket by bucket."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield bucket, slot

    def gradients(self) -> dict[str, torch.Tensor]:
        """Views of the gradients by parameter name, in the parameters' local shapes, at least float32."""
        return {slot.named.name: slot.view(bucket.gradients) for bucket, slot in self.slots()}


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements of a bucket where the user gave none: large buckets use the network well."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def _backward_groups(
    parameters: Sequence[NamedParameter], bucket_size: int | None
) -> Iterator[list[NamedParameter]]:
    group: list[NamedParameter] = []
    for named in reversed(parameters):
        full = bucket_size is not None and sum(other.parameter.numel() for other in group) >= bucket_size
        if group and (full or group[0].parameter.dtype != named.parameter.dtype):
            yield group
            group = []
        group.append(named)
    yield group


def _later_use(named: NamedParameter) -> tuple[bool, bool]:
    """Sort key inside a bucket: with weight decay first, and counted whole by this rank first."""
    return (not named.facts.weight_decay, not _counted_whole(named.facts))


def _counted_whole(facts: ParameterFacts) -> bool:
    return facts.copy_of is None and all(piece.primary for piece in facts.pieces)


def _counted_ranges(slots: Sequence[Slot]) -> list[Range]:
    """All primary ranges of a bucket; the last of a parameter and the first of the next join over a gap."""
    ranges: list[Range] = []
    slot_stop = 0  # of the slot before
    for slot in slots:
        for start, stop in _primary_ranges(slot):
            joins = bool(ranges) and start == slot.start and ranges[-1][1] == slot_stop
            _append(ranges, (start, stop), joins)
        slot_stop = slot.stop
    return ranges


def _complement(ranges: Sequence[Range], size: int) -> list[Range]:
    edges = [0, *(edge for span in ranges for edge in span), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _primary_ranges(slot: Slot) -> Iterator[Range]:
    """Flat ranges of a parameter's primary pieces, in ascending order, neighbours joined."""
    facts, shape = slot.named.facts, slot.named.parameter.shape
    if facts.copy_of is not None:
        return
    rows: list[Range] = []
    for piece in sorted(facts.pieces, key=lambda piece: piece.local):
        if piece.primary and piece.length:
            joins = bool(rows) and rows[-1][1] == piece.local
            _append(rows, (piece.local, piece.local + piece.length), joins)
    inner = shape[facts.dim + 1 :].numel()
    if rows == [(0, shape[facts.dim])]:
        yield slot.start, slot.stop
        return
    for outer in range(shape[: facts.dim].numel()):
        base = slot.start + outer * shape[facts.dim] * inner
        for first, last in rows:
            yield base + first * inner, base + last * inner


def _append(ranges: list[Range], new: Range, joins: bool) -> None:
    """Append ``new``, or let the last range run on to its end."""
    if joins:
        ranges[-1] = (ranges[-1][0], new[1])
    else:
        ranges.append(new)
