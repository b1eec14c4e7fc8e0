"""How a rank that fails ends, and which of the ranks says why.

A rank that fails leaves at once, without any collective: its peers then see it gone, or their launcher does,
and end too. What goes wrong on all ranks alike is said by rank 0 alone.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.checkpoint import CheckpointError
from megatron.core.communication import all_reduce
from megatron.core.optimizer import LossScaleError, NonFiniteGradientError
from megatron.training.console import INTERRUPTED, reason_for_user, report_failure
from megatron.training.flags import USAGE_ERROR, UsageError, launched_rank
from megatron.training.launcher import discover_world
from megatron.training.rendezvous import RendezvousError, withdraw
from megatron.training.step import NonFiniteLossError

T = TypeVar("T")

_SECONDS_FOR_THE_SPEAKER = 3.0


class PeerFailureError(RuntimeError):
    """Another rank has failed and says why; this one has nothing to add."""


_RAISED_ON_ALL_RANKS = (
    NonFiniteLossError,
    NonFiniteGradientError,
    LossScaleError,
    CheckpointError,
)


def together(
    action: Callable[[], T],
    group: ProcessGroup,
    device: torch.device,
    before_meeting: Callable[[], None] | None = None,
) -> T:
    """What ``action`` gives; if it fails on any rank, none goes on.

    For work without collectives, such as reading files, after which ranks meet again.

    Args:
        action: called once on every rank.
        group: the ranks that call this together.
        device: where its collectives run.
        before_meeting: called after ``action``, whatever came of it: waits for ranks that take longer than a
            collective may.

    Raises:
        Exception: what ``action`` raised, on the first rank of the group on which it did.
        PeerFailureError: on the other ranks.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 - peers wait for this rank, whatever went wrong
        failure = error
    if before_meeting is not None:
        before_meeting()
    first = torch.tensor(group.size() if failure is None else group.rank(), device=device)
    all_reduce(first, group, dist.ReduceOp.MIN)
    if first.item() == group.size():
        return value  # type: ignore[return-value]
    if failure is not None and first.item() == group.rank():
        raise failure
    raise PeerFailureError(f"rank {int(first)} has failed") from failure


@contextlib.contextmanager
def part_of_usage() -> Iterator[None]:
    """Let what is refused in the block count as a command line that cannot be run.

    Raises:
        UsageError: in place of an error for the user.
    """
    try:
        yield
    except ValueError as error:
        reason = reason_for_user(error)
        if reason is None:
            raise
        raise UsageError(reason) from None


def end_rank(error: Exception) -> NoReturn:
    """End this process, having said why unless another rank does.

    The exit code is 2 for a command line that cannot be run, and else 1.
    """
    settled = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if settled else launched_rank()
    speaks = _speaks(error, rank, settled)
    prefix = f"[rank {rank}] " if settled and dist.get_world_size() > 1 else ""
    if speaks:
        report_failure(error, prefix=prefix)
    if not settled and not isinstance(error, RendezvousError):
        heard = _tell_peers(error)
        if not speaks and not heard:
            report_failure(error, prefix=f"[rank {rank}] ")
    if not speaks:
        # A launcher that sees one rank gone ends the others, the one that speaks among them.
        time.sleep(_SECONDS_FOR_THE_SPEAKER)
    sys.stdout.flush()
    os._exit(USAGE_ERROR if isinstance(error, UsageError) else 1)


def end_interrupted_rank() -> NoReturn:
    """End this process after Ctrl-C, which all ranks of a terminal get and rank 0 alone speaks of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher may hand on another
    if launched_rank() == 0:
        sys.stderr.write("interrupted; checkpoints that were saved before stay\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _speaks(error: Exception, rank: int, settled: bool) -> bool:
    """Whether it is this rank that says what is wrong."""
    if isinstance(error, PeerFailureError):
        return False
    if isinstance(error, RendezvousError):
        return rank == 0 or not error.known_to_rank_zero
    return rank == 0 or (settled and not isinstance(error, _RAISED_ON_ALL_RANKS))


def _tell_peers(error: Exception) -> bool:
    """Let ranks that have not met yet know that this one does not come; whether they could be told."""
    try:
        world = discover_world(os.environ)
        withdraw(world, str(error))
    except (ValueError, RendezvousError):
        return False
    return True
