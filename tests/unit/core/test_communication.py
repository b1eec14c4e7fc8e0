"""What a meter keeps, without any traffic: the traffic itself is in ``tests/distributed``."""

import datetime

import torch
import torch.distributed as dist

from megatron.core.communication import (
    Handle,
    Meter,
    MeteredGroup,
    all_gather,
    all_reduce,
    plain,
    reduce_scatter,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)


def group_of_one() -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=10))


def test_a_meter_gives_what_was_counted_since_it_was_last_asked():
    meter = Meter()
    entry = meter.entry("tp", "all_reduce")
    entry.calls += 2
    entry.moved_bytes += 96.0
    taken = meter.take()
    assert list(taken) == [("tp", "all_reduce")]
    assert (taken["tp", "all_reduce"].calls, taken["tp", "all_reduce"].moved_bytes) == (2, 96.0)
    assert taken["tp", "all_reduce"].exposed_seconds is None
    assert meter.take() == {}
    assert meter.entry("tp", "all_reduce").calls == 0


def test_a_group_of_one_rank_moves_nothing_counts_nothing_and_gives_back_what_it_got():
    meter = Meter()
    group = MeteredGroup(group_of_one(), "tp", meter)
    assert (group.rank(), group.size()) == (0, 1)
    x = torch.arange(6.0).view(3, 2)
    assert all_reduce(x, group) is x
    assert all_gather(x, group) is x
    assert reduce_scatter(x, group) is x
    for start in (start_all_gather, start_reduce_scatter, start_all_to_all):
        output = torch.empty(3, 2)
        start(output, x, group).wait()
        assert output.equal(torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    assert meter.traffic == {}


def test_the_group_that_torch_knows_is_found_under_a_metered_one():
    inner = group_of_one()
    assert plain(MeteredGroup(inner, "dp", Meter())) is inner
    assert plain(inner) is inner


def test_a_handle_completes_once():
    done = []
    handle = Handle(complete=lambda: done.append(1))
    assert done == []
    handle.wait()
    handle.wait()
    assert done == [1]
