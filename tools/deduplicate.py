"""Take near-duplicates out of a corpus: of documents that are alike, the first in input order is kept.

Documents are alike if the Jaccard similarity of their n-grams is above the threshold. MinHash signatures in
bands find candidates, each pair is then compared exactly, and what the pairs connect is a cluster. The work
goes through five stages, which leave their files in --work-folder: signatures, candidates, sets, clusters,
filter. On one machine all run one after another, and a run that was interrupted goes on where it was. On many
machines signatures, sets and filter are run by --stage and --shard as arrays of jobs, candidates and clusters
on one machine in between.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.corpora.candidates import find_candidates
from megatron.corpora.clusters import ClusterSearch
from megatron.corpora.filtering import FilterWork
from megatron.corpora.jobs import Job
from megatron.corpora.running import (
    InputConfig,
    OutputConfig,
    RunConfig,
    progress_bar,
    run_jobs,
    show,
    unwind_when_terminated,
)
from megatron.corpora.shingle_sets import SetWork
from megatron.corpora.signatures import ALGORITHM, Banding, Shingling, SignatureWork
from megatron.corpora.work_folder import WorkFolder
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser, add_flags, build

STAGES = ("signatures", "candidates", "sets", "clusters", "filter")
MIN_RECALL = 0.9


@dataclass(frozen=True)
class DeduplicateConfig:
    """What is alike, and how it is found."""

    work_folder: str
    """Folder for what the stages leave for each other; the same for all stages and shards."""
    stage: Literal["all", "signatures", "candidates", "sets", "clusters", "filter"] = "all"
    """What to do; all stages follow one another."""
    threshold: float = 0.7
    """Jaccard similarity above which two documents are alike."""
    shingle_unit: Literal["words", "characters"] = "words"
    """What n-grams are made of; characters for scripts without spaces between words."""
    shingle_size: int = 5
    """n: words or characters in a row."""
    bands: int = 25
    """Bands of a signature; more find more of the pairs near the threshold."""
    rows: int = 5
    """Hashes in a band; more make fewer candidates."""
    memory: int = 2048
    """MiB for sorting and comparing, all workers together."""
    clusters: str | None = None
    """File for the clusters: a JSON line for each dropped document, with the one kept and their
    similarity."""
    report: str | None = None
    """File for the report, in JSON; it is printed too."""

    def __post_init__(self) -> None:
        for name in ("shingle_size", "bands", "rows", "memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if not 0 < self.threshold < 1:
            raise ValueError(f"--threshold {self.threshold}: must lie between 0 and 1")
        recall = self.banding.recall(self.threshold)
        if recall < MIN_RECALL:
            raise ValueError(
                f"--bands {self.bands} --rows {self.rows}: would find only {recall:.0%} of the pairs at "
                f"--threshold {self.threshold}; give more bands, or fewer rows"
            )

    @property
    def banding(self) -> Banding:
        """The bands."""
        return Banding(self.bands, self.rows)

    @property
    def shingling(self) -> Shingling:
        """The n-grams."""
        return Shingling(self.shingle_unit, self.shingle_size)

    @property
    def memory_bytes(self) -> int:
        """Bytes for sorting and comparing."""
        return self.memory << 20


class Stages:
    """The five stages, each a method."""

    def __init__(
        self, corpus: InputConfig, config: DeduplicateConfig, run: RunConfig, outputs: list[Job]
    ) -> None:
        self._corpus, self._config, self._run, self._outputs = corpus, config, run, outputs
        settings = {
            "key": corpus.json_key,
            "shingles": [config.shingle_unit, config.shingle_size],
            "bands": [config.bands, config.rows],
            "skip_bad_lines": corpus.skip_bad_lines,
            "algorithm": ALGORITHM,
        }
        self._work = WorkFolder(Path(config.work_folder), corpus.files(), settings)
        self._work.open()

    def signatures(self) -> dict[str, Any]:
        """Signatures of every document."""
        config, corpus = self._config, self._corpus
        work = SignatureWork(corpus.json_key, config.shingling, config.banding, corpus.skip_bad_lines)
        return run_jobs(self._run, work, self._jobs("signatures"), "signatures", done_when(".json"))

    def candidates(self) -> dict[str, Any]:
        """Groups of documents that share a band."""
        config, groups = self._config, 0
        with progress_bar(config.bands, "bands", "candidates") as bar:
            search = find_candidates(self._work, config.banding, self._run.processes, config.memory_bytes)
            for _, found in search:
                groups += found
                bar.update()
        return {"groups": groups}

    def sets(self) -> dict[str, Any]:
        """The n-grams of documents that are in any group."""
        self._work.require("suspects", ".npy", "candidates")
        work = SetWork(self._work, self._corpus.json_key, self._config.shingling)
        return run_jobs(self._run, work, self._jobs("sets"), "sets", done_when(".npy"))

    def clusters(self) -> dict[str, Any]:
        """Comparisons, and what they connect."""
        config = self._config
        self._work.require("signatures", ".json", "signatures")
        self._work.require("sets", ".npy", "sets")
        search = ClusterSearch(
            self._work, config.banding, config.threshold, self._run.processes, config.memory_bytes
        )
        with progress_bar(search.steps(), "slices", "clusters") as bar:
            return search.run(Path(config.clusters) if config.clusters else None, bar.update)

    def filter(self) -> dict[str, Any]:
        """The corpus without what is dropped."""
        self._work.require("dropped", ".npy", "clusters")
        return run_jobs(self._run, FilterWork(self._work), self._outputs, "filter")

    def _jobs(self, kind: str) -> list[Job]:
        """One for each input."""
        inputs = enumerate(self._work.inputs)
        return [Job((path,), self._work.file(kind, number, ".bin"), number) for number, path in inputs]


def done_when(suffix: str) -> Callable[[Job], bool]:
    """Tells of a job whether the file that it writes last, beside its output, is there."""
    return lambda job: job.output.with_suffix(suffix).exists()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool."""
    parser = FlagParser(prog="deduplicate.py", description=__doc__)
    for section in (InputConfig, OutputConfig, DeduplicateConfig, RunConfig):
        add_flags(parser, section)
    namespace = parser.parse_args(arguments)
    try:
        corpus, config, run = (build(cls, namespace) for cls in (InputConfig, DeduplicateConfig, RunConfig))
        if run.shard is not None and config.stage in ("all", "candidates", "clusters"):
            raise ValueError(
                f"--shard has no meaning with --stage {config.stage}, which takes all files at once"
            )
        needs_output = config.stage in ("all", "filter")
        outputs = build(OutputConfig, namespace).jobs(corpus.files(), run.share) if needs_output else []
        stages = Stages(corpus, config, run, outputs)
    except ValueError as error:
        parser.error(str(error))
    unwind_when_terminated()
    names = STAGES if config.stage == "all" else (config.stage,)
    show({name: getattr(stages, name)() for name in names}, config.report)


if __name__ == "__main__":
    run_as_program(main)
