"""What the corpus tools share: their common flags, and jobs done on this machine or a cluster, with a bar."""

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from tqdm import tqdm

from megatron.core.checkpoint.files import replace_durably
from megatron.core.config import flag
from megatron.core.tokenizers.corpus import input_files
from megatron.corpora.engines import run_on_cluster
from megatron.corpora.jobs import Job, Shard, Work, add_reports, run_local
from megatron.corpora.output import output_names


@dataclass(frozen=True)
class InputConfig:
    """The corpus."""

    input: tuple[str, ...]
    """Files of the corpus, in order; a pattern such as part-*.jsonl gives its files sorted."""
    json_key: str = flag("text", aliases=("--json-keys",))
    """Key of a document's text."""
    skip_bad_lines: bool = False
    """Count and leave out lines that cannot be used, instead of stopping at the first."""

    def files(self) -> tuple[Path, ...]:
        """The input files.

        Raises:
            ValueError: naming those that are not there, or that are given twice.
        """
        files = tuple(input_files(self.input))
        for path, count in Counter(files).items():
            if count > 1:
                raise ValueError(f"--input: {path} is given {count} times")
        return files


@dataclass(frozen=True)
class OutputConfig:
    """Where the corpus goes that comes out."""

    output: str | None = None
    """One file for all that is kept; .gz and .zst are compressed."""
    output_folder: str | None = None
    """A folder with one file for each input, named like it."""

    def jobs(self, files: Sequence[Path], share: Shard) -> list[Job]:
        """What to read for each output, in all shards.

        Raises:
            ValueError: unless exactly one of the two is given, or if an output would be an input, or belong
                to several shards.
        """
        if (self.output is None) == (self.output_folder is None):
            raise ValueError("give one of --output and --output-folder")
        if self.output is None:
            names = output_names(files, Path(self.output_folder or ""))
            return [Job((path,), name, at) for at, (path, name) in enumerate(zip(files, names, strict=True))]
        output = Path(self.output)
        if share.count > 1:
            raise ValueError(
                f"--output {output} --shard {share.index}/{share.count}: shards are shares of the files, and "
                "one output takes them all; give --output-folder, or leave --shard out"
            )
        if output.is_dir():
            raise ValueError(f"--output {output}: is a folder; --output-folder takes one")
        if output.resolve() in {path.resolve() for path in files}:
            raise ValueError(f"--output {output}: is one of the inputs, which would be written over")
        if output.suffix in (".bz2", ".parquet"):
            raise ValueError(
                f"--output {output}: not written in that form; give a name in .jsonl, .gz or .zst"
            )
        return [Job(tuple(files), output)]


@dataclass(frozen=True)
class RunConfig:
    """Who does the work. What comes out does not depend on it."""

    workers: int | None = None
    """Processes on this machine; default: one for each CPU that this process may use."""
    shard: str | None = None
    """i/n, i from 0: do every n-th input file only, from the i-th on; for arrays of jobs on a cluster."""
    engine: Literal["local", "ray", "dask"] = "local"
    """Where input files are worked on: by processes here, or each as a task of Ray or Dask."""
    engine_address: str | None = None
    """Address of the Ray cluster or of Dask's scheduler; default: one on this machine."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers}: must be at least 1")
        if self.engine == "local" and self.engine_address is not None:
            raise ValueError("--engine-address has no meaning with --engine local; say --engine ray or dask")
        _ = self.share

    @property
    def share(self) -> Shard:
        """What ``--shard`` says; without it, all."""
        return Shard() if self.shard is None else Shard.parse(self.shard)

    @property
    def processes(self) -> int:
        """Worker processes."""
        return self.workers or len(os.sched_getaffinity(0))


def run_jobs(
    config: RunConfig,
    work: Work[Any],
    jobs: Sequence[Job],
    what: str,
    is_done: Callable[[Job], bool] = lambda _: False,
) -> dict[str, Any]:
    """Do this shard's share of some jobs; what came of them, added up.

    Args:
        config: who does it.
        work: what to do.
        jobs: those of all shards, in order.
        what: a word for the progress bar.
        is_done: which jobs an earlier run has done.

    Raises:
        ValueError: if an input cannot be used.
        WorkerDiedError: if a worker ends before its work does.
    """
    share = config.share.of(len(jobs))
    if not share:
        note = f"--shard {config.shard}: no file of {len(jobs)} is for this shard, nothing to do\n"
        sys.stderr.write(note)
    mine = [jobs[number] for number in share if not is_done(jobs[number])]
    total: dict[str, Any] = {}
    if config.engine == "local":
        size = sum(path.stat().st_size for job in mine for path in job.inputs)
        with progress_bar(size, "B", what) as bar:
            for report in run_local(work, mine, config.processes, bar.update):
                add_reports(total, report)
    else:
        with progress_bar(len(mine), "files", what) as bar:
            for report in run_on_cluster(config.engine, config.engine_address, work, mine, bar.update):
                add_reports(total, report)
    return total


@contextlib.contextmanager
def progress_bar(total: int, unit: str, what: str) -> Iterator["tqdm[NoReturn]"]:
    """A bar on standard error; a log file gets a line of it twice a minute."""
    tqdm.monitor_interval = 0  # no thread of tqdm's beside the forked workers
    interval = 0.2 if sys.stderr.isatty() else 30.0
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", mininterval=interval, desc=what) as bar:
        yield bar


def show(report: dict[str, Any], path: str | None) -> None:
    """Write a report to standard output, and to a file if one is named."""
    text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_durably(Path(path), text.encode())


def unwind_when_terminated() -> None:
    """Let SIGTERM end the program by an exception, so that nothing half-written is left behind.

    A worker that is ended before it has a handler of its own just ends.
    """
    process, code = os.getpid(), 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code) if os.getpid() == process else os._exit(code))
