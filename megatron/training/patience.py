"""Waiting for other ranks longer than a collective may last.

A collective that a rank reaches early counts its time limit from then on. Work that takes long on some ranks
only (an index that is built on one node and lies ready on another) is therefore waited for in the store in
which ranks have met, where nothing counts but this limit.
"""

import logging
import time
from typing import Final

from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS: Final = 24 * 3600.0
REPORT_SECONDS: Final = 60.0
"""How often it is said that ranks wait."""
_LONGEST_PAUSE: Final = 1.0


def wait_for_ranks(
    store: Store,
    world_size: int,
    what: str,
    limit: float = LONGEST_WAIT_SECONDS,
    report_seconds: float = REPORT_SECONDS,
) -> None:
    """Return when as many calls with the same ``what`` have been made as there are ranks.

    A rank that dies meanwhile is noticed by its launcher, as one that dies between two collectives is.

    Args:
        store: what all ranks share.
        world_size: number of ranks; each makes one call.
        what: what is waited for, in words; used once in a run.
        limit: seconds to wait.
        report_seconds: seconds between two lines of the rank that came first.

    Raises:
        TimeoutError: saying what was waited for, and how many ranks have not come.
    """
    key = f"arrived: {what}"
    arrived = store.add(key, 1)
    speaks = arrived == 1  # the first to come speaks for all, however many they are
    started, reported, pause = time.monotonic(), 0.0, 0.001
    while arrived < world_size:
        waited = time.monotonic() - started
        if waited > limit:
            raise TimeoutError(
                f"gave up after {waited:.0f} s: {world_size - arrived} of {world_size} ranks are not through "
                f"with {what}, which may be slow, not stuck; tools/prepare_cache.py does it ahead of a job"
            )
        if speaks and waited - reported >= report_seconds:
            reported = waited
            log.warning("waited %d s for %d of %d ranks: %s", waited, world_size - arrived, world_size, what)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
        arrived = store.add(key, 0)
