"""The corpus without what deduplication drops: lines copied byte for byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.core.tokenizers.corpus import Chunk
from megatron.corpora.jobs import Job
from megatron.corpora.output import complete_or_absent
from megatron.corpora.work_folder import WorkFolder, read_array, read_json


class Copied(NamedTuple):
    """Some lines after filtering."""

    lines: bytes
    """Those that are kept."""
    kept: int
    """Their number."""
    dropped: int
    """Near-duplicates among the others."""


@dataclass(frozen=True)
class FilterWork:
    """Copies each input without its near-duplicates, its blank lines and the lines that could not be used."""

    work: WorkFolder
    """Where the stages before have written what is dropped."""

    def prepare(self) -> None:
        """Nothing is needed."""

    def chunk(self, chunk: Chunk) -> Copied:
        """Choose among some lines."""
        number = self.work.numbers[chunk.path]
        before, count = chunk.first_line - 1, len(chunk.lines)
        dropped = read_array(self.work.file("dropped", number, ".npy"))
        first, last = np.searchsorted(dropped, (before, before + count))
        unwanted = set((dropped[first:last] - before).tolist())
        near_duplicates = len(unwanted)
        bad = read_json(self.work.file("signatures", number, ".json"))["bad_lines"]
        unwanted.update(line - before for line in bad)
        kept = [line for place, line in enumerate(chunk.lines) if place not in unwanted and line.strip()]
        if kept and not kept[-1].endswith(b"\n"):
            kept[-1] += b"\n"
        return Copied(b"".join(kept), len(kept), near_duplicates)

    def collect(self, job: Job, results: Iterator[Copied]) -> dict[str, Any]:
        """Write what is kept."""
        kept, dropped = 0, 0
        with complete_or_absent(job.output) as file:
            for result in results:
                file.write(result.lines)
                kept += result.kept
                dropped += result.dropped
        return {"kept": kept, "dropped": dropped}
