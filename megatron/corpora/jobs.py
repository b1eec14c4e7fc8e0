"""Work on a corpus file by file: which files are whose, and the same work on one machine or on many.

A job takes some input files and writes some output, complete or absent. It does not depend on which machine
or how many processes do it, so neither does the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from megatron.core.tokenizers.corpus import Chunk, read_chunks
from megatron.core.tokenizers.documents import BadLine
from megatron.core.tokenizers.ordered_pool import OrderedPool

Result = TypeVar("Result")

MAX_BYTES_IN_FLIGHT: Final = 64 << 20
"""Text that has been read and of which nothing is written yet."""


@dataclass(frozen=True)
class Shard:
    """A share of the files: every ``count``-th, from the ``index``-th on."""

    index: int = 0
    """From 0."""
    count: int = 1
    """Number of shares."""

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """The shard that ``--shard 3/64`` means.

        Raises:
            ValueError: if it is no such thing.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ValueError(f"--shard {text}: two numbers i/n are wanted, i from 0 to n - 1, such as 0/64")
        return cls(int(index), int(count))

    def of(self, number: int) -> list[int]:
        """Which of ``number`` things are this shard's."""
        return list(range(self.index, number, self.count))


@dataclass(frozen=True)
class Job:
    """Some input files that make one output together."""

    inputs: tuple[Path, ...]
    """Files to read, in order."""
    output: Path
    """What to write."""
    number: int = 0
    """Its number among all jobs, whatever the shard."""


class Work(Protocol[Result]):
    """What is done with each job: chunk by chunk, and then all chunks of the job in order."""

    def prepare(self) -> None:
        """Load what the chunks need, once in each process (worker processes inherit it)."""
        ...

    def chunk(self, chunk: Chunk) -> Result:
        """What is done with some lines; it happens in worker processes."""
        ...

    def collect(self, job: Job, results: Iterator[Result]) -> dict[str, Any]:
        """Write the job's output from what its chunks gave, in order; what came of it, as JSON values."""
        ...


def run_local(
    work: Work[Result], jobs: Sequence[Job], workers: int, advance: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """Do the jobs one after another on this machine, all workers on each.

    Args:
        work: what to do.
        jobs: in order.
        workers: processes.
        advance: is told how many more bytes have been read, as they lie on disk.

    Yields:
        What came of each job.

    Raises:
        ValueError: if an input cannot be used.
        WorkerDiedError: if a worker ends before its work does.
    """
    work.prepare()
    with OrderedPool(work.chunk, workers) as pool:
        for job in jobs:
            chunks = _watched(read_chunks(job.inputs), advance)
            yield work.collect(job, pool.map(chunks, lambda chunk: chunk.num_bytes, MAX_BYTES_IN_FLIGHT))


def run_here(work: Work[Result], job: Job) -> dict[str, Any]:
    """Do one job in this process alone."""
    work.prepare()
    return work.collect(job, map(work.chunk, read_chunks(job.inputs)))


def _watched(chunks: Iterator[Chunk], advance: Callable[[int], None]) -> Iterator[Chunk]:
    done = 0
    for chunk in chunks:
        advance(chunk.bytes_read - done)
        done = chunk.bytes_read
        yield chunk


@dataclass(frozen=True)
class Line(Generic[Result]):
    """What one line of a chunk gave."""

    number: int
    """The line's number in its file, from 1."""
    value: Result
    """What the line gave."""


def each_line(
    chunk: Chunk, function: Callable[[bytes], Result | None]
) -> tuple[list[Line[Result]], list[BadLine]]:
    """Apply a function to every line of a chunk.

    Returns:
        What the lines gave, without those that gave None; and the lines that could not be used.
    """
    lines: list[Line[Result]] = []
    bad = []
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        try:
            value = function(line)
        except ValueError as error:
            bad.append(BadLine(chunk.path, number, str(error)))
            continue
        if value is not None:
            lines.append(Line(number, value))
    return lines, bad


def refuse_bad_lines(bad: Sequence[BadLine], skip: bool) -> int:
    """How many bad lines are skipped.

    Raises:
        ValueError: naming the first, unless they are to be skipped.
    """
    if bad and not skip:
        raise ValueError(f"{bad[0]} (--skip-bad-lines leaves out such lines)")
    return len(bad)


def add_reports(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a report to another, number by number; reports within reports likewise."""
    for key, value in more.items():
        if isinstance(value, dict):
            add_reports(total.setdefault(key, {}), value)
        else:
            total[key] = total.get(key, 0) + value
