"""What a run says: set-up lines from rank 0, log lines from the last rank, errors in one line."""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRESS = "megatron.progress"
"""Logger of the lines about iterations; it speaks on the last rank, as people's scripts expect."""

_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "remote process exited")
"""What gloo and NCCL say in a collective that another rank does not take part in any more."""

_WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
"""What the system says to a path that is not there, or is something else."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C has ended."""

_PACKAGE = Path(__file__).resolve().parents[1]
_OUR_CODE = (_PACKAGE, _PACKAGE.parent / "tools")


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

    Where another rank has gone, the reason is that rank's to say.
    """
    reason = reason_for_user(error)
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER):
        first_line = str(error).strip().split("\n")[0]
        sys.stderr.write(
            f"{prefix}error: lost another rank, which should have said why it ended ({first_line})\n"
        )
    elif reason is not None:
        sys.stderr.write(f"{prefix}error: {reason}\n")
    else:
        sys.stderr.write(prefix + "".join(traceback.format_exception(error)))
    sys.stderr.flush()


def reason_for_user(error: BaseException) -> str | None:
    """What an error of the user's says; None for a defect or a failure of the machine.

    The user's are errors that our own code has raised on purpose, and those of the system about a path,
    wherever they come up.
    """
    if isinstance(error, _WRONG_PATH) and isinstance(error.filename, str | bytes | os.PathLike):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, ValueError | RuntimeError | OSError) and raised_here(error.__traceback__):
        return str(error)
    return None


def raised_here(trace: TracebackType | None) -> bool:
    """Whether the innermost frame of a traceback lies in this package or its tools."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and any(map(Path(frames[-1].filename).resolve().is_relative_to, _OUR_CODE))


def run_as_program(main: Callable[[], None]) -> None:
    """Run a tool: exit code 0, or the reason on standard error and exit code 1 (130 after Ctrl-C)."""
    try:
        main()
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing more to say, to anyone
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        report_failure(error)
        raise SystemExit(1) from error
