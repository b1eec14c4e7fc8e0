"""Flat storage: the parameters and gradients of a rank in a few contiguous buckets.

Buckets follow the backward pass (the last module's parameters come first), so that a bucket is complete as
early as may be and its reduction overlaps with what is left of the backward. Inside a bucket parameters are
sorted by what happens to them later, so that weight decay, norms and updates run over long contiguous ranges.
The tensor-parallel ranks of a stage lay out their buckets alike, and so do the two stages that hold a tied
parameter with its bucket: what they share lies at the same place.

A sharded bucket (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054) is cut into equal slices, one for each
data-parallel rank, which alone updates it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.own_bucket import OwnBucket, Part
from megatron.core.distributed.parameter_gather import ParameterGather
from megatron.core.parameter import NamedParameter

ALIGNMENT = 64
"""Elements that every parameter's start is a multiple of: whole cache lines in every number format."""

Strategy = Literal["no_shard", "optim", "optim_grads"]
"""What data-parallel ranks divide among them: nothing, optimizer state (ZeRO-1), gradients too (ZeRO-2)."""


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of one parameter in its bucket. Every slot is equal to itself only."""

    named: NamedParameter
    start: int
    """First element in the bucket's flat tensors."""
    uses: int = 1
    """Model chunks of this rank that use it: gradients that it gets of one micro-batch."""

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.named.parameter.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat tensor of the bucket, in the parameter's local shape."""
        return flat[self.start : self.stop].view(self.named.parameter.shape)


class Bucket:
    """Contiguous parameters of one dtype with their gradients, reduced together.

    Attributes:
        slots: the parameters, in the order of their places.
        size: elements of its flat tensors (n), a multiple of the number of slices.
        weights: flat [n], the model's dtype; the parameters' own storage.
        gradients: flat [n], at least float32; None where only the own slice is kept. Gaps between parameters
            are zero in both.
        gaps: where those are, the end of the bucket too.
        own: the slice that this rank updates; all of it, without sharding.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        uses: Counter[int],
        strategy: Strategy,
        data_group: ProcessGroup | None,
    ) -> None:
        slices, index = 1, 0
        if data_group is not None and strategy != "no_shard":
            slices, index = data_group.size(), data_group.rank()
        slots: list[Slot] = []
        used = 0
        for named in parameters:
            slots.append(Slot(named, used, uses[id(named.parameter)]))
            used += _round_up(named.parameter.numel(), ALIGNMENT)
        self.slots = tuple(slots)
        self.size = _round_up(used, ALIGNMENT * slices)
        edges = [*(edge for slot in slots for edge in (slot.start, slot.stop)), self.size]
        gaps = zip(edges[1::2], edges[2::2], strict=True)
        self.gaps = tuple((start, stop) for start, stop in gaps if start < stop)
        first = parameters[0].parameter
        self.weights = torch.zeros(self.size, dtype=first.dtype, device=first.device)
        for slot in slots:
            parameter = slot.named.parameter
            view = slot.view(self.weights)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = None
        self._start, self._stop = index * self.size // slices, (index + 1) * self.size // slices
        self.gradients: torch.Tensor | None = None
        if strategy == "optim_grads":
            own_gradients = self.new_gradients(self._stop - self._start)
        else:
            self.gradients = self.new_gradients(self.size)
            own_gradients = self.own_slice(self.gradients)
        self.own = OwnBucket(self.own_slice(self.weights), own_gradients, self._own_parts())

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a flat tensor of the bucket, a view."""
        return flat[self._start : self._stop]

    def new_gradients(self, size: int) -> torch.Tensor:
        """Zeros [size] in the format that gradients are accumulated in."""
        dtype = torch.promote_types(self.weights.dtype, torch.float32)
        return torch.zeros(size, dtype=dtype, device=self.weights.device)

    def _own_parts(self) -> list[Part]:
        parts = []
        for slot in self.slots:
            start, stop = max(slot.start, self._start), min(slot.stop, self._stop)
            if start < stop:
                parts.append(Part(slot.named, start - slot.start, stop - slot.start, start - self._start))
        return parts


class ParameterBuffers:
    """All parameters of this rank, moved into buckets; every parameter becomes a view of its bucket.

    Attributes:
        parameters: in the order given (the module tree's), each parameter object once.
        strategy: what the data-parallel ranks divide among them.
        flat_buckets: whole buckets, in backward order.
        buckets: the slices of them that this rank updates.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        *,
        bucket_size: int | None,
        strategy: Strategy = "no_shard",
        data_group: ProcessGroup | None = None,
    ) -> None:
        """Move ``parameters``; a bucket is closed once it has ``bucket_size`` elements (None: one bucket).

        Parameters that another stage holds too (``facts.tied``) get a bucket of their own.

        Args:
            parameters: of all model chunks of this rank, one after another; a parameter that two of them use
                is given twice. The same on all data-parallel ranks.
            bucket_size: elements.
            strategy: what the data-parallel ranks divide among them.
            data_group: those ranks; needed where they divide anything.

        Raises:
            ValueError: if there is no parameter, if they lie on several devices, or on a bucket size below 1.
        """
        if bucket_size is not None and bucket_size < 1:
            raise ValueError(f"--ddp-bucket-size {bucket_size}: must be at least 1")
        unique: dict[int, NamedParameter] = {}
        for named in parameters:
            unique.setdefault(id(named.parameter), named)
        self.parameters = tuple(unique.values())
        devices = {named.parameter.device for named in self.parameters}
        if len(devices) != 1:
            raise ValueError(
                f"the parameters of a rank must lie on one device, found {sorted(map(str, devices))}"
            )
        self.device = devices.pop()
        assert data_group is not None or strategy == "no_shard", "nothing to divide over"
        self.strategy = strategy
        uses = Counter(id(named.parameter) for named in parameters)
        self.flat_buckets = tuple(
            Bucket(sorted(members, key=_later_use), uses, strategy, data_group)
            for members in _backward_groups(self.parameters, bucket_size)
        )
        self.buckets = tuple(bucket.own for bucket in self.flat_buckets)
        self._gather: ParameterGather | None = None
        if data_group is not None and self.sharded:
            self._gather = ParameterGather(
                [bucket.weights for bucket in self.flat_buckets],
                [bucket.own.weights for bucket in self.flat_buckets],
                data_group,
            )

    @property
    def sharded(self) -> bool:
        """Whether the data-parallel ranks update disjoint slices, rather than all of them everything."""
        return self.strategy != "no_shard"

    def gather_during_forward(self, modules: Sequence[nn.Module]) -> None:
        """From now on let :meth:`publish` only start, and a module wait before it reads its parameters.

        Args:
            modules: all model chunks of this rank, in the order of their forward passes; the same on all
                data-parallel ranks.
        """
        if self._gather is not None:
            places = {
                id(slot.named.parameter): number
                for number, bucket in enumerate(self.flat_buckets)
                for slot in bucket.slots
            }
            self._gather.overlap_with(modules, places)

    def publish(self) -> None:
        """Let the model see what has been written to the buckets' weights; all data-parallel ranks together.

        One all-gather a bucket where the ranks have updated slices of it. With
        :meth:`gather_during_forward` they have only been started when this returns.
        """
        if self._gather is not None:
            self._gather.start()

    def wait_for_parameters(self) -> None:
        """Return when every parameter has what was published last."""
        if self._gather is not None:
            self._gather.wait()

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Every parameter's bucket and place, bucket by bucket."""
        for bucket in self.flat_buckets:
            for slot in bucket.slots:
                yield bucket, slot

    def gradients(self) -> dict[str, torch.Tensor]:
        """Views of the gradients by parameter name, in the parameters' local shapes, at least float32.

        Only where nothing is divided: else no rank holds them whole.
        """
        assert not self.sharded, "no rank holds whole gradients"
        return {slot.named.name: slot.view(bucket.own.gradients) for bucket, slot in self.slots()}


def default_bucket_size(data_parallel_size: int) -> int:
    """Elements of a bucket where the user gave none: large buckets use the network well."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def _backward_groups(
    parameters: Sequence[NamedParameter], bucket_size: int | None
) -> Iterator[list[NamedParameter]]:
    """The members of each bucket: runs of one dtype in backward order, and all tied parameters together.

    The tied ones come when the last of them has its gradient. Where they come differs between the stages that
    hold them, but what lies in their bucket, and where, does not.
    """
    tied = [named for named in reversed(parameters) if named.facts.tied]
    group: list[NamedParameter] = []
    for named in reversed(parameters):
        if named.facts.tied:
            if named is tied[-1]:
                if group:
                    yield group
                    group = []
                yield sorted(tied, key=lambda named: named.name)
            continue
        full = bucket_size is not None and sum(other.parameter.numel() for other in group) >= bucket_size
        if group and (full or group[0].parameter.dtype != named.parameter.dtype):
            yield group
            group = []
        group.append(named)
    if group:
        yield group


def _later_use(named: NamedParameter) -> tuple[bool, bool, bool]:
    """Sort key inside a bucket, the same on all tensor-parallel ranks.

    With weight decay first; then split over tensor-parallel ranks before replicated, since all count the
    former and one alone the latter; of those, the ones whose gradients ranks have to add up last.
    """
    facts = named.facts
    replicated = named.parameter.shape[facts.dim] == facts.global_shape[facts.dim]
    return (not facts.weight_decay, replicated, facts.partial_over_tp)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
