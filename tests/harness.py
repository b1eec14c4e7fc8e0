"""Run a function on several CPU ranks, from a test.

The ranks fork from a server that has already imported torch, so a four-rank test costs a fraction of a
second. Spawning fresh interpreters costs several seconds per rank on a small machine.
"""

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.core.config import ParallelConfig
from megatron.core.parallel_state import ParallelState, create_parallel_state

# What ranks import, imported once; the training loop last, since it imports all the rest.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.multiprocessing", "pytest", "tests.training_harness"]
)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_seconds: int = 60) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks; give back what each returned, by rank.

    ``fn`` must be a module-level function: each rank finds it again by its import name. A failure on any rank
    fails the caller, with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        rank_args = (fn, world_size, folder, timeout_seconds, args)
        mp.start_processes(_rank_main, args=rank_args, nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    folder: str,
    timeout_seconds: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    try:
        result = fn(*args)
        torch.save(result, Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def make_state(tp: int = 1, pp: int = 1, cp: int = 1) -> ParallelState:
    """The parallel state of this rank in a layout; what is left of the world is data parallel."""
    config = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp
    )
    return create_parallel_state(config, "cpu")
