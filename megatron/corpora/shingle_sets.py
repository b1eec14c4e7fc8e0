"""The n-grams of documents as sets, for those that may have a near-duplicate.

A set is kept as sorted 64-bit hashes, so the similarity of two documents is exact but for the chance that two
n-grams of theirs share a hash: 1e-13 for documents of a thousand words.
"""

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.corpus import Chunk
from megatron.corpora.jobs import Job
from megatron.corpora.json_lines import text_on_line
from megatron.corpora.output import complete_or_absent
from megatron.corpora.signatures import Shingling
from megatron.corpora.words import compiled, ngrams
from megatron.corpora.work_folder import WorkFolder, read_array, write_array


class Sets(NamedTuple):
    """Sets of the documents of some lines."""

    hashes: npt.NDArray[np.uint64]
    """[t] the sets, one after another, each ascending."""
    sizes: npt.NDArray[np.int64]
    """[m] their sizes."""


@dataclass(frozen=True)
class SetWork:
    """Writes the sets of the suspected documents of each input file, in their order."""

    work: WorkFolder
    """Where suspects are and sets go."""
    key: str
    """Key of the text."""
    shingling: Shingling
    """What a document is as a set."""

    def prepare(self) -> None:
        """Compile."""
        ngrams(["a"], self.shingling.size, self.shingling.unit, short=True)

    def chunk(self, chunk: Chunk) -> Sets:
        """Sets of the suspected lines among some."""
        suspects = read_array(self.work.file("suspects", self.work.numbers[chunk.path], ".npy"))
        before = chunk.first_line - 1
        first, last = np.searchsorted(suspects, (before, before + len(chunk.lines)))
        texts = [text_on_line(chunk.lines[line - before], self.key) for line in suspects[first:last]]
        found = ngrams([text or "" for text in texts], self.shingling.size, self.shingling.unit, short=True)
        sets = [np.unique(part) for part in np.split(found.hashes, found.offsets[1:-1])] if texts else []
        return Sets(
            np.concatenate(sets) if sets else np.empty(0, np.uint64),
            np.array([len(s) for s in sets], np.int64),
        )

    def collect(self, job: Job, results: Iterator[Sets]) -> dict[str, Any]:
        """Write them; their sizes come last.

        Raises:
            ValueError: if the file has changed.
        """
        sizes = []
        with complete_or_absent(job.output) as file:
            for result in results:
                file.write(result.hashes.tobytes())
                sizes.append(result.sizes)
        joined = np.concatenate(sizes) if sizes else np.empty(0, np.int64)
        suspects = read_array(self.work.file("suspects", job.number, ".npy"))
        if len(joined) != len(suspects):
            raise ValueError(f"{job.inputs[0]}: has fewer lines than when its signatures were made")
        write_array(job.output.with_suffix(".npy"), joined)
        return {"suspects": len(joined), "ngrams": int(joined.sum())}


class SetReader:
    """The sets of all suspected documents, read where they lie."""

    def __init__(self, work: WorkFolder, lines_before: npt.NDArray[np.int64]) -> None:
        work.require("sets", ".npy", "sets")
        self._paths = [work.file("sets", number, ".bin") for number in range(len(work.inputs))]
        counts, offsets, suspects = [0], [], []
        for number, path in enumerate(self._paths):
            sizes = read_array(path.with_suffix(".npy"))
            offsets.append(np.concatenate(([0], np.cumsum(sizes))))
            suspects.append(read_array(work.file("suspects", number, ".npy")) + lines_before[number])
            counts.append(counts[-1] + len(sizes))
        self.suspects = np.concatenate(suspects)
        """[m] numbers of the suspected documents, ascending."""
        self._before = counts
        self._offsets = offsets

    def read(self, suspect: int) -> npt.NDArray[np.uint64]:
        """The set of the document ``suspects[suspect]``, ascending."""
        number = bisect.bisect_right(self._before, suspect) - 1
        place = suspect - self._before[number]
        first, last = self._offsets[number][place : place + 2]
        return self._mapped(number)[first:last]

    @functools.lru_cache(maxsize=512)  # noqa: B019 - a reader lives as long as its stage
    def _mapped(self, number: int) -> npt.NDArray[np.uint64]:
        return np.asarray(np.memmap(self._paths[number], np.uint64, "r"))  # a plain array is sliced faster


@compiled
def common(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> int:
    """Number of elements that two ascending arrays have in common."""
    place, other, count = 0, 0, 0
    while place < len(first) and other < len(second):
        if first[place] == second[other]:
            count += 1
            place += 1
            other += 1
        elif first[place] < second[other]:
            place += 1
        else:
            other += 1
    return count


def jaccard(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> float:
    """Jaccard similarity of two sets, given as ascending arrays of at least one element."""
    both = int(common(first, second))
    return both / (len(first) + len(second) - both)
