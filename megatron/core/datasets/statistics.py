"""How long the documents and sequences of a dataset are, and how often each token occurs.

All of it is exact, and read in chunks: a dataset may be far larger than memory.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import CHUNK, map_index
from megatron.core.datasets.indexed_dataset import IndexedDataset

TOKEN_CHUNK: Final = 1 << 22
"""Tokens that are read at a time."""
_DENSE: Final = 1 << 22
_BINS_PER_OCTAVE: Final = 4


class ValueCounts:
    """How often each value occurs: 16 bytes for each distinct one.

    Of lengths there are few distinct ones: n of them take n²/2 tokens at least, so 10^13 tokens have no more
    than 4.5 million.

    Attributes:
        values: [k] int64, rising.
        counts: [k] int64, how often each occurs.
    """

    def __init__(self) -> None:
        self.values: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.counts: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, batch: npt.NDArray[Any]) -> None:
        """Count some whole numbers: [n]."""
        if not batch.size:
            return
        if batch.min() >= 0 and batch.max() < _DENSE:
            dense = np.bincount(batch)
            values = np.flatnonzero(dense)
            counts = dense[values]
        else:
            values, counts = np.unique(batch, return_counts=True)
        merged = np.union1d(self.values, values)
        total = np.zeros(len(merged), np.int64)
        total[np.searchsorted(merged, self.values)] += self.counts
        total[np.searchsorted(merged, values)] += counts
        self.values, self.counts = merged.astype(np.int64, copy=False), total

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their mean, if there are any."""
        return int((self.values * self.counts).sum()) / self.total

    def quantile(self, share: float) -> float:
        """The value below which a share of them lies, between two in proportion, if there are any."""
        position = share * (self.total - 1)
        ends = np.cumsum(self.counts)
        below, above = (
            int(self.values[np.searchsorted(ends, place, side="right")])
            for place in (math.floor(position), math.ceil(position))
        )
        return below + (above - below) * (position - math.floor(position))


def length_summary(lengths: ValueCounts) -> dict[str, float]:
    """Minimum, percentiles, maximum and mean in tokens, by name; nothing of no lengths at all."""
    if not lengths.total:
        return {}
    shares = {"min": 0.0, "p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
    return {
        **{name: lengths.quantile(share) for name, share in shares.items()},
        "max": lengths.quantile(1.0),
        "mean": lengths.mean,
    }


def log_histogram(lengths: ValueCounts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many lengths above 0 lie in bins of which each is about a fifth wider than the one before.

    Returns:
        The bins' edges [n + 1], whole numbers that rise from 1: a bin holds its first edge and not its
        second. And how many lengths lie in each [n].
    """
    longest = int(lengths.values[-1]) if lengths.total else 1
    steps = math.ceil(_BINS_PER_OCTAVE * math.log2(longest + 1)) + 1
    edges = np.unique(np.rint(2 ** (np.arange(steps + 1) / _BINS_PER_OCTAVE)).astype(np.int64))
    edges = edges[: int(np.searchsorted(edges, longest, side="right")) + 1]
    filled = lengths.values > 0
    places = np.searchsorted(edges, lengths.values[filled], side="right") - 1
    heights = np.zeros(len(edges) - 1, np.int64)
    np.add.at(heights, places, lengths.counts[filled])
    return edges, heights


def document_ends(dataset: IndexedDataset) -> Iterator[npt.NDArray[np.int64]]:
    """Tokens before the end of each document, chunk by chunk: [n + 1], the end of the one before first.

    The index must be sound: call :meth:`IndexedDataset.verify` before.
    """
    offsets = map_index(Path(f"{dataset.prefix}.idx")).offsets
    for start in range(0, dataset.num_documents, CHUNK):
        sequences = dataset.document_indices[start : start + CHUNK + 1].copy()  # aligned, unlike the file
        tokens = np.full(len(sequences), dataset.num_tokens, np.int64)
        inside = sequences < len(dataset)
        tokens[inside] = offsets[sequences[inside]] // dataset.dtype.itemsize
        yield tokens


def document_lengths(dataset: IndexedDataset) -> ValueCounts:
    """Tokens in each document, counted; see :func:`document_ends`."""
    counts = ValueCounts()
    for ends in document_ends(dataset):
        counts.add(np.diff(ends))
    return counts


def sequence_lengths(dataset: IndexedDataset) -> ValueCounts:
    """Tokens in each sequence, counted."""
    counts = ValueCounts()
    for start in range(0, len(dataset), CHUNK):
        counts.add(dataset.sequence_lengths[start : start + CHUNK])
    return counts


def token_chunks(
    dataset: IndexedDataset, advance: Callable[[int], None]
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """All tokens in order, in chunks: the number of tokens before, and the tokens.

    Args:
        dataset: where they are read.
        advance: called with the number of bytes of each chunk that is done with.
    """
    for start in range(0, dataset.num_tokens, TOKEN_CHUNK):
        chunk = dataset.tokens(start, TOKEN_CHUNK)
        yield start, chunk
        advance(chunk.nbytes)


def token_counts(dataset: IndexedDataset, advance: Callable[[int], None]) -> ValueCounts:
    """How often each token occurs.

    Args:
        dataset: of whole numbers.
        advance: called with the number of bytes read since the last call.
    """
    counts = ValueCounts()
    for _, chunk in token_chunks(dataset, advance):
        counts.add(chunk)
    return counts


def unigram_entropy(counts: ValueCounts) -> float:
    """Entropy of the frequencies in nats; 0 if there are none."""
    shares = counts.counts / max(counts.total, 1)
    return abs(float((shares * np.log(shares)).sum()))
