"""What the optimizer sees of a rank's parameters: flat runs of elements that this rank updates.

Without sharding that is every element of every parameter that the rank holds. A sharded store gives each
data-parallel rank a slice of its own, and puts the slices together again after the update. The optimizer
does not know which: it works on :class:`OwnBucket`, and tells the :class:`ParameterStore` when it is done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from megatron.core.parameter import NamedParameter, ParameterFacts

Range = tuple[int, int]
"""First element of a flat tensor, and one past the last."""


@dataclass(frozen=True)
class Part:
    """A run of a parameter's elements that this rank updates."""

    named: NamedParameter
    start: int
    """First element, in the parameter's flattened local tensor."""
    stop: int
    """One past the last; more than ``start``."""
    offset: int
    """Where the run begins in the flat tensors of its bucket."""

    @property
    def end(self) -> int:
        """One past the run's last element in the flat tensors of its bucket."""
        return self.offset + self.stop - self.start

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The run [stop - start] in a flat tensor of the bucket."""
        return flat[self.offset : self.end]


class OwnBucket:
    """The elements of one bucket that this rank updates. All ranges are relative to its flat tensors.

    Attributes:
        weights: flat [n], a view of the model's weights.
        gradients: flat [n], at least float32; reduced over the data-parallel ranks when the optimizer looks.
        parts: runs of parameters in ascending order of their offsets. What lies between two of them, and
            behind the last, is zero in both tensors.
        counted_ranges: what this rank counts in norms: primary pieces, no tied copy, no vocabulary padding. A
            range may run over gaps between parts.
        counted_size: number of true parameter elements in them.
        uncounted_ranges: the rest: other ranks' duplicates, and padding.
    """

    def __init__(self, weights: torch.Tensor, gradients: torch.Tensor, parts: Sequence[Part]) -> None:
        assert weights.shape == gradients.shape == (weights.numel(),)
        self.weights = weights
        self.gradients = gradients
        self.parts = tuple(parts)
        self.counted_ranges = _counted_ranges(self.parts)
        self.counted_size = sum(stop - start for part in self.parts for start, stop in _primary_runs(part))
        self.uncounted_ranges = _complement(self.counted_ranges, weights.numel())

    def decay_ranges(self, weight_decay: bool) -> list[Range]:
        """The contiguous runs of parameters that weight decay applies to, or does not."""
        ranges: list[Range] = []
        for decays, run in groupby(self.parts, key=lambda part: part.named.facts.weight_decay):
            if decays == weight_decay:
                members = list(run)
                ranges.append((members[0].offset, members[-1].end))
        return ranges


class ParameterStore(Protocol):
    """A rank's parameters as the optimizer sees them."""

    @property
    def parameters(self) -> tuple[NamedParameter, ...]:
        """All parameters that this rank's model uses, in the order of the module tree, each once."""

    @property
    def buckets(self) -> tuple[OwnBucket, ...]:
        """What this rank updates, the same tensors through the whole run."""

    @property
    def device(self) -> torch.device:
        """Where they lie."""

    @property
    def sharded(self) -> bool:
        """Whether the data-parallel ranks update disjoint slices, rather than all of them everything."""

    def publish(self) -> None:
        """Let the model see what has been written to the buckets' weights; all data-parallel ranks together.

        The model's parameters may be read outside a forward pass only after :meth:`wait_for_parameters`.
        """

    def wait_for_parameters(self) -> None:
        """Return when every parameter that the model uses has what was published last."""


def primary_ranges(facts: ParameterFacts, shape: torch.Size) -> Iterator[Range]:
    """Flat ranges of a local tensor's primary pieces, in ascending order, neighbours joined.

    Args:
        facts: of the parameter; a tied copy has no primary piece.
        shape: of the local tensor.
    """
    if facts.copy_of is not None:
        return
    rows: list[Range] = []
    for piece in sorted(facts.pieces, key=lambda piece: piece.local):
        if piece.primary and piece.length:
            joins = bool(rows) and rows[-1][1] == piece.local
            _append(rows, (piece.local, piece.local + piece.length), joins)
    inner = shape[facts.dim + 1 :].numel()
    if rows == [(0, shape[facts.dim])]:
        yield 0, shape.numel()
        return
    for outer in range(shape[: facts.dim].numel()):
        base = outer * shape[facts.dim] * inner
        for first, last in rows:
            yield base + first * inner, base + last * inner


def _primary_runs(part: Part) -> Iterator[Range]:
    """Primary elements of a part, relative to the bucket's flat tensors."""
    shift = part.offset - part.start
    for start, stop in primary_ranges(part.named.facts, part.named.parameter.shape):
        first, last = max(start, part.start), min(stop, part.stop)
        if first < last:
            yield first + shift, last + shift


def _counted_ranges(parts: Sequence[Part]) -> list[Range]:
    """All primary runs of a bucket; the last of a part and the first of the next join over a gap."""
    ranges: list[Range] = []
    end = 0  # of the part before
    for part in parts:
        for start, stop in _primary_runs(part):
            joins = bool(ranges) and start == part.offset and ranges[-1][1] == end
            _append(ranges, (start, stop), joins)
        end = part.end
    return ranges


def _complement(ranges: Sequence[Range], size: int) -> list[Range]:
    edges = [0, *(edge for span in ranges for edge in span), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _append(ranges: list[Range], new: Range, joins: bool) -> None:
    """Append ``new``, or let the last range run on to its end."""
    if joins:
        ranges[-1] = (ranges[-1][0], new[1])
    else:
        ranges.append(new)
