"""Every collective and transfer of the system, each over one process group.

Nothing else calls ``torch.distributed``'s collectives in the hot path, so that whatever travels can be
counted: a group may be a :class:`MeteredGroup`, which tells a :class:`Meter` about each call. Over a group of
one rank nothing is called at all.

Bytes are those that one rank sends if the collective runs on a ring of n ranks: (n - 1)/n of the whole tensor
for an all-gather or a reduce-scatter, twice that for an all-reduce, (n - 1)/n of its own for an all-to-all,
and all of it for a transfer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass
class Traffic:
    """What one rank has sent of one kind on one axis."""

    calls: int = 0
    moved_bytes: float = 0.0
    exposed_seconds: float = 0.0
    """Time in which the rank did nothing but wait; always 0 on a GPU, where the host does not wait."""


@dataclass
class Meter:
    """Counts the traffic of one rank, by axis and kind."""

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    """By (axis, kind), such as ``("tp", "all_reduce")``."""

    def record(self, axis: str, kind: str, moved_bytes: float) -> Traffic:
        """Count one call."""
        entry = self.traffic.setdefault((axis, kind), Traffic())
        entry.calls += 1
        entry.moved_bytes += moved_bytes
        return entry

    def take(self) -> dict[tuple[str, str], Traffic]:
        """What has been counted since the last call of this."""
        taken, self.traffic = self.traffic, {}
        return taken


class MeteredGroup(ProcessGroup):
    """A process group whose traffic is counted under an axis."""

    def __init__(self, inner: ProcessGroup, axis: str, meter: Meter) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.axis = axis
        self.meter = meter


class Handle:
    """A collective on its way. Its tensors may be touched after :meth:`wait` only."""

    def __init__(self, works: Sequence[dist.Work] = (), traffic: Traffic | None = None) -> None:
        self._works = list(works)
        self._traffic = traffic

    def wait(self) -> None:
        """Return when it is done; with NCCL, let the current stream go on only then."""
        start = time.perf_counter() if self._traffic is not None else 0.0
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._traffic is not None:
            self._traffic.exposed_seconds += time.perf_counter() - start
            self._traffic = None


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
    if group.size() == 1:
        return Handle()
    share = 2 * (group.size() - 1) / group.size()
    traffic = _record(group, "all_reduce", share * x.nbytes)
    return _handle(dist.all_reduce(x, op=op, group=plain(group), async_op=True), traffic)


def all_reduce(x: Tensor, group: ProcessGroup, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the group in place, and return it. x: partial -> replicated."""
    start_all_reduce(x, group, op).wait()
    return x


def start_all_gather(output: Tensor, x: Tensor, group: ProcessGroup) -> Handle:
    """Fill ``output`` with every rank's ``x``, in the order of ranks along dim 0; both contiguous.

    x: sharded on dim 0 -> output: replicated.
    """
    if group.size() == 1:
        output.copy_(x.view_as(output))
        return Handle()
    traffic = _record(group, "all_gather", (group.size() - 1) * x.nbytes)
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

    x: partial -> output: sharded on dim 0. ``output`` may be that part of ``x`` itself.
    """
    if group.size() == 1:
        if output.data_ptr() != x.data_ptr():
            output.copy_(x.view_as(output))
        return Handle()
    traffic = _record(group, "reduce_scatter", (group.size() - 1) * output.nbytes)
    return _handle(dist.reduce_scatter_single(output, x, group=plain(group), async_op=True), traffic)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over the group: [n k, ...] partial -> [k, ...] sharded on dim 0."""
    if group.size() == 1:
        return x
    output = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    start_reduce_scatter(output, x.contiguous(), group).wait()
    return output


def start_all_to_all(output: Tensor, x: Tensor, group: ProcessGroup) -> Handle:
    """Send the r-th of n equal parts of ``x`` along dim 0 to rank r; ``output`` gets those of all ranks."""
    if group.size() == 1:
        output.copy_(x)
        return Handle()
    traffic = _record(group, "all_to_all", (group.size() - 1) / group.size() * x.nbytes)
    return _handle(dist.all_to_all_single(output, x, group=plain(group), async_op=True), traffic)


def start_exchange(
    group: ProcessGroup, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> Handle:
    """Send tensors to ranks of the group and fill buffers from ranks of it, all at once.

    All tensors are contiguous. What two ranks send each other over one group arrives in the order sent.

    Args:
        group: the group.
        sends: (tensor, rank in the group) pairs.
        receives: (buffer, rank in the group) pairs.
    """
    inner = plain(group)
    operations = [dist.P2POp(dist.isend, x, group=inner, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=inner, group_peer=peer) for x, peer in receives]
    if not operations:
        return Handle()
    traffic = None
    for x, _ in sends:
        traffic = _record(group, "send", x.nbytes)
    if traffic is None and isinstance(group, MeteredGroup):
        traffic = group.meter.traffic.setdefault((group.axis, "send"), Traffic())
    # gloo gives a handle for each tensor, NCCL one for the batch.
    return Handle(dist.batch_isend_irecv(operations), traffic)


def _record(group: ProcessGroup, kind: str, moved_bytes: float) -> Traffic | None:
    if not isinstance(group, MeteredGroup):
        return None
    return group.meter.record(group.axis, kind, moved_bytes)


def _handle(work: dist.Work | None, traffic: Traffic | None) -> Handle:
    assert work is not None, "an asynchronous call on a group that this rank is in gives a handle"
    return Handle([work], traffic)
