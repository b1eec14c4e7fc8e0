"""From candidate pairs to clusters: what is alike above the threshold is connected.

What comes out does not depend on the order in which pairs are looked at, so neither on the number of workers:
a pair is left out only if its documents are known to be connected already.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.ordered_pool import OrderedPool
from megatron.corpora.candidates import Corpus, read_groups
from megatron.corpora.output import complete_or_absent
from megatron.corpora.shingle_sets import SetReader, common, jaccard
from megatron.corpora.signatures import Banding
from megatron.corpora.words import compiled
from megatron.corpora.work_folder import WorkFolder, write_array

_BYTES_PER_MEMBER: Final = 64
"""Of a slice of the groups while it is compared."""
_SLICES_PER_WORKER: Final = 4
_REPORTED_TOGETHER: Final = 4096
"""Dropped documents whose similarities a worker takes at a time."""


def root_in(parents: Any, member: int) -> int:
    """The first member of a member's set, in a union-find; paths are halved on the way."""
    while parents[member] != member:
        parents[member] = parents[parents[member]]
        member = parents[member]
    return member


root_of = compiled(root_in)
"""The same for an array."""


@compiled
def connect(
    parents: npt.NDArray[np.int64], first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]
) -> None:
    """Unite the sets of each two members; the root of a set is its smallest member."""
    for edge in range(len(first)):
        one, other = root_of(parents, first[edge]), root_of(parents, second[edge])
        parents[max(one, other)] = min(one, other)


def _compile() -> None:
    """Compile what workers use, once and not in each."""
    empty = np.empty(0, np.uint64)
    empty.flags.writeable = False  # as sets are that are read from files
    common(empty, empty)


@dataclass(frozen=True)
class Verification:
    """Compares the documents of some groups."""

    work: WorkFolder
    """Where the groups are."""
    bands: int
    """Number of bands."""
    sets: SetReader
    """The documents as sets."""
    threshold: float
    """Similarity above which two documents are duplicates."""
    slices: int
    """The groups are divided into so many slices by their first member, so that bands with the same documents
    meet in one slice."""

    def __call__(self, number: int) -> npt.NDArray[np.int64]:
        """[2, e] pairs of suspected documents that connect what is alike in one slice, without circles."""
        members, sizes = self._slice(number)
        suspects, local = np.unique(members, return_inverse=True)
        places = np.searchsorted(self.sets.suspects, suspects).tolist()
        parents = list(range(len(suspects)))
        edges: list[tuple[int, int]] = []
        end = 0
        for size in sizes.tolist():
            group = local[end : end + size].tolist()
            end += size
            edges += self._compare(group, places, parents)
        return np.array(edges, np.int64).reshape(-1, 2).T

    def _slice(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        all_members, all_sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for band in range(self.bands):
            members, sizes = read_groups(self.work, band)
            if not len(sizes):
                continue
            firsts = members[np.cumsum(sizes) - sizes]
            mine = firsts % self.slices == number
            all_members.append(members[np.repeat(mine, sizes)])
            all_sizes.append(sizes[mine])
        return np.concatenate(all_members), np.concatenate(all_sizes)

    def _compare(self, group: list[int], places: list[int], parents: list[int]) -> Iterator[tuple[int, int]]:
        """Compare every two of a group that are not connected yet, and connect those that are alike."""
        for position, member in enumerate(group):
            mine = None
            for other in group[:position]:
                root, other_root = root_in(parents, member), root_in(parents, other)
                if root == other_root:
                    continue
                mine = self.sets.read(places[member]) if mine is None else mine
                theirs = self.sets.read(places[other])
                if min(len(mine), len(theirs)) <= self.threshold * max(len(mine), len(theirs)):
                    continue  # no two sets of such sizes are alike enough
                if jaccard(mine, theirs) > self.threshold:
                    parents[max(root, other_root)] = min(root, other_root)
                    yield places[member], places[other]


@dataclass(frozen=True)
class Similarities:
    """Takes the similarity of dropped documents to those that are kept in their stead."""

    sets: SetReader
    """The documents as sets."""
    pairs: npt.NDArray[np.int64]
    """[2, d] dropped and kept, as suspects."""

    def __call__(self, start: int) -> list[float]:
        """Those of some pairs."""
        dropped, kept = self.pairs[:, start : start + _REPORTED_TOGETHER].tolist()
        return [
            jaccard(self.sets.read(one), self.sets.read(other))
            for one, other in zip(dropped, kept, strict=True)
        ]


@dataclass(frozen=True)
class ClusterSearch:
    """The last steps: clusters, a report of them, and what each file loses."""

    work: WorkFolder
    """Where groups and sets are."""
    banding: Banding
    """The bands."""
    threshold: float
    """Similarity above which two documents are duplicates."""
    workers: int
    """Processes."""
    memory: int
    """Bytes for groups that are being compared."""

    def run(self, report: Path | None, advance: Callable[[int], None]) -> dict[str, Any]:
        """Find the clusters and keep the first document of each.

        Args:
            report: JSON lines, one for each dropped document: itself, the one kept, and their similarity.
                That may lie below the threshold, where a third document connects the two.
            advance: is told of steps that are done, of :meth:`steps`.

        Returns:
            Counts.
        """
        corpus = Corpus.of(self.work)
        sets = SetReader(self.work, corpus.lines)
        parents = np.arange(len(sets.suspects))
        slices = self.steps()
        _compile()
        verify = Verification(self.work, self.banding.bands, sets, self.threshold, slices)
        with OrderedPool(verify, self.workers) as pool:
            for edges in pool.map(range(slices), lambda _: 1, self.workers):
                connect(parents, *edges)
                advance(1)
        roots = np.array([root_of(parents, one) for one in range(len(parents))], np.int64)
        dropped = np.flatnonzero(roots != np.arange(len(roots)))
        if report is not None:
            self._report(report, sets, corpus, np.stack((dropped, roots[dropped])))
        documents = sets.suspects[dropped]
        for number in range(len(self.work.inputs)):
            first, last = corpus.lines[number : number + 2]
            mine = documents[np.searchsorted(documents, first) : np.searchsorted(documents, last)]
            write_array(self.work.file("dropped", number, ".npy"), mine - first)
        return {
            "documents": int(corpus.documents.sum()),
            "suspects": len(sets.suspects),
            "clusters": len(np.unique(roots[dropped])),
            "dropped": len(dropped),
        }

    def steps(self) -> int:
        """Slices of the groups: enough for all workers, and each small enough for the memory."""
        members = sum(len(read_groups(self.work, band)[0]) for band in range(self.banding.bands))
        needed = members * _BYTES_PER_MEMBER * self.workers // max(self.memory, 1)
        return max(self.workers * _SLICES_PER_WORKER, needed + 1)

    def _report(self, path: Path, sets: SetReader, corpus: Corpus, pairs: npt.NDArray[np.int64]) -> None:
        starts = range(0, pairs.shape[1], _REPORTED_TOGETHER)
        similar = Similarities(sets, pairs)
        with complete_or_absent(path) as file, OrderedPool(similar, self.workers) as pool:
            for start, found in zip(starts, pool.map(starts, lambda _: 1, 2 * self.workers), strict=True):
                dropped, kept = sets.suspects[pairs[:, start : start + _REPORTED_TOGETHER]].tolist()
                for one, other, similarity in zip(dropped, kept, found, strict=True):
                    line = {
                        "kept": self._place(corpus, other),
                        "dropped": self._place(corpus, one),
                        "jaccard": round(similarity, 4),
                    }
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _place(self, corpus: Corpus, document: int) -> dict[str, Any]:
        number = int(np.searchsorted(corpus.lines, document, side="right")) - 1
        return {"file": str(self.work.inputs[number]), "line": document - int(corpus.lines[number]) + 1}
