"""Documents that share a band of their signatures: sorted by band hash, in as much memory as is given.

For each band, documents with equal hashes are a group; a group of one is dropped. Every two documents of a
group are a candidate pair.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.ordered_pool import OrderedPool
from megatron.corpora.output import complete_or_absent
from megatron.corpora.signatures import Banding, read_band
from megatron.corpora.work_folder import WorkFolder, read_json, write_array

_BYTES_PER_DOCUMENT: Final = 48
"""While a band is sorted: hash and number, as read and as sorted, and the order."""


@dataclass(frozen=True)
class Corpus:
    """How many lines and documents there are, file by file."""

    lines: npt.NDArray[np.int64]
    """[f + 1] lines before each file: what a document's number is counted from."""
    documents: npt.NDArray[np.int64]
    """[f] documents with a signature in each file."""

    @classmethod
    def of(cls, work: WorkFolder) -> "Corpus":
        """What the signature stage has found.

        Raises:
            ValueError: if it is not done for every file.
        """
        work.require("signatures", ".json", "signatures")
        counts = [read_json(work.file("signatures", number, ".json")) for number in range(len(work.inputs))]
        lines = np.cumsum([0, *(count["lines"] for count in counts)])
        return cls(lines, np.array([count["documents"] for count in counts], np.int64))


@dataclass(frozen=True)
class CandidateSearch:
    """Finds the groups of one band."""

    work: WorkFolder
    """Where signatures are and groups go."""
    corpus: Corpus
    """Sizes."""
    banding: Banding
    """The bands."""
    memory: int
    """Bytes to sort in."""

    def __call__(self, band: int) -> int:
        """Write the groups of a band, their ascending members and their sizes; returns how many."""
        parts = self._parts()
        groups = 0
        with contextlib.ExitStack() as stack:
            members, sizes = (
                stack.enter_context(complete_or_absent(self.work.file("groups", band, suffix)))
                for suffix in (".members", ".sizes")
            )
            for part in range(parts):
                found, counts = groups_of_equals(*self._read(band, part, parts))
                members.write(found.tobytes())
                sizes.write(counts.tobytes())
                groups += len(counts)
        return groups

    def _parts(self) -> int:
        """A band is sorted in so many parts, a power of two, by the first bits of its hashes."""
        needed = int(self.corpus.documents.sum()) * _BYTES_PER_DOCUMENT
        return 1 << max(0, -(-needed // max(self.memory, 1)) - 1).bit_length()

    def _read(self, band: int, part: int, parts: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hashes of one part of a band, and the numbers of their documents."""
        hashes, documents = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        shift = np.uint64(65 - parts.bit_length())
        for number, count in enumerate(self.corpus.documents):
            path = self.work.file("signatures", number, ".bin")
            lines, keys = read_band(path, int(count), self.banding, band)
            if parts > 1:
                mine = keys >> shift == np.uint64(part)
                lines, keys = lines[mine], keys[mine]
            hashes.append(keys)
            documents.append(lines.astype(np.int64) + self.corpus.lines[number])
        return np.concatenate(hashes), np.concatenate(documents)


def groups_of_equals(
    hashes: npt.NDArray[np.uint64], documents: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Documents whose hash another has too.

    Args:
        hashes: [m] one for each document.
        documents: [m] their numbers, ascending.

    Returns:
        [k] members, group after group, ascending in each; [g] sizes of the groups.
    """
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    bounds = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    sizes = np.diff(bounds) if len(hashes) else np.empty(0, np.int64)
    several = sizes > 1
    return documents[order[np.repeat(several, sizes)]], sizes[several]


def find_candidates(
    work: WorkFolder, banding: Banding, workers: int, memory: int
) -> Iterator[tuple[int, int]]:
    """Find the groups of all bands, and which lines of each file are in any.

    Yields:
        (band, number of groups) as each is done.
    """
    corpus = Corpus.of(work)
    workers = min(workers, banding.bands)
    search = CandidateSearch(work, corpus, banding, memory // workers)
    with OrderedPool(search, workers) as pool:
        yield from enumerate(pool.map(range(banding.bands), lambda _: 1, workers))
    suspected = np.zeros(corpus.lines[-1], np.bool_)
    for band in range(banding.bands):
        suspected[read_groups(work, band)[0]] = True
    for number in range(len(work.inputs)):
        lines = np.flatnonzero(suspected[corpus.lines[number] : corpus.lines[number + 1]])
        write_array(work.file("suspects", number, ".npy"), lines)


def read_groups(work: WorkFolder, band: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Members and sizes of the groups of a band, mapped and not read."""
    members, sizes = (
        np.memmap(path, np.int64, "r") if path.stat().st_size else np.empty(0, np.int64)
        for path in (work.file("groups", band, ".members"), work.file("groups", band, ".sizes"))
    )
    return members, sizes
