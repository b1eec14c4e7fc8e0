"""Who a rank is: its place on every axis, and the process groups along them.

One :class:`torch.distributed.device_mesh.DeviceMesh` with the axes ``pp``, ``dp``, ``cp`` and ``tp``, tp
innermost: a tensor-parallel group sits on neighbouring ranks (one node), pipeline stages lie far apart.
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.config import ParallelConfig

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class ParallelState:
    """The process groups of one rank. Made once, at the top, and passed down."""

    groups: dict[Axis, ProcessGroup]
    """This rank's group along each axis."""
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

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embeddings."""
        return self.rank("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer and the loss."""
        return self.rank("pp") == self.size("pp") - 1


def create_parallel_state(config: ParallelConfig, device_type: str) -> ParallelState:
    """Make every group of the layout; all ranks of an initialised ``torch.distributed`` call this together.

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
    model_rows = layout.permute(1, 2, 0, 3).reshape(-1, pp * tp).tolist()
    embedding_rows = layout[[0, -1]].reshape(2, -1).t().tolist() if pp > 1 else []
    data_group = _own_group(data_rows)
    model_group = _own_group(model_rows)
    world_group = dist.new_group(list(range(world)))
    assert data_group is not None and model_group is not None and world_group is not None  # noqa: PT018
    return ParallelState(
        groups={axis: mesh.get_group(axis) for axis in AXES},
        data_group=data_group,
        model_group=model_group,
        embedding_group=_own_group(embedding_rows),
        world_group=world_group,
    )


def _own_group(rows: list[list[int]]) -> ProcessGroup | None:
    """Make one group for each row of ranks, in the same order on all ranks; return the one with this rank."""
    own: ProcessGroup | None = None
    for ranks in rows:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own
