"""Who a rank is: its place on every axis, and the process groups along them.

One :class:`torch.distributed.device_mesh.DeviceMesh` with the axes ``pp``, ``dp``, ``cp`` and ``tp``, tp
innermost: a tensor-parallel group sits on neighbouring ranks (one node), pipeline stages lie far apart.
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.communication import Meter, MeteredGroup
from megatron.core.config import ParallelConfig

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ModelParallel:
    """How ranks share the layers of one stage: what the network has to know of the layout."""

    tp: ProcessGroup
    """Ranks that share every layer."""
    cp: ProcessGroup
    """Ranks that share every sequence."""
    sequence_parallel: bool = False
    """Whether what tensor parallelism replicates is split along the sequence instead."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How ranks of a sequence see each other's keys and values."""


@dataclass(frozen=True)
class ParallelState:
    """The process groups of one rank. Made once, at the top, and passed down."""

    groups: dict[Axis, ProcessGroup]
    """This rank's group along each axis. Along ``pp`` activations travel, from stage to stage."""
    pp_gradients: ProcessGroup
    """The same ranks as along ``pp``, with channels of their own: gradients travel here."""
    data_group: ProcessGroup
    """Ranks that hold the same parameters: dp and cp together."""
    model_group: ProcessGroup
    """Ranks that hold one replica of the model together: pp and tp."""
    embedding_group: ProcessGroup | None
    """First and last stage, where this rank is on one of them and there are two or more; else None."""
    world_group: ProcessGroup
    """All ranks."""

    def group(self, axis: Axis) -> ProcessGroup:
        """This rank's process group along ``axis``."""
        return self.groups[axis]

    def size(self, axis: Axis) -> int:
        """Ranks along ``axis``."""
        return self.groups[axis].size()

    def rank(self, axis: Axis) -> int:
        """This rank's position along ``axis``."""
        return self.groups[axis].rank()


def model_parallel(state: ParallelState, config: ParallelConfig) -> ModelParallel:
    """What the network has to know of a layout."""
    return ModelParallel(state.group("tp"), state.group("cp"), config.sequence_parallel, config.cp_comm_type)


def create_parallel_state(
    config: ParallelConfig, device_type: str, meter: Meter | None = None
) -> ParallelState:
    """Make every group of the layout; all ranks of an initialised ``torch.distributed`` call this together.

    Args:
        config: the sizes of the axes.
        device_type: ``cpu`` or ``cuda``.
        meter: counts what travels over the groups, by axis; None counts nothing.

    Raises:
        ValueError: if the world does not divide by the model-parallel size.
    """
    world = dist.get_world_size()
    model = config.model_parallel_size
    if world % model:
        raise ValueError(f"world size {world} does not divide by tensor x pipeline x context size {model}")
    sizes: dict[Axis, int] = {
        "pp": config.pipeline_model_parallel_size,
        "dp": world // model,
        "cp": config.context_parallel_size,
        "tp": config.tensor_model_parallel_size,
    }
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    layout = mesh.mesh  # [pp, dp, cp, tp] global ranks
    pp, dp, cp, tp = layout.shape
    data_rows = layout.permute(0, 3, 1, 2).reshape(-1, dp * cp).tolist()
    pipeline_rows = layout.permute(1, 2, 3, 0).reshape(-1, pp).tolist()
    model_rows = layout.permute(1, 2, 0, 3).reshape(-1, pp * tp).tolist()
    embedding_rows = layout[[0, -1]].reshape(2, -1).t().tolist() if pp > 1 else []

    def metered(group: ProcessGroup | None, axis: str) -> ProcessGroup:
        assert group is not None, f"every rank has a place on the axis {axis}"
        return group if meter is None else MeteredGroup(group, axis, meter)

    embedding_group = _own_group(embedding_rows)
    return ParallelState(
        groups={axis: metered(mesh.get_group(axis), axis) for axis in AXES},
        pp_gradients=metered(_own_group(pipeline_rows), "pp"),
        data_group=metered(_own_group(data_rows), "dp"),
        model_group=metered(_own_group(model_rows), "world"),
        embedding_group=None if embedding_group is None else metered(embedding_group, "pp"),
        world_group=metered(dist.new_group(list(range(world))), "world"),
    )


def _own_group(rows: list[list[int]]) -> ProcessGroup | None:
    """Make one group for each row of ranks, in the same order on all ranks; return the one with this rank."""
    own: ProcessGroup | None = None
    for ranks in rows:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own
