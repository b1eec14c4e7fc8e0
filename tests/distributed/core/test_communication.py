"""Every function of the communication module against plain arithmetic, and the bytes it counts by hand."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.communication import (
    EXCHANGE_BYTES,
    Meter,
    MeteredGroup,
    Traffic,
    all_gather,
    all_reduce,
    ranks_of,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_exchange,
    start_reduce_scatter,
)
from tests.harness import make_state, run_ranks

SMALL, LARGE = 3, 9000
"""Columns of a row: of tensors that the library gathers, and of those that are exchanged part by part."""

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64)


def drawn(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank holds, [rows, columns]. Quarters below 16, so that sums of four are exact in bfloat16."""
    draws = torch.Generator().manual_seed(100 * rank + columns)
    return (torch.randint(-64, 64, (rows, columns), generator=draws) / 4).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.equal(wanted), (found - wanted).abs().max()


def check_results(group: dist.ProcessGroup, columns: int, dtype: torch.dtype) -> None:
    n, rank = group.size(), group.rank()
    held = [drawn(peer, 2 * n, columns, dtype) for peer in range(n)]
    own, total = held[rank], torch.stack(held).sum(0)
    mine = slice(2 * rank, 2 * rank + 2)

    close(all_reduce(own.clone(), group), total)
    close(all_reduce(own.clone(), group, dist.ReduceOp.MAX), torch.stack(held).amax(0))
    close(all_gather(own, group), torch.cat(held))
    close(all_gather(own.t(), group), torch.cat([one.t() for one in held]))  # not contiguous
    close(reduce_scatter(own, group), total[mine])

    whole = torch.zeros_like(own)
    whole[mine] = own[mine]
    start_all_gather(whole, whole[mine], group).wait()
    close(whole, torch.cat([one[2 * peer : 2 * peer + 2] for peer, one in enumerate(held)]))

    summed = own.clone()
    start_reduce_scatter(summed[mine], summed, group).wait()
    close(summed[mine], total[mine])
    if n > 1:
        others = torch.ones(2 * n, dtype=torch.bool)
        others[mine] = False
        close(summed[others], own[others])

    dealt = torch.empty_like(own)
    start_all_to_all(dealt, own, group).wait()
    close(dealt, torch.cat([one[mine] for one in held]))


def check_order(group: dist.ProcessGroup) -> None:
    """Several at once, waited for in another order."""
    n, rank = group.size(), group.rank()
    held = [drawn(peer, 2 * n, LARGE, torch.float32) for peer in range(n)]
    total, gathered = held[rank].clone(), torch.empty(2 * n * n, LARGE)
    first, second = torch.empty(2, LARGE), torch.empty(2, LARGE)
    handles = [
        start_reduce_scatter(first, held[rank], group),
        start_all_gather(gathered, held[rank], group),
        start_reduce_scatter(second, 2 * held[rank], group),
        start_all_reduce(total, group),
    ]
    for handle in reversed(handles):
        handle.wait()
    wanted = torch.stack(held).sum(0)
    close(total, wanted)
    close(gathered, torch.cat(held))
    close(first, wanted[2 * rank : 2 * rank + 2])
    close(second, 2 * first)


def check_rounding(group: dist.ProcessGroup) -> None:
    """A sum of 16-bit numbers is rounded once: 256 + 1 + 1 + ... + 1 is not 256 in bfloat16."""
    n = group.size()
    x = torch.full((n, 40_000), 256.0 if group.rank() == 0 else 1.0, dtype=torch.bfloat16)
    wanted = torch.tensor(256.0 + (n - 1)).to(torch.bfloat16)
    assert x.nbytes >= EXCHANGE_BYTES
    assert reduce_scatter(x, group).eq(wanted).all()


def check_exchange(group: dist.ProcessGroup) -> None:
    """Each rank sends two tensors to the next one and one to the one before."""
    n, rank = group.size(), group.rank()
    after, before = (rank + 1) % n, (rank - 1) % n
    there = [torch.full((4, 5), 10.0 * rank + number) for number in range(2)]
    back = torch.full((7,), -1.0 * rank, dtype=torch.float64)
    received = [torch.empty(4, 5), torch.empty(4, 5)]
    returned = torch.empty(7, dtype=torch.float64)
    if n == 2:  # one peer is both: what travels between two ranks keeps its order
        sends = [(there[0], after), (there[1], after), (back, before)]
        receives = [(received[0], before), (received[1], before), (returned, after)]
    else:
        sends = [(there[0], after), (back, before), (there[1], after)]
        receives = [(returned, after), (received[0], before), (received[1], before)]
    start_exchange(group, sends, receives).wait()
    for number, got in enumerate(received):
        close(got, torch.full((4, 5), 10.0 * before + number))
    close(returned, torch.full((7,), -1.0 * after, dtype=torch.float64))
    start_exchange(group, [], []).wait()


def try_everything() -> None:
    inner = make_state(tp=dist.get_world_size()).group("tp")
    for group in (inner, MeteredGroup(inner, "tp", Meter())):
        for columns in (SMALL, LARGE):
            for dtype in DTYPES:
                check_results(group, columns, dtype)
        check_rounding(group)
        check_order(group)
        if group.size() > 1:
            check_exchange(group)
        assert ranks_of(group) == list(range(group.size()))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_function_gives_what_plain_arithmetic_gives(world):
    run_ranks(world, try_everything)


def count_traffic(columns: int) -> dict[tuple[str, str], Traffic]:
    """One call of each kind on [12, columns] float32, the gathers on [3, columns] of bfloat16."""
    meter = Meter()
    state = make_state(tp=dist.get_world_size())
    tp = MeteredGroup(state.group("tp"), "tp", meter)
    world = MeteredGroup(state.world_group, "world", meter)
    n, rank = tp.size(), tp.rank()
    x = torch.ones(12, columns)
    all_reduce(x, tp)
    all_reduce(x, tp)
    reduce_scatter(x, tp)
    all_gather(x[:3].to(torch.bfloat16), tp)
    start_all_to_all(torch.empty_like(x), x, tp).wait()
    all_reduce(torch.ones(5, dtype=torch.float64), world)
    taken = meter.take()
    assert meter.traffic == {}
    # Rank 0 sends two tensors to rank 1, which sends none.
    if n > 1 and rank == 0:
        start_exchange(tp, [(x, 1), (x[:1], 1)], []).wait()
    if n > 1 and rank == 1:
        start_exchange(tp, [], [(x, 0), (x[:1], 0)]).wait()
    return taken | {("sent", kind): traffic for (_, kind), traffic in meter.take().items()}


@pytest.mark.parametrize("columns", [SMALL, LARGE])
@pytest.mark.parametrize("world", [2, 4])
def test_calls_and_bytes_are_those_of_a_ring(world, columns):
    found = run_ranks(world, count_traffic, columns)
    whole = 12 * columns * 4  # bytes of [12, columns] in float32
    part, wide = (world - 1) / world, 3 * columns * 2  # of the ring; bytes of [3, columns] in bfloat16
    wanted = {
        ("tp", "all_reduce"): (2, 2 * 2 * part * whole),
        ("tp", "reduce_scatter"): (1, part * whole),
        ("tp", "all_gather"): (1, (world - 1) * wide),
        ("tp", "all_to_all"): (1, part * whole),
        ("world", "all_reduce"): (1, 2 * part * 5 * 8),
    }
    for rank, traffic in enumerate(found):
        sent = traffic.pop(("sent", "send"), None)
        assert {key: (one.calls, one.moved_bytes) for key, one in traffic.items()} == wanted
        assert all(one.exposed_seconds > 0 for one in traffic.values())
        if rank < 2:
            assert (sent.calls, sent.moved_bytes) == ((2, whole + columns * 4) if rank == 0 else (0, 0))
            assert sent.exposed_seconds > 0  # the receiver waits, though it sends nothing
        else:
            assert sent is None
