"""Small facts that ranks tell one another when a run is set up."""

import json
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import all_gather, all_reduce


def gather_json(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank of ``group`` passed, in the order of ranks. Plain JSON values only.

    Args:
        value: what this rank says.
        group: the ranks; all of them call this together.
        device: where the group's collectives run.
    """
    message = json.dumps(value).encode()
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = len(message)
    longest = int(all_reduce(sizes, group).max())
    padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = all_gather(padded, group).view(group.size(), longest).cpu()
    return [json.loads(bytes(row.tolist())) for row in gathered]
