#!/usr/bin/env python3
"""Index files, sample indices and samples against Megatron Core's: seconds and peak memory, and their ratios.

    python benchmarks/index.py [--documents 10000000] [--rounds 3] [--folder FOLDER]

Each side lives in a process of its own, and they take turns task by task, so that a noisy machine hits both;
the medians count. Memory is the peak resident set of a task less what was resident before it. The tasks:

- write: the ``.idx`` of so many documents. Ours is the whole builder with its flushes to disk, from batches
  to finished files; theirs is the index writer alone, from the lists that its builder collects.
- indices 1, indices 10: document, sample and shuffle index of that many epochs.
- access: samples at random places, without masks that go by documents.
- open: the dataset, with the files in the page cache.

The tokens are a sparse file of zeros: what is measured does not look at them, and 12 GB are not written.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SIDES = Path(__file__).with_name("index_sides")
PEER = Path(sys.prefix, "peers", "megatron_core")
SEQ_LENGTH = 2048
LONGEST = 1200
ACCESSES = 5000
OPENS = 20


@dataclass(frozen=True)
class Task:
    """One comparison, and what it is held to."""

    speed: float
    """How many times as fast as theirs, at least."""
    seconds: float | None = None
    """Most seconds for ours, where there is such a limit."""
    memory: float | None = None
    """Peak memory, ours over theirs, at most."""
    times: int = 1
    """How often it is done in one turn."""


TASKS = {
    "write": Task(5, 1.0, 1.0),
    "indices 1": Task(1, None, 1.0),
    "indices 10": Task(1, None, 1.0),
    "access": Task(2, times=ACCESSES),
    "open": Task(0, 0.1, times=OPENS),
}


def write_dataset(folder: Path, documents: int) -> None:
    """A dataset of random lengths, packed field by field, with a sparse file of tokens."""
    lengths = np.random.default_rng(0).integers(1, LONGEST, size=documents, dtype=np.int32)
    ends = 2 * np.cumsum(lengths, dtype=np.int64)
    with (folder / "data.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for array in (lengths, np.concatenate(([0], ends[:-1])), np.arange(documents + 1)):
            file.write(array.tobytes())
    with (folder / "data.bin").open("wb") as file:
        file.truncate(int(ends[-1]))


class Side:
    """A process that does what it is told."""

    def __init__(self, program: str, path: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SIDES / program, folder, str(SEQ_LENGTH), str(ACCESSES), str(OPENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{path}{os.pathsep}{SIDES}",
                "PYTHONSAFEPATH": "1",
                "PYTHONWARNINGS": "ignore",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )

    def do(self, task: str) -> dict[str, Any]:
        """Seconds and bytes of a task."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{task}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"one side ended with {self._process.wait()} at the task {task!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def median(found: list[dict[str, Any]], field: str) -> float:
    """The median of one figure."""
    return statistics.median(answer[field] for answer in found)


def report(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Print a line for a task; whether it holds."""
    task = TASKS[name]
    seconds, other = (median(side, "seconds") / task.times for side in (ours, theirs))
    memory, other_memory = (median(side, "bytes") / 2**20 for side in (ours, theirs))
    holds = other / seconds >= task.speed and (task.seconds is None or seconds < task.seconds)
    holds &= task.memory is None or memory <= task.memory * other_memory
    limits = f"at least {task.speed:g}x" + (f", under {task.seconds:g} s" if task.seconds else "")
    print(
        f"{name:11} {seconds:12.6f} s {other:12.6f} s {other / seconds:8.2f}x "
        f"{memory:9.1f} MiB {other_memory:9.1f} MiB   {limits}: {'holds' if holds else 'MISSED'}",
        flush=True,
    )
    return holds


def main() -> None:
    """Measure all tasks in turns and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files; default a temporary one")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    if not (PEER / "megatron" / "core").is_dir():
        raise SystemExit(f"no Megatron Core in {PEER}: scripts/install_peers.sh fetches it")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_dataset(folder, arguments.documents)
        sides = Side("ours.py", ROOT, folder), Side("megatron_core.py", PEER, folder)
        print(f"{'':11} {'ours':>14} {'Megatron Core':>14} {'speed':>9} {'memory':>13} {'theirs':>13}")
        holds = True
        for task in arguments.tasks:
            found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            for number in range(arguments.rounds):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    found[side].append(sides[side].do(task))
            holds &= report(task, *found)
        for side in sides:
            side.close()
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
