"""A rank as a launcher starts it: meet, sum the ranks over the world, say the sum."""

import logging
import os
import sys

import torch
import torch.distributed as dist

from megatron.core.config import ParallelConfig
from megatron.training.initialize import discover_world, start_process_groups


def main(timeout_seconds: float) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    layout = ParallelConfig(distributed_backend="gloo", distributed_timeout_minutes=timeout_seconds / 60)
    try:
        runtime = start_process_groups(layout, discover_world(os.environ))
        total = torch.tensor([float(runtime.rank)])
        dist.all_reduce(total, group=runtime.state.world_group)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", flush=True)
        os._exit(1)
    print(f"rank {runtime.rank} of {runtime.world_size} sums {total.item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
