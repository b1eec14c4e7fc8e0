"""Ranks that wait for slower ones without a collective."""

import datetime
import logging
import time

import pytest
import torch
import torch.distributed as dist

from megatron.training.failure import PeerFailureError, together
from megatron.training.patience import wait_for_ranks
from tests.harness import run_ranks

SLOW_SECONDS = 3.0
CPU = torch.device("cpu")


def one_slow_rank(path: str, fails: bool) -> str:
    """Rank 1 takes longer than a collective may; what comes of it on each rank."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=SLOW_SECONDS / 3))
    store = dist.FileStore(path, 2)

    def work() -> str:
        if dist.get_rank() == 1:
            time.sleep(SLOW_SECONDS)
            if fails:
                raise ValueError("no data")
        return "done"

    try:
        return together(work, group, CPU, lambda: wait_for_ranks(store, 2, "work"))
    except (ValueError, PeerFailureError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("fails", "expected"), [(False, ["done", "done"]), (True, ["rank 1 has failed", "no data"])]
)
def test_work_may_outlast_the_timeout_of_collectives_on_one_rank_alone(tmp_path, fails, expected):
    assert run_ranks(2, one_slow_rank, str(tmp_path / "store"), fails) == expected


def test_whoever_gives_up_says_what_was_slow():
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks are not through with building, .* tools/prepare"):
        wait_for_ranks(dist.HashStore(), 2, "building", limit=0.01)


def test_only_the_first_to_come_says_that_ranks_wait(caplog):
    store = dist.HashStore()
    for warnings in (1, 0):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="megatron"), pytest.raises(TimeoutError):
            wait_for_ranks(store, 3, "building", limit=0.01, report_seconds=0.0)
        assert bool(caplog.messages) is bool(warnings)
        assert all(": building" in message for message in caplog.messages)


def test_a_lone_rank_waits_for_nobody():
    wait_for_ranks(dist.HashStore(), 1, "building")
