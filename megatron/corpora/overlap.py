"""What a corpus has in common with test sets, counted, and taken out of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.corpus import Chunk
from megatron.core.tokenizers.documents import BadLine
from megatron.corpora.grams import GramTable
from megatron.corpora.jobs import Job, add_reports, each_line, refuse_bad_lines
from megatron.corpora.json_lines import text_on_line, with_text
from megatron.corpora.output import complete_or_absent
from megatron.corpora.work_folder import WorkFolder, read_array, read_json, write_array, write_json

Remove = Literal["nothing", "documents", "windows"]


@dataclass(frozen=True)
class Removal:
    """What is taken out of the corpus."""

    remove: Remove = "nothing"
    """Nothing; whole documents that hold n-grams of a test set; or windows around these, which cuts a
    document into pieces (Brown et al. 2020, Language Models are Few-Shot Learners, appendix C)."""
    min_matches: int = 1
    """Places with such an n-gram that a document has at least if it is to be touched."""
    window: int = 200
    """Characters on each side of an n-gram that go with it."""
    min_piece: int = 200
    """Characters in a piece, at least; shorter ones go too."""
    max_pieces: int = 10
    """A document that would come in more pieces than this goes as a whole."""

    def pieces(self, text: str, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[str]:
        """What is left of a text.

        Args:
            text: the document's.
            starts: [m] where n-grams of test sets begin, ascending.
            ends: [m] where they end, ascending.
        """
        if len(starts) < self.min_matches:
            return [text]
        if self.remove == "documents":
            return []
        pieces, begin = [], 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if start - self.window > begin:
                pieces.append(text[begin : start - self.window])
            begin = max(begin, end + self.window)
        pieces = [piece for piece in (*pieces, text[begin:]) if len(piece) >= max(self.min_piece, 1)]
        return pieces if len(pieces) <= self.max_pieces else []


class Searched(NamedTuple):
    """Some lines after the search."""

    found: npt.NDArray[np.int64]
    """Numbers of the n-grams found, each once."""
    lines: bytes
    """What is kept of the lines."""
    report: dict[str, Any]
    """Counts."""
    bad: list[BadLine]
    """Lines that cannot be used."""


@dataclass(frozen=True)
class OverlapWork:
    """Looks for the n-grams of test sets in each input, and writes which it has found, and what is kept."""

    work: WorkFolder
    """Where it goes which n-grams each input holds."""
    table: GramTable
    """The n-grams."""
    key: str
    """Key of the text."""
    removal: Removal
    """What is taken out."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be used."""

    def prepare(self) -> None:
        """Compile."""
        self.table.compile()

    def chunk(self, chunk: Chunk) -> Searched:
        """Search some lines."""
        lines, bad = each_line(chunk, lambda line: text_on_line(line, self.key))
        texts = [line.value for line in lines]
        matches = self.table.find(texts)
        bounds = np.searchsorted(matches.texts, np.arange(len(texts) + 1))
        report = _empty_report() | {"documents": len(texts), "skipped_bad_lines": len(bad)}
        kept: list[bytes] = []
        for number, line in enumerate(lines):
            first, last = bounds[number : number + 2]
            report["documents_with_overlap"] += bool(last > first)
            if self.removal.remove == "nothing":
                continue
            pieces = self.removal.pieces(line.value, matches.starts[first:last], matches.ends[first:last])
            raw = chunk.lines[line.number - chunk.first_line]
            whole = pieces == [line.value]
            kept += [raw if whole else with_text(raw, self.key, piece) for piece in pieces]
            report["documents_dropped"] += not pieces
            report["documents_cut"] += bool(pieces) and not whole
            report["documents_written"] += len(pieces)
        output = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept)
        return Searched(np.unique(matches.grams), output, report, bad)

    def collect(self, job: Job, results: Iterator[Searched]) -> dict[str, Any]:
        """Write what is kept, if anything is removed, and then what was found.

        Raises:
            ValueError: at the first line that cannot be used, unless those are to be skipped.
        """
        found, report = np.zeros(self.table.count, np.bool_), _empty_report()
        if self.removal.remove == "nothing":
            for _ in self._take(results, found, report):
                pass
        else:
            with complete_or_absent(job.output) as file:
                for lines in self._take(results, found, report):
                    file.write(lines)
        write_array(self.work.file("found", job.number, ".npy"), np.packbits(found))
        write_json(self.work.file("found", job.number, ".json"), report)
        return report

    def _take(
        self, results: Iterator[Searched], found: npt.NDArray[np.bool_], report: dict[str, Any]
    ) -> Iterator[bytes]:
        for result in results:
            refuse_bad_lines(result.bad, self.skip_bad_lines)
            found[result.found] = True
            add_reports(report, result.report)
            yield result.lines


def _empty_report() -> dict[str, Any]:
    return {
        "documents": 0,
        "documents_with_overlap": 0,
        "documents_dropped": 0,
        "documents_cut": 0,
        "documents_written": 0,
        "skipped_bad_lines": 0,
    }


def overlap_report(work: WorkFolder, table: GramTable) -> dict[str, Any]:
    """How much of each test set the whole corpus holds, and how much of the corpus has anything of them.

    Raises:
        ValueError: if an input was not searched yet.
    """
    work.require("found", ".json", "search")
    found, corpus = np.zeros(table.count, np.bool_), _empty_report()
    for number in range(len(work.inputs)):
        bits = np.unpackbits(read_array(work.file("found", number, ".npy")), count=table.count)
        found |= bits.astype(np.bool_)
        add_reports(corpus, read_json(work.file("found", number, ".json")))
    return {"ngram_size": table.size, "test_sets": table.report(found), "corpus": corpus}
