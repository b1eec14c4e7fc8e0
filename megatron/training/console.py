"""What a run says: set-up lines from rank 0, log lines from the last rank, errors in one line."""

import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRESS = "megatron.progress"
"""Logger of the lines about iterations; it speaks on the last rank, as people's scripts expect."""

_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "remote process exited")
"""What gloo and NCCL say in a collective that another rank does not take part in any more."""

_PACKAGE = Path(__file__).resolve().parents[1]


def configure(rank: int, world_size: int) -> None:
    """Send INFO of rank 0, progress lines of the last rank and warnings of every rank to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package = logging.getLogger("megatron")
    package.handlers[:] = [handler]
    package.propagate = False
    package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger(PROGRESS).setLevel(logging.INFO if rank == world_size - 1 else logging.ERROR)


def report_failure(error: BaseException, *, prefix: str = "") -> None:
    """Say on standard error why the run ends: one line for the user's errors, a traceback for ours.

    An error that our own code raised on purpose is the user's; any other is a defect or a failure of the
    machine, whose traceback is needed. Where another rank has gone, the reason is that rank's to say.
    """
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER):
        first_line = str(error).strip().split("\n")[0]
        sys.stderr.write(
            f"{prefix}error: lost another rank, which should have said why it ended ({first_line})\n"
        )
    elif isinstance(error, ValueError | RuntimeError | OSError) and raised_here(error.__traceback__):
        sys.stderr.write(f"{prefix}error: {error}\n")
    else:
        sys.stderr.write(prefix + "".join(traceback.format_exception(error)))
    sys.stderr.flush()


def raised_here(trace: TracebackType | None) -> bool:
    """Whether the innermost frame of a traceback lies in this package."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(_PACKAGE)


def run_as_program(main: Callable[[], None]) -> None:
    """Run a tool: exit code 0, or the reason on standard error and exit code 1."""
    try:
        main()
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing more to say, to anyone
        raise SystemExit(1) from None
    except Exception as error:
        report_failure(error)
        raise SystemExit(1) from error
