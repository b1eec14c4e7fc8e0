"""``pretrain_gpt.py`` as a launcher starts it, in processes that have everything imported already.

Each rank is a process of its own with torchrun's variables, its own command line, output and exit code. It
forks from the test ranks' server, so that a job of four ranks starts in a fraction of a second.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import tests.harness  # noqa: F401 - says what the server of the ranks imports
from megatron.training.training import main
from tests.training_harness import GPTTask


@dataclass
class Job:
    """The ranks of one command line."""

    processes: list[BaseProcess]
    folder: Path
    outputs: list[str] = field(default_factory=list)
    """What each rank has written to standard output, once all have ended."""
    errors: list[str] = field(default_factory=list)
    """The same for standard error."""
    codes: list[int | None] = field(default_factory=list)
    """Exit codes; below 0 the signal that ended the rank."""

    def wait(self, timeout_seconds: float = 60) -> "Job":
        """Wait until all ranks have ended; what is still there after the time limit fails the test."""
        deadline = time.monotonic() + timeout_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        self.kill()
        assert not late, f"ranks {late} had not ended after {timeout_seconds} s: {self.errors}"
        return self

    def kill(self) -> None:
        """End every rank with SIGKILL and gather what they said."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.codes = [process.exitcode for process in self.processes]
        self.outputs, self.errors = (
            [(self.folder / f"{rank}.{name}").read_text() for rank in range(len(self.processes))]
            for name in ("out", "err")
        )

    @property
    def running(self) -> bool:
        """Whether all ranks are still there."""
        return all(process.exitcode is None for process in self.processes)


def launch(
    world_size: int,
    argv: Sequence[str],
    folder: Path,
    prepare: Callable[[], None] | None = None,
) -> Job:
    """Start ``pretrain_gpt.py`` with ``argv`` on so many gloo ranks of this machine.

    Args:
        world_size: number of ranks.
        argv: the command line without the program's name.
        folder: an existing folder for what the ranks say.
        prepare: a module-level function that every rank calls first.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = context.Process(target=_rank, args=(list(argv), environment, folder, prepare))
        process.start()
        processes.append(process)
    return Job(processes, folder)


def _rank(
    argv: list[str], environment: dict[str, str], folder: Path, prepare: Callable[[], None] | None
) -> None:
    for name, descriptor in (("out", 1), ("err", 2)):
        target = os.open(folder / f"{environment['RANK']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, descriptor)
    os.environ.update(environment)
    sys.argv = ["pretrain_gpt.py", *argv]
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    main(GPTTask(), "Pretrain a GPT-style language model.")
