"""Gradients of what several ranks of one model replica hold, each with a part of the sum.

* Parameters that every tensor-parallel rank holds whole but uses for a part of the work alone: norms and
  biases under sequence parallelism see the rank's run of the sequence.
* Key and value rows when there are fewer query groups than tensor-parallel ranks: several ranks hold the same
  rows, and each sees only its own query heads.
* The tied word embedding: the first stage's table and the last stage's copy of it.

All are summed after the data-parallel reduction, so that of a sharded bucket only the own slice travels: what
tensor-parallel peers and the two ends of a tied embedding share lies at the same place of their slices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import all_reduce
from megatron.core.distributed.exchange_json import gather_json
from megatron.core.distributed.own_bucket import ParameterStore, Part, Range
from megatron.core.parameter import Piece


@dataclass(frozen=True)
class Span:
    """A run of gradients that other tensor-parallel ranks hold too."""

    gradients: torch.Tensor
    """[k], a view of a bucket's own gradients."""
    start: int
    """Where the run begins in the flat tensor of all that the group shares."""


class SharedGradients:
    """Sums the gradients of parameters, or parts of them, that ranks of one replica hold more than once."""

    def __init__(
        self, store: ParameterStore, tp_group: ProcessGroup, embedding_group: ProcessGroup | None
    ) -> None:
        """Find out which they are; all ranks of the groups call this together.

        Args:
            store: this rank's parameters; tensor-parallel ranks have laid them out alike.
            tp_group: this rank's tensor-parallel group.
            embedding_group: first and last stage, where this rank is on one of two or more; else None.

        Raises:
            ValueError: if the two stages do not hold the same tied parameters.
        """
        self._tp_group = tp_group
        self._embedding_group = embedding_group
        self._device = store.device
        self._spans, self._size = ([], 0) if tp_group.size() == 1 else _shared_spans(store, tp_group)
        self._dtype = reduce(
            torch.promote_types, [span.gradients.dtype for span in self._spans], torch.float32
        )
        self._tied = [] if embedding_group is None else _tied_gradients(store, embedding_group)

    @torch.no_grad()
    def sum(self) -> None:
        """Add up this step's gradients in place, after their reduction over data-parallel ranks.

        One flat all-reduce over the tensor-parallel group, and one over the embedding group.
        """
        if self._size:
            # Zero where other ranks alone hold what they share.
            self._all_reduce(self._spans, self._size, self._dtype, self._tp_group)
        if self._tied:
            assert self._embedding_group is not None
            if len(self._tied) == 1:
                all_reduce(self._tied[0], self._embedding_group)
                return
            starts = accumulate((run.numel() for run in self._tied), initial=0)
            spans = [Span(run, start) for run, start in zip(self._tied, starts, strict=False)]
            size = sum(run.numel() for run in self._tied)
            self._all_reduce(spans, size, self._tied[0].dtype, self._embedding_group)

    def _all_reduce(self, spans: Sequence[Span], size: int, dtype: torch.dtype, group: ProcessGroup) -> None:
        flat = torch.zeros(size, dtype=dtype, device=self._device)
        places = [flat[span.start : span.start + span.gradients.numel()] for span in spans]
        gradients = [span.gradients for span in spans]
        if spans:
            torch._foreach_copy_(places, gradients)
        all_reduce(flat, group)
        if spans:
            torch._foreach_copy_(gradients, places)


def _tied_gradients(store: ParameterStore, embedding_group: ProcessGroup) -> list[torch.Tensor]:
    """Own gradients of the parameters that first and last stage both hold, at the same places on both."""
    held = [[named.name, list(named.parameter.shape)] for named in store.parameters if named.facts.tied]
    first, last = gather_json(sorted(held), embedding_group, store.device)
    if first != last:
        raise ValueError(
            f"the first stage says that it shares {first} (names and shapes) with the last, which says {last}"
        )
    found = []
    for bucket in store.buckets:
        tied = [part for part in bucket.parts if part.named.facts.tied]
        found += [bucket.gradients[start:stop] for start, stop in _runs(tied, bucket.parts)]
    return found


def _runs(chosen: Sequence[Part], parts: Sequence[Part]) -> list[Range]:
    """Ranges of the ``chosen`` among the ``parts`` of a bucket; neighbours join over the gap between them."""
    ranges: list[Range] = []
    wanted = {id(part) for part in chosen}
    joins = False
    for part in parts:
        if id(part) in wanted:
            start = ranges.pop()[0] if joins else part.offset
            ranges.append((start, part.end))
        joins = id(part) in wanted
    return ranges


def _shared_spans(store: ParameterStore, tp_group: ProcessGroup) -> tuple[list[Span], int]:
    """This rank's spans, and the number of elements of all spans of the group."""
    own = {
        named.name: [[piece.local, piece.start, piece.length, piece.primary] for piece in named.facts.pieces]
        for named in store.parameters
    }
    of_ranks = gather_json(own, tp_group, store.device)
    spans: list[Span] = []
    size = 0
    for bucket in store.buckets:
        partial = [part for part in bucket.parts if part.named.facts.partial_over_tp]
        for start, stop in _runs(partial, bucket.parts):
            spans.append(Span(bucket.gradients[start:stop], size))
            size += stop - start
        for part in bucket.parts:
            if not part.named.facts.partial_over_tp:
                pieces = [[Piece(*row) for row in rows[part.named.name]] for rows in of_ranks]
                found, part_size = shared_elements(part, pieces, tp_group.rank())
                spans += [Span(bucket.gradients[start:stop], size + place) for (start, stop), place in found]
                size += part_size
    return spans, size


def shared_elements(
    part: Part, pieces: Sequence[Sequence[Piece]], rank: int
) -> tuple[list[tuple[Range, int]], int]:
    """Elements of a split parameter's part that other tensor-parallel ranks hold too.

    Args:
        part: a run of the parameter, the same run of every rank's local tensor.
        pieces: what each rank holds of the parameter.
        rank: this one.

    Returns:
        Ranges in the bucket's flat tensors, each with its place among all shared elements of the part in the
        group; and the number of those.
    """
    facts = part.named.facts
    rows = facts.global_shape[facts.dim]
    if not any(
        sum(piece.length for piece in held) < rows and not all(piece.primary for piece in held)
        for held in pieces
    ):
        return [], 0
    runs = [list(_global_runs(part, held)) for held in pieces]
    edges = sorted(
        edge for held in runs for first, length, _ in held for edge in ((first, 1), (first + length, -1))
    )
    shared: list[Range] = []
    holders = 0
    for (first, step), (stop, _) in zip(edges, [*edges[1:], (0, 0)], strict=True):
        holders += step
        if holders > 1 and first < stop:
            shared.append((first, stop))
    places = list(accumulate((stop - start for start, stop in shared), initial=0))
    found = []
    for first, length, offset in runs[rank]:
        for (start, stop), place in zip(shared, places, strict=False):
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                found.append(((offset + low - first, offset + high - first), place + low - start))
    return found, places[-1]


def _global_runs(part: Part, pieces: Sequence[Piece]) -> Iterator[tuple[int, int, int]]:
    """Contiguous elements of a part: first one in the flattened whole tensor, number, offset in bucket."""
    facts, shape = part.named.facts, part.named.parameter.shape
    dim = facts.dim
    inner = shape[dim + 1 :].numel()
    for outer in range(shape[:dim].numel()):
        for piece in pieces:
            base = (outer * shape[dim] + piece.local) * inner
            start, stop = max(base, part.start), min(base + piece.length * inner, part.stop)
            if start < stop:
                first = (outer * facts.global_shape[dim] + piece.start) * inner + start - base
                yield first, stop - start, part.offset + start - part.start
