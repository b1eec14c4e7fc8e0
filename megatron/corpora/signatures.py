"""MinHash signatures of documents, by rensa, cut into bands: what documents that are alike have in common.

Two documents with Jaccard similarity *s* share a given band of *r* rows with probability s^r, and at least
one of *b* bands with 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from megatron.core.tokenizers.corpus import Chunk
from megatron.core.tokenizers.documents import BadLine
from megatron.corpora.jobs import Job, each_line, refuse_bad_lines
from megatron.corpora.json_lines import text_on_line
from megatron.corpora.output import complete_or_absent
from megatron.corpora.words import Unit, ngrams
from megatron.corpora.work_folder import write_json

BLOCK_DOCUMENTS: Final = 1 << 16
"""Documents whose bands lie together in a file, one band after another."""
ALGORITHM: Final = f"rensa {RMinHash.ALGORITHM_VERSION}, 1"
"""What signatures depend on beyond their settings: those of another kind cannot be compared."""
_SEED: Final = 1
_MULTIPLIER: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


@dataclass(frozen=True)
class Shingling:
    """What a document is as a set: the n-grams in it."""

    unit: Unit = "words"
    """What is counted."""
    size: int = 5
    """n."""


@dataclass(frozen=True)
class Banding:
    """Bands of a signature."""

    bands: int = 25
    """b."""
    rows: int = 5
    """r, hashes in each."""

    @property
    def permutations(self) -> int:
        """Hashes in a signature: a power of two, for which rensa is fastest; a few of them may go unused."""
        return 1 << (self.bands * self.rows - 1).bit_length()

    def recall(self, similarity: float) -> float:
        """How probable it is that two documents of a Jaccard similarity share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


class Signatures(NamedTuple):
    """What some lines gave."""

    lines: npt.NDArray[np.uint64]
    """[m] numbers of the lines, from 0, that hold a document with any n-gram."""
    bands: npt.NDArray[np.uint64]
    """[b, m] one hash for each band."""
    num_lines: int
    """Lines, whatever they hold."""
    bad: list[BadLine]
    """Lines that cannot be used."""


def band_hashes(
    hashes: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64], banding: Banding
) -> npt.NDArray[np.uint64]:
    """[b, m] a 64-bit hash of each band of each document's signature.

    Args:
        hashes: [t] those of the n-grams, document after document, repeated or not.
        offsets: [m + 1] where each document's begin; none is empty.
        banding: the bands.
    """
    if len(offsets) == 1:
        return np.empty((banding.bands, 0), np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets.astype(np.uint64), banding.permutations, _SEED
    )
    signatures = np.array(matrix.to_rows(), dtype=np.uint64)
    rows = signatures[:, : banding.bands * banding.rows].reshape(-1, banding.bands, banding.rows)
    keys = np.zeros(rows.shape[:2], np.uint64)
    for row in range(banding.rows):
        keys = (keys ^ rows[:, :, row]) * _MULTIPLIER
        keys ^= keys >> _HALF
    return np.ascontiguousarray(keys.T)


@dataclass(frozen=True)
class SignatureWork:
    """Writes the band hashes of each input file: blocks of [1 + b, m], line numbers first."""

    key: str
    """Key of the text."""
    shingling: Shingling
    """What a document is as a set."""
    banding: Banding
    """The bands."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be used."""

    def prepare(self) -> None:
        """Compile."""
        ngrams(["a"], self.shingling.size, self.shingling.unit, short=True)

    def chunk(self, chunk: Chunk) -> Signatures:
        """Band hashes of some lines."""
        lines, bad = each_line(chunk, lambda line: text_on_line(line, self.key))
        found = ngrams([line.value for line in lines], self.shingling.size, self.shingling.unit, short=True)
        some = np.diff(found.offsets) > 0
        numbers = np.array([line.number - 1 for line in lines], np.uint64)[some]
        offsets = np.append(found.offsets[:-1][some], len(found.hashes))
        return Signatures(numbers, band_hashes(found.hashes, offsets, self.banding), len(chunk.lines), bad)

    def collect(self, job: Job, results: Iterator[Signatures]) -> dict[str, Any]:
        """Write them; the small file beside, which says how many there are, comes last.

        Raises:
            ValueError: at the first line that cannot be used, unless those are to be skipped.
        """
        num_lines, documents, bad = 0, 0, []
        with complete_or_absent(job.output) as file:
            waiting: list[npt.NDArray[np.uint64]] = []
            for result in results:
                refuse_bad_lines(result.bad, self.skip_bad_lines)
                bad += [line.line - 1 for line in result.bad]
                num_lines += result.num_lines
                documents += len(result.lines)
                waiting.append(np.concatenate((result.lines[None], result.bands)))
                waiting = _write_blocks(file, waiting)
            file.write(np.concatenate(waiting, axis=1).tobytes() if waiting else b"")
        counts = {"lines": num_lines, "documents": documents}
        write_json(job.output.with_suffix(".json"), {**counts, "bad_lines": bad})
        return {**counts, "skipped_bad_lines": len(bad)}


def _write_blocks(file: Any, waiting: list[npt.NDArray[np.uint64]]) -> list[npt.NDArray[np.uint64]]:
    """Write whole blocks; gives back what is left, as one array at most if there was enough for a block."""
    if sum(part.shape[1] for part in waiting) < BLOCK_DOCUMENTS:
        return waiting
    joined = np.concatenate(waiting, axis=1)
    whole = joined.shape[1] // BLOCK_DOCUMENTS * BLOCK_DOCUMENTS
    for start in range(0, whole, BLOCK_DOCUMENTS):
        file.write(joined[:, start : start + BLOCK_DOCUMENTS].tobytes())
    return [joined[:, whole:]]


def read_band(path: Path, documents: int, banding: Banding, band: int) -> npt.NDArray[np.uint64]:
    """[2, m] line numbers and hashes of one band of one file, reading only those.

    Args:
        path: what :class:`SignatureWork` has written.
        documents: m.
        banding: the bands.
        band: which.
    """
    rows = 1 + banding.bands
    if not documents:
        return np.empty((2, 0), np.uint64)
    whole = np.memmap(path, np.uint64, "r", shape=(rows * documents,))
    parts: Sequence[npt.NDArray[np.uint64]] = [
        whole[rows * start : rows * min(start + BLOCK_DOCUMENTS, documents)].reshape(rows, -1)[[0, 1 + band]]
        for start in range(0, documents, BLOCK_DOCUMENTS)
    ]
    return np.concatenate(parts, axis=1)
