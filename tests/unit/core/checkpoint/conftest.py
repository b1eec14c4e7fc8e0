from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A process group of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()
