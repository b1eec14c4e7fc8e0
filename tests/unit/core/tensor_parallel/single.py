"""A tensor-parallel group of one rank, without a world around it."""

import datetime

import torch.distributed as dist
from torch.distributed import ProcessGroup


def single_rank_group() -> ProcessGroup:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=10))
