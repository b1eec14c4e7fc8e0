"""Which queries see which keys, as a list of rectangles and triangles: no mask is ever made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from megatron.core.context_parallel.layout import chunk_size, held_chunks


@dataclass(frozen=True)
class Piece:
    """Queries of one rank and keys of one rank, each query seeing each key, or in the causal triangle.

    Tokens are counted as their rank holds them, from 0 to s/cp.
    """

    batch: slice
    """Sequences of the micro-batch."""
    queries: slice
    """Tokens that look."""
    keys: slice
    """Tokens that are looked at; as many as queries in a triangle."""
    causal: bool
    """Whether the i-th of the queries sees only the first i + 1 of the keys."""
    first: bool
    """Whether no earlier piece has these queries."""

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        sequences, queries, keys = _size(self.batch), _size(self.queries), _size(self.keys)
        return sequences * (queries * (queries + 1) // 2 if self.causal else queries * keys)


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in the sequences of a micro-batch."""

    causal: bool
    """Whether a token sees only itself and earlier ones."""
    cp_size: int
    """Ranks that the sequences are dealt over."""
    segments: npt.NDArray[np.int64] | None
    """[b, s] of whole sequences: a token sees only its own segment. None: every sequence is one."""

    def pieces(self, rank: int, source: int, *, length: int, batch_size: int) -> list[Piece]:
        """What the queries of ``rank`` see of the keys of ``source``, each pair once.

        Every query sees itself, so the pieces of a rank with itself have each query once marked as first.

        Args:
            rank: who looks.
            source: who is looked at.
            length: s/cp, tokens of a rank.
            batch_size: b.
        """
        queries, keys, causal = self._block(rank, source, length)
        own = rank == source
        if self.segments is None:
            return [Piece(slice(0, batch_size), queries, keys, causal, first=own)]
        looking = self._segments_of(rank)[:, queries]
        looked_at = self._segments_of(source)[:, keys]
        found = []
        # Sequences that are cut alike share their pieces.
        for _, alike in groupby(range(batch_size), key=lambda i: self.segments[i].tobytes()):  # type: ignore[index]
            sequences = list(alike)
            batch = slice(sequences[0], sequences[-1] + 1)
            by_segment: dict[int, list[slice]] = {}
            for segment, run in _runs(looked_at[batch.start], keys.start):
                by_segment.setdefault(segment, []).append(run)
            for segment, run in _runs(looking[batch.start], queries.start):
                seen = by_segment.get(segment, [])
                if own:  # a run sees itself first, then the others of its segment: earlier ones if causal
                    found.append(Piece(batch, run, run, causal, first=True))
                    seen = [other for other in seen if other != run]
                    seen = [other for other in seen if not causal or other.start < run.start]
                found += [Piece(batch, run, other, causal=False, first=False) for other in seen]
        return found

    def _block(self, rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
        """Tokens of ``rank`` that see any of ``source``, those they see, and whether as a triangle.

        A rank holds an early and a late chunk. The late one comes after both chunks of any higher rank, and
        both come after the early chunk of any lower one: in each case half of the pairs, all or nothing.
        """
        everything = slice(0, length)
        if not self.causal or rank == source:
            return everything, everything, self.causal
        if source < rank:
            return everything, slice(0, length // 2), False
        return slice(length // 2, length), everything, False

    def _segments_of(self, rank: int) -> npt.NDArray[np.int64]:
        assert self.segments is not None
        size = chunk_size(self.segments.shape[1], self.cp_size)
        chunks = [self.segments[:, i * size : (i + 1) * size] for i in held_chunks(rank, self.cp_size)]
        return np.concatenate(chunks, axis=1)


def _runs(segments: npt.NDArray[np.int64], offset: int) -> Iterator[tuple[int, slice]]:
    """Runs of equal numbers in [k], as (number, tokens), the first token being ``offset``."""
    edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    for start, stop in pairwise(edges):
        yield int(segments[start]), slice(offset + start, offset + stop)


def tiles(piece: Piece, heads: int, budget: int) -> Iterator[Piece]:
    """Cut a piece so that no part has more than ``budget`` scores in all heads.

    Parts of a triangle are triangles along its edge and squares; those wholly outside are left out.

    Args:
        piece: what to cut.
        heads: n, of one sequence.
        budget: elements of one part, as far as a single pair of tokens allows.
    """
    if _scores(piece, heads) <= budget:
        yield piece
        return
    # Tiles of 256 tokens a side keep the products efficient; sequences are parted rather than that.
    together = min(max(budget // (heads * 256**2), 1), _size(piece.batch))
    side = max(math.isqrt(budget // (together * heads)), 1)
    for batch in _cut(piece.batch, together):
        for queries in _cut(piece.queries, side):
            first = piece.first
            for keys in _cut(piece.keys, side):
                ahead = (keys.start - piece.keys.start) - (queries.start - piece.queries.start)
                if piece.causal and ahead > 0:
                    break
                causal = piece.causal and ahead == 0
                yield replace(piece, batch=batch, queries=queries, keys=keys, causal=causal, first=first)
                first = False


def _scores(piece: Piece, heads: int) -> int:
    return heads * _size(piece.batch) * _size(piece.queries) * _size(piece.keys)


def _size(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)


def _cut(whole: slice, size: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, size):
        yield slice(start, min(start + size, whole.stop))
