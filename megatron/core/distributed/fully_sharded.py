"""ZeRO-3: weights, gradients and optimizer state are all divided over the data-parallel ranks.

Rajbhandari et al. 2020 (arXiv:1910.02054, section 5.3), through PyTorch's ``fully_shard``. A model chunk is
cut into *units*, its layers, and the *root*: what is in no unit (embeddings, final norm, output matrix).
Between uses a rank holds a share of the rows of every parameter. A unit's whole weights exist from shortly
before its forward or backward until right after it; the root's from a chunk's forward until the end of its
next backward.

To the optimizer a :class:`FullyShardedStore` is a parameter store and a gradient reducer in one. A unit's own
weights are one flat bucket in at least float32, so that they *are* the main weights; what is gathered for a
forward or backward is rounded to the format that the model was built in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron.core.communication import Handle, plain, start_all_gather, start_reduce_scatter
from megatron.core.distributed.own_bucket import OwnBucket, Part
from megatron.core.parameter import NamedParameter, ParameterFacts, named_parameters

ALIGNMENT = 64
"""Elements that every parameter's share begins at a multiple of: whole cache lines in every number format."""


class FullyShardedStore:
    """The parameters of this rank's model chunks, divided by rows over the data-parallel ranks.

    Rank r of d holds rows [r c, (r + 1) c) of every local tensor, c = ceil(rows / d): fewer or none on the
    last ranks where the rows do not divide. Tensor-parallel peers, and the stages that hold the two ends of a
    tied embedding, have tensors of one shape, so that they hold the same rows.

    A step is::

        store.zero_grad(num_microbatches)
        forwards and backwards of whole chunks, in any order that a schedule gives
        store.finish()

    after which the buckets' gradients are sums over all micro-batches and data-parallel ranks. Every backward
    of a unit ends with a reduce-scatter of its gradients, which is added to the bucket's in at least float32.

    Attributes:
        parameters: in the order of the module tree, each once. They have the local tensors' shapes, but this
            rank holds its rows of them only.
        buckets: one for each unit and root that has parameters.
        device: where they lie.
        sharded: always True.
        loss_factor: what every loss is to be multiplied by: the number of ranks, where gradients are divided
            by it, and else 1.
    """

    sharded = True

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        units: Sequence[Sequence[nn.Module]],
        data_group: ProcessGroup,
        *,
        average: bool = False,
        reduce_dtype: torch.dtype | None = None,
        splits_backward: bool = False,
    ) -> None:
        """Divide the parameters of ``chunks`` in place; all ranks of ``data_group`` call this together.

        Call it once the parameters have their initial values, the same on all ranks of the group, and keep no
        reference to a parameter from before: it would keep the whole tensor.

        Args:
            chunks: this rank's model chunks, in the format (float64, float32 or 16 bits) to compute in.
            units: of each chunk the submodules that are gathered one by one, in the order of their forwards.
                A unit is called as a module, and nobody else reads its parameters.
            data_group: the ranks that hold the same parameters (data and context parallel).
            average: divide gradients by the number of ranks when they are summed; see :attr:`loss_factor`.
            reduce_dtype: format that gradients travel and are summed over ranks in; None is the buckets'.
            splits_backward: whether the schedule forms weight gradients apart from the rest of a backward.

        Raises:
            ValueError: if the schedule splits backwards, or if two chunks share a parameter or none has any.
        """
        if splits_backward:
            raise ValueError(
                "--data-parallel-sharding-strategy optim_grads_params sums a layer's gradients at the end of "
                "its backward, but --pipeline-schedule zb-h1 and zb-v form weight gradients later: choose "
                "another schedule (1f1b, interleaved, gpipe), or divide no more than optim_grads does"
            )
        held = [list(_held_parameters(chunk)) for chunk in chunks]
        _refuse_shared(held)
        example = next((one.parameter for chunk_held in held for one in chunk_held), None)
        if example is None:
            raise ValueError("there is no parameter to divide: a stage must hold some part of the model")
        self.device = example.device
        self.loss_factor = data_group.size() if average else 1
        plan = _Plan(data_group, example.dtype, reduce_dtype, self.device, divisor=self.loss_factor)
        del example  # or it would be kept whole
        self._roots = [cast(FSDPModule, chunk) for chunk in chunks]
        self._gradients: list[tuple[nn.Parameter, DTensor]] = []
        buckets: list[OwnBucket] = []
        for chunk, chunk_units, chunk_held in zip(chunks, units, held, strict=True):
            for module in [*chunk_units, chunk]:
                bucket, gradients = _divide(module, chunk_held, plan)
                self._gradients += gradients
                buckets += [bucket] if gradients else []
            _gather_ahead(chunk, chunk_units)
        self.buckets = tuple(buckets)
        self.parameters = tuple(one.named() for chunk_held in held for one in chunk_held)

    def zero_grad(self, num_microbatches: int) -> None:
        """Begin a step: the gradients are zero. How many micro-batches it has does not matter here."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def finish(self) -> None:
        """Complete the gradients of this step; they are, since every backward ends with their sums."""
        for parameter, gradient in self._gradients:
            assert parameter.grad is gradient, "a gradient went elsewhere than into its bucket"

    def publish(self) -> None:
        """Drop what is gathered, so that the next forward gathers what the buckets hold now."""
        for root in self._roots:
            root.reshard()

    def wait_for_parameters(self) -> None:
        """Do nothing: a forward gathers what it needs."""


class _Plan:
    """How every unit is divided."""

    def __init__(
        self,
        group: ProcessGroup,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
        *,
        divisor: int,
    ) -> None:
        self.mesh = DeviceMesh.from_group(plain(group), device.type, mesh_dim_names=("data",))
        self.device = device
        self.divisor = divisor
        self.own_dtype = torch.promote_types(dtype, torch.float32)
        self.precision = MixedPrecisionPolicy(
            dtype, reduce_dtype or self.own_dtype, cast_forward_inputs=False
        )
        self.all_gather = _AllGather(group)
        self.reduce_scatter = _ReduceScatter(group)

    def shard(self, module: nn.Module) -> None:
        """Let ``fully_shard`` take over what no unit inside ``module`` has taken."""
        unit = fully_shard(module, mesh=self.mesh, mp_policy=self.precision)
        # Losses are divided by the global token count already: gradients only ever add up.
        unit.set_gradient_divide_factor(float(self.divisor))
        unit.set_force_sum_reduction_for_comms(True)
        # A parameter without a gradient counts as zero, so that all ranks reduce tensors of one size.
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        unit.set_custom_all_gather(self.all_gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(self.reduce_scatter)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Held:
    """A parameter of a chunk, found in the module tree whether it is whole or divided."""

    name: str
    facts: ParameterFacts
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that have it, and what it is called there."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the modules have at the moment."""
        module, attribute = self.places[0]
        return cast(nn.Parameter, getattr(module, attribute))

    def named(self) -> NamedParameter:
        """The parameter as the rest of the engine knows it."""
        return NamedParameter(self.name, self.parameter, self.facts)


def _held_parameters(chunk: nn.Module) -> Iterator[_Held]:
    """The parameters of a chunk in the order of its module tree, each once."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in chunk.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, attribute))
    for named in named_parameters(chunk):
        yield _Held(named.name, named.facts, tuple(places[id(named.parameter)]))


def _refuse_shared(held: Sequence[Sequence[_Held]]) -> None:
    seen: set[int] = set()
    for chunk_held in held:
        own = {id(one.parameter): one.name for one in chunk_held}
        for identity, name in own.items():
            if identity in seen:
                raise ValueError(
                    f"two model chunks of one stage share {name}, which --data-parallel-sharding-strategy "
                    "optim_grads_params cannot divide: give --untie-embeddings-and-output-weights or one "
                    "chunk a stage, or divide no more than optim_grads does"
                )
        seen |= own.keys()


def _divide(
    module: nn.Module, held: Sequence[_Held], plan: _Plan
) -> tuple[OwnBucket, list[tuple[nn.Parameter, DTensor]]]:
    """Divide what ``module`` holds and no unit in it does.

    Args:
        module: a unit, or the root once its units are divided.
        held: all parameters of the chunk.
        plan: how.

    Returns:
        This rank's shares, and each parameter with its gradient.
    """
    inside = set(module.modules())
    own = [one for one in held if one.places[0][0] in inside and not isinstance(one.parameter, DTensor)]
    for one in own:
        one.parameter.data = one.parameter.data.to(plan.own_dtype)
    plan.shard(module)
    ranks, rank = plan.mesh.size(), plan.mesh.get_local_rank()
    shares: list[_Share] = []
    size = 0
    for one in sorted(own, key=_later_use):
        share = _Share(one, -(-one.parameter.shape[0] // ranks), rank, size)
        shares.append(share)
        size += -(-share.capacity // ALIGNMENT) * ALIGNMENT
    weights = torch.zeros(size, dtype=plan.own_dtype, device=plan.device)
    gradients = torch.zeros_like(weights)
    moved = [share.move(weights, gradients, plan.mesh) for share in shares]
    return OwnBucket(weights, gradients, [share.part() for share in shares if share.count]), moved


def _later_use(one: _Held) -> tuple[bool, bool, bool]:
    """Sort key inside a bucket, the same on all tensor-parallel ranks.

    With weight decay first; then split over tensor-parallel ranks before replicated, since all count the
    former and one alone the latter; of those, the ones whose gradients ranks have to add up last.
    """
    facts = one.facts
    replicated = one.parameter.shape[facts.dim] == facts.global_shape[facts.dim]
    return (not facts.weight_decay, replicated, facts.partial_over_tp)


@dataclass(frozen=True)
class _Share:
    """This rank's rows of a parameter, and their place in a bucket."""

    held: _Held
    rows: int
    """Rows that there is room for: those of the first rank."""
    rank: int
    offset: int
    """First element in the bucket's flat tensors."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole local tensor."""
        return self.held.parameter.shape

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return self.shape[1:].numel()

    @property
    def first(self) -> int:
        """This rank's first row."""
        return min(self.rank * self.rows, self.shape[0])

    @property
    def count(self) -> int:
        """Rows that this rank has."""
        return min(self.rows, self.shape[0] - self.first)

    @property
    def capacity(self) -> int:
        """Elements that there is room for."""
        return self.rows * self.row_size

    def part(self) -> Part:
        """What the optimizer sees of it."""
        start = self.first * self.row_size
        return Part(self.held.named(), start, start + self.count * self.row_size, self.offset)

    def move(
        self, weights: torch.Tensor, gradients: torch.Tensor, mesh: DeviceMesh
    ) -> tuple[nn.Parameter, DTensor]:
        """Let flat tensors be the storage of this rank's rows, and of their gradient.

        ``fully_shard`` looks at its modules' parameters once more before their first forward, and takes one
        that was put in the place of its own as it is, if it has the rows that there is room for: the last of
        them may be padding.
        """
        before = self.held.parameter
        assert isinstance(before, DTensor)
        rows = before.to_local().detach()
        assert rows.shape[0] == self.count, f"{self.held.name}: {rows.shape[0]} rows, not {self.count}"
        room = weights[self.offset : self.offset + self.capacity].view(self.rows, *self.shape[1:])
        room[: self.count].copy_(rows)
        rows.untyped_storage().resize_(0)  # it would be kept until the first forward
        parameter = nn.Parameter(_divided(room, before, mesh))
        parameter.facts = self.held.facts  # type: ignore[attr-defined]
        for module, attribute in self.held.places:
            setattr(module, attribute, parameter)
        own = gradients[self.offset : self.offset + rows.numel()].view(rows.shape)
        return parameter, _divided(own, before, mesh)


def _divided(rows: torch.Tensor, like: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor of the shape of ``like`` of which this rank has ``rows``, without a copy."""
    divided: DTensor = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )
    return divided


def _gather_ahead(chunk: nn.Module, units: Sequence[nn.Module]) -> None:
    """Start gathering a unit when the one before it, in forward or backward order, has been gathered."""
    order = [cast(FSDPModule, module) for module in (chunk, *units)]
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])
    backward = [order[0], *order[:0:-1]]
    for module, following in pairwise(backward):
        module.set_modules_to_backward_prefetch([following])


class _Collective:
    """What the two collectives of ``fully_shard`` have in common."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    """Gathers weights, counted like all other traffic; it goes on while the caller computes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Start; ``fully_shard`` waits before it needs the output."""
        return _Pending(start_all_gather(output_tensor, input_tensor, self._group))


class _ReduceScatter(_Collective):
    """Sums gradients, counted like all other traffic."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum; with NCCL the current stream goes on when it is done."""
        assert op == dist.ReduceOp.SUM
        start_reduce_scatter(output_tensor, input_tensor, self._group).wait()


class _Pending(dist.Work):
    """A handle as ``fully_shard`` wants it."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the collective is done; with NCCL, let the current stream go on only then."""
        self._handle.wait()
        return True
