"""Find what a corpus has in common with test sets, n-gram by n-gram, and take it out if asked.

An n-gram is n words in a row: runs of letters, digits and marks, in lower case, whatever stands between. The
report says for each test set what share of its n-grams, and of its documents, occurs in the corpus. Counts
are exact.
"""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.corpora.grams import GramTable, TestSet
from megatron.corpora.jobs import Job
from megatron.corpora.overlap import OverlapWork, Removal, overlap_report
from megatron.corpora.running import (
    InputConfig,
    OutputConfig,
    RunConfig,
    run_jobs,
    show,
    unwind_when_terminated,
)
from megatron.corpora.work_folder import WorkFolder, file_state
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser, add_flags, build


@dataclass(frozen=True)
class DecontaminateConfig:
    """What is looked for, and what is done about it."""

    test_sets: tuple[str, ...]
    """Test sets, each NAME=PATH or PATH: JSON lines, or plain text with a document a line."""
    test_json_keys: tuple[str, ...] = ("text",)
    """Keys of the texts in test sets that are JSON lines."""
    ngram_size: int = 8
    """n, in words."""
    remove: Literal["nothing", "documents", "windows"] = "nothing"
    """Only report; or drop the documents that hold n-grams of a test set; or cut these n-grams out with what
    is around them, so that a document becomes pieces."""
    min_matches: int = 1
    """Places with such n-grams that a document has at least if anything is taken from it."""
    window_characters: int = 200
    """With --remove windows: characters on each side of an n-gram that go with it."""
    min_piece_characters: int = 200
    """With --remove windows: shorter pieces go too."""
    max_pieces: int = 10
    """With --remove windows: a document that would come in more pieces is dropped."""
    stage: Literal["all", "search", "report"] = "all"
    """Search some inputs, or report what all searches have found, or both."""
    work_folder: str | None = None
    """Folder for what searches have found; needed with --shard, --stage and --engine."""
    report: str | None = None
    """File for the report, in JSON; it is printed too."""

    def __post_init__(self) -> None:
        for name in ("ngram_size", "min_matches", "max_pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("window_characters", "min_piece_characters"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    @property
    def removal(self) -> Removal:
        """What is taken out."""
        return Removal(
            self.remove, self.min_matches, self.window_characters, self.min_piece_characters, self.max_pieces
        )

    def sets(self) -> list[TestSet]:
        """The test sets.

        Raises:
            ValueError: if there is no such file, or two have one name.
        """
        sets = [TestSet.parse(text) for text in self.test_sets]
        if len({one.name for one in sets}) < len(sets):
            raise ValueError(f"--test-sets {' '.join(self.test_sets)}: two have one name; give NAME=PATH")
        return sets


@contextlib.contextmanager
def work_folder(
    config: DecontaminateConfig, corpus: InputConfig, sets: Sequence[TestSet]
) -> Iterator[WorkFolder]:
    """The folder that was named, or one that is gone afterwards."""
    removal = dataclasses.asdict(config.removal)
    settings = {
        "key": corpus.json_key,
        "names of test sets": [one.name for one in sets],
        "test set": [file_state(one.path) for one in sets],
        "test keys": list(config.test_json_keys),
        "n-grams": config.ngram_size,
        "removal": [removal[name] for name in sorted(removal)],
        "skip_bad_lines": corpus.skip_bad_lines,
    }
    with contextlib.ExitStack() as stack:
        named = config.work_folder
        path = named or stack.enter_context(tempfile.TemporaryDirectory(prefix="decontaminate."))
        work = WorkFolder(Path(path), corpus.files(), settings)
        work.open()
        yield work


def corpus_jobs(
    config: DecontaminateConfig, output: OutputConfig, corpus: InputConfig, run: RunConfig
) -> list[Job]:
    """One for each input; without removal they have no output.

    Raises:
        ValueError: if the output does not fit what is to be done.
    """
    files = corpus.files()
    if config.remove == "nothing":
        if output.output is not None or output.output_folder is not None:
            raise ValueError("--output and --output-folder have no meaning with --remove nothing")
        return [Job((path,), Path(), number) for number, path in enumerate(files)]
    if config.stage == "report":
        return []
    if output.output is not None and len(files) > 1:
        raise ValueError("--output takes one input; with several give --output-folder")
    return output.jobs(files, run.share)


def check(config: DecontaminateConfig, run: RunConfig) -> None:
    """See that the flags fit together.

    Raises:
        ValueError: if not.
    """
    if config.work_folder is None and (config.stage != "all" or run.engine != "local"):
        raise ValueError(
            f"--stage {config.stage} --engine {run.engine}: give --work-folder, on shared storage"
        )
    if run.shard is not None and config.stage != "search":
        raise ValueError(
            f"--shard has no meaning with --stage {config.stage}: say --stage search, then report"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool."""
    parser = FlagParser(prog="decontaminate.py", description=__doc__)
    for section in (InputConfig, OutputConfig, DecontaminateConfig, RunConfig):
        add_flags(parser, section)
    namespace = parser.parse_args(arguments)
    try:
        corpus, config, run = (build(cls, namespace) for cls in (InputConfig, DecontaminateConfig, RunConfig))
        check(config, run)
        jobs = corpus_jobs(config, build(OutputConfig, namespace), corpus, run)
        sets = config.sets()
        table = GramTable(sets, config.test_json_keys, config.ngram_size)
    except ValueError as error:
        parser.error(str(error))
    unwind_when_terminated()
    with work_folder(config, corpus, sets) as work:
        search = OverlapWork(work, table, corpus.json_key, config.removal, corpus.skip_bad_lines)
        if config.stage != "report":
            report = run_jobs(run, search, jobs, "searching")
        if config.stage != "search":
            report = overlap_report(work, table)
    show(report, config.report)


if __name__ == "__main__":
    run_as_program(main)
