"""Every collective and transfer of the system, each over one process group.

Nothing else calls ``torch.distributed``'s collectives in the hot path, so that whatever travels can be
counted: a group may be a :class:`MeteredGroup`, which tells a :class:`Meter` about each call. Over a group of
one rank nothing is called, and nothing counted.

Bytes are those that one rank sends if the collective runs on a ring of n ranks, where the whole tensor (the
gathered one, or the one before it is scattered) has S bytes:

=================  ======================================================================================
all_gather         (n - 1)/n S
reduce_scatter     (n - 1)/n S
all_reduce         2 (n - 1)/n S, a reduce-scatter and an all-gather
all_to_all         (n - 1)/n of the rank's own tensor: all but the part that stays
send               all of the tensor; the receiver counts nothing
=================  ======================================================================================

A library may move other amounts (a tree, a double copy inside a node); the ring's are the ones that papers
count, and no collective gets by with fewer. They are exact for sizes that divide by n.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

EXCHANGE_BYTES = 2**16
"""Whole tensors of at least this size are gathered and scattered on a CPU by exchanging their parts.

Gloo's own all-gather and reduce-scatter take two to three times as long on large tensors (32 MB over two
ranks: 32 and 42 ms against 13 and 16). Below this size latency is all, and it is the same.
"""


@dataclass
class Traffic:
    """What one rank has sent of one kind on one axis."""

    calls: int = 0
    """Collectives, or tensors sent."""
    moved_bytes: float = 0.0
    """Bytes that this rank sent, by the convention of this module."""
    exposed_seconds: float | None = None
    """Time in which the rank did nothing but wait for them. None: not measured, as on a GPU, where the host
    does not wait."""


@dataclass
class Meter:
    """Counts the traffic of one rank, by axis and kind."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    """By (axis, kind), such as ``("tp", "all_reduce")``."""

    def entry(self, axis: str, kind: str) -> Traffic:
        """Where one kind on one axis is counted."""
        return self.traffic.setdefault((axis, kind), Traffic())

    def take(self) -> dict[tuple[str, str], Traffic]:
        """What has been counted since the last call of this.

        Call it where nothing is on its way: time that is still waited for counts in what was taken.
        """
        taken, self.traffic = self.traffic, {}
        return taken


class MeteredGroup(ProcessGroup):
    """A process group whose traffic is counted under an axis.

    It knows its rank and size, and the functions of this module take it. ``torch.distributed`` itself does
    not: give that :func:`plain` of it.
    """

    def __init__(self, inner: ProcessGroup, axis: str, meter: Meter) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.axis = axis
        self.meter = meter


class Handle:
    """A collective on its way. Its tensors may be touched, read or written, after :meth:`wait` only."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        traffic: Traffic | None = None,
        complete: Callable[[], None] | None = None,
    ) -> None:
        """Make a handle.

        Args:
            works: what to wait for.
            traffic: where to count the time of waiting; None counts none.
            complete: what is left to do with what has arrived.
        """
        self._works = list(works)
        self._traffic = traffic
        self._complete = complete

    def wait(self) -> None:
        """Return when it is done; with NCCL, let the current stream go on only then. Again: do nothing."""
        start = time.perf_counter()
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._traffic is not None:
            waited = time.perf_counter() - start
            self._traffic.exposed_seconds = (self._traffic.exposed_seconds or 0.0) + waited
            self._traffic = None
        if self._complete is not None:
            self._complete()
            self._complete = None


def plain(group: ProcessGroup) -> ProcessGroup:
    """The group that ``torch.distributed`` knows."""
    return group.inner if isinstance(group, MeteredGroup) else group


def ranks_of(group: ProcessGroup) -> list[int]:
    """Global ranks of a group, in its order."""
    return dist.get_process_group_ranks(plain(group))


def start_all_reduce(
    x: Tensor, group: ProcessGroup, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM
) -> Handle:
    """Reduce ``x`` over the group in place. x: partial -> replicated."""
    n = group.size()
    if n == 1:
        return Handle()
    traffic = _count(group, "all_reduce", x, 2 * (n - 1) * x.nbytes / n)
    return _handle(dist.all_reduce(x, op=op, group=plain(group), async_op=True), traffic)


def all_reduce(x: Tensor, group: ProcessGroup, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the group in place, and return it. x: partial -> replicated."""
    start_all_reduce(x, group, op).wait()
    return x


def start_all_gather(output: Tensor, x: Tensor, group: ProcessGroup) -> Handle:
    """Fill ``output`` with every rank's ``x``, in the order of ranks along dim 0; both contiguous.

    x: sharded on dim 0 -> output: replicated. ``x`` may be this rank's part of ``output`` itself.
    """
    n = group.size()
    if n == 1:
        _move(output, x)
        return Handle()
    traffic = _count(group, "all_gather", x, (n - 1) * x.nbytes)
    if _by_exchange(output):
        parts = output.view(n, -1)
        works = _exchange_parts([x.view(-1)] * n, list(parts), group)
        _move(parts[group.rank()], x)
        return Handle(works, traffic)
    return _handle(dist.all_gather_single(output, x, group=plain(group), async_op=True), traffic)


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's ``x``, in the order of ranks: [k, ...] sharded on dim 0 -> [n k, ...] replicated."""
    if group.size() == 1:
        return x
    output = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    start_all_gather(output, x.contiguous(), group).wait()
    return output


def start_reduce_scatter(output: Tensor, x: Tensor, group: ProcessGroup) -> Handle:
    """Sum ``x`` over the group and keep this rank's part along dim 0 in ``output``; both contiguous.

    x: partial -> output: sharded on dim 0. ``output`` may be that part of ``x`` itself; the rest of ``x`` is
    not written to.
    """
    n = group.size()
    if n == 1:
        _move(output, x)
        return Handle()
    traffic = _count(group, "reduce_scatter", x, (n - 1) * output.nbytes)
    if _by_exchange(x):
        parts = list(x.view(n, -1))
        arrived = list(x.new_empty((n, output.numel())))
        works = _exchange_parts(parts, arrived, group)
        arrived[group.rank()] = parts[group.rank()]
        return Handle(works, traffic, complete=lambda: _sum_into(output.view(-1), arrived))
    return _handle(dist.reduce_scatter_single(output, x, group=plain(group), async_op=True), traffic)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over the group: [n k, ...] partial -> [k, ...] sharded on dim 0."""
    if group.size() == 1:
        return x
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    start_reduce_scatter(output, x.contiguous(), group).wait()
    return output


def start_all_to_all(output: Tensor, x: Tensor, group: ProcessGroup) -> Handle:
    """Send the r-th of n equal parts of ``x`` along dim 0 to rank r; ``output`` gets those of all ranks.

    Both contiguous and apart from each other.
    """
    n = group.size()
    if n == 1:
        _move(output, x)
        return Handle()
    traffic = _count(group, "all_to_all", x, (n - 1) * x.nbytes / n)
    return _handle(dist.all_to_all_single(output, x, group=plain(group), async_op=True), traffic)


def start_exchange(
    group: ProcessGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> Handle:
    """Send tensors to ranks of the group and fill buffers from ranks of it, all at once.

    All tensors are contiguous. What two ranks send each other over one group arrives in the order sent. A
    tensor sent counts as one call; time spent waiting for one received counts with them.

    Args:
        group: the group.
        sends: (tensor, rank in the group) pairs.
        receives: (buffer, rank in the group) pairs.
    """
    traffic = None
    for x, _ in sends:
        traffic = _count(group, "send", x, x.nbytes)
    if receives and traffic is None and isinstance(group, MeteredGroup) and receives[0][0].is_cpu:
        traffic = group.meter.entry(group.axis, "send")
    return Handle(_exchange(group, sends, receives), traffic)


def _count(group: ProcessGroup, kind: str, x: Tensor, moved_bytes: float) -> Traffic | None:
    """Count one call; give back where its time is to be counted, None for nowhere."""
    if not isinstance(group, MeteredGroup):
        return None
    entry = group.meter.entry(group.axis, kind)
    entry.calls += 1
    entry.moved_bytes += moved_bytes
    return entry if x.is_cpu else None


def _handle(work: dist.Work | None, traffic: Traffic | None) -> Handle:
    assert work is not None, "an asynchronous call on a group that this rank is in gives a handle"
    return Handle([work], traffic)


def _move(output: Tensor, x: Tensor) -> None:
    if output.data_ptr() != x.data_ptr():
        output.copy_(x.view_as(output))


def _by_exchange(whole: Tensor) -> bool:
    """Whether to gather or scatter a tensor by exchanging its parts: the same on all ranks."""
    return whole.is_cpu and whole.nbytes >= EXCHANGE_BYTES


def _exchange(
    group: ProcessGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> list[dist.Work]:
    inner = plain(group)
    operations = [dist.P2POp(dist.isend, x, group=inner, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=inner, group_peer=peer) for x, peer in receives]
    # Gloo gives a work for each tensor, NCCL one for the batch.
    return dist.batch_isend_irecv(operations) if operations else []


def _exchange_parts(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: ProcessGroup
) -> list[dist.Work]:
    """Send ``outgoing[r]`` to each other rank r, and fill ``incoming[r]`` from it."""
    n, rank = group.size(), group.rank()
    # Each rank begins with another one, so that no rank is sent to by all at once.
    to = [(rank + step) % n for step in range(1, n)]
    return _exchange(
        group, [(outgoing[peer], peer) for peer in to], [(incoming[peer], peer) for peer in reversed(to)]
    )


def _sum_into(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of ``parts``, in their order, to ``output``, which may be one of them; rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=output)
        return
    floating = output.is_floating_point()
    total = parts[0].to(torch.promote_types(output.dtype, torch.float32) if floating else output.dtype)
    total = total + parts[1]
    for part in parts[2:]:
        total += part
    output.copy_(total)
