"""From a lone process to a rank with a device and its process groups."""

import datetime
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _set_pg_timeout

from megatron.core.communication import Meter, plain
from megatron.core.config import ParallelConfig
from megatron.core.device import default_backend, device_type, local_device
from megatron.core.parallel_state import ParallelState, create_parallel_state
from megatron.training.config import RunConfig
from megatron.training.flags import UsageError
from megatron.training.launcher import World, discover_world
from megatron.training.rendezvous import RendezvousError, meet

__all__ = ["RendezvousError", "Runtime", "World", "discover_world", "initialize", "start_process_groups"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """One rank of a running job."""

    rank: int
    """Number of this rank, from 0."""
    world_size: int
    """Ranks of the job."""
    local_rank: int
    """Number of this rank on its node, from 0."""
    device: torch.device
    """Where this rank computes."""
    state: ParallelState
    """Its process groups."""
    meter: Meter | None = None
    """What counts the traffic over them, with --log-communication."""
    store: Store | None = None
    """Where ranks leave word for each other without a collective."""


def initialize(config: RunConfig, world: World) -> Runtime:
    """Start the process groups of a run; every rank calls this with the same settings.

    Raises:
        UsageError: if the devices or the backend that the flags ask for are not there.
        RendezvousError: if not all ranks come within --distributed-timeout-minutes.
    """
    if config.parallel.deterministic_mode:
        _choose_deterministic_kernels()
    meter = Meter() if config.logging.log_communication else None
    return start_process_groups(config.parallel, world, meter)


def start_process_groups(layout: ParallelConfig, world: World, meter: Meter | None = None) -> Runtime:
    """Meet the other ranks, take a device, and make the groups of ``layout``.

    A world of one needs no network.

    Args:
        layout: the sizes of the axes.
        world: this rank's place in the job.
        meter: counts what travels over the groups; None counts nothing.

    Raises:
        UsageError: if the devices or the backend that the flags ask for are not there.
        RendezvousError: if not all ranks come in time.
    """
    kind, backend = _device_kind_and_backend(layout)
    device = local_device(kind, world.local_rank)
    timeout = datetime.timedelta(minutes=layout.distributed_timeout_minutes)
    store = meet(world, timeout.total_seconds())
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout
    )
    state = create_parallel_state(layout, kind, meter)
    _set_timeouts(state, timeout)
    _log_world(world, backend, device)
    return Runtime(world.rank, world.world_size, world.local_rank, device, state, meter, store)


def _device_kind_and_backend(layout: ParallelConfig) -> tuple[str, str]:
    """NCCL goes with GPUs, gloo with CPUs."""
    kind = device_type()
    if layout.distributed_backend == "gloo":
        return "cpu", "gloo"
    if layout.distributed_backend == "nccl" and kind == "cpu":
        raise UsageError(
            "--distributed-backend nccl needs GPUs, and this machine shows none: leave it out, or give gloo"
        )
    return kind, default_backend(kind)


def _choose_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _set_timeouts(state: ParallelState, timeout: datetime.timedelta) -> None:
    """Let the time limit hold in every group: new groups have torch's own limit, not that of the world."""
    groups = [*state.groups.values(), state.pp_gradients]
    groups += [state.data_group, state.model_group, state.world_group]
    if state.embedding_group is not None:
        groups.append(state.embedding_group)
    for group in groups:
        _set_pg_timeout(timeout, plain(group))


def _log_world(world: World, backend: str, device: torch.device) -> None:
    if world.rank != 0:
        return
    if world.address is None:
        origin = "world size 1: a single process, without a launcher"
    else:
        origin = (
            f"rank 0 of world size {world.world_size}, started by {world.launcher}, "
            f"meeting at {world.address}:{world.port}"
        )
    log.info("> %s; device %s, backend %s", origin, device.type, backend)
