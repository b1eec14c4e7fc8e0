"""Answer for one side: a task's name on a line of input, its time and peak memory on a line of output."""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def serve(tasks: dict[str, Callable[[], object]]) -> None:
    """Do the tasks that are asked for, one after another.

    Seconds are those that have passed, memory the peak of what is resident less what was resident before.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # the libraries may print
    libc = ctypes.CDLL(None)
    for line in sys.stdin:
        libc.malloc_trim(0)  # what earlier tasks have freed is not to serve this one unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
        before = _status("VmRSS")
        started = time.perf_counter()
        kept = tasks[line.strip()]()
        seconds = time.perf_counter() - started
        peak = _status("VmHWM") - before
        del kept
        print(json.dumps({"seconds": seconds, "bytes": peak}), file=answers, flush=True)
