"""Do data-parallel replicas hold the same parameters?"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.buffers import ParameterBuffers

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as a signed number


class ReplicaError(RuntimeError):
    """Ranks that should hold the same parameters do not."""


def check_replicas(buffers: ParameterBuffers, data_group: ProcessGroup) -> None:
    """Compare a fingerprint of every parameter over the ranks of ``data_group``; all of them call this.

    It reads the parameters once and exchanges 8 bytes for each of them.

    Raises:
        ReplicaError: on all ranks of the group alike, naming the first parameter that differs, and where.
    """
    if data_group.size() == 1:
        return
    own = torch.stack([_fingerprint(named.parameter.detach()) for named in buffers.parameters])
    gathered = torch.empty(data_group.size() * own.numel(), dtype=own.dtype, device=own.device)
    dist.all_gather_single(gathered, own, group=data_group)
    rows = gathered.view(data_group.size(), own.numel())
    differs = rows != rows[0]  # [ranks, parameters]
    if not differs.any():
        return
    number = int(differs.any(dim=0).nonzero()[0])
    ranks = dist.get_process_group_ranks(data_group)
    others = [rank for rank, odd in zip(ranks, differs[:, number].tolist(), strict=True) if odd]
    raise ReplicaError(
        f"data-parallel replicas differ: {buffers.parameters[number].name} on ranks {others} is not what it "
        f"is on rank {ranks[0]} ({int(differs.any(dim=0).sum())} of {own.numel()} parameters differ). All "
        "replicas must start from the same seed or the same checkpoint."
    )


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar: a sum over the tensor's bits in which every element has an odd weight of its own."""
    bits = tensor.reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start, chunk in _chunks(bits):
        places = torch.arange(start, start + chunk.numel(), device=tensor.device)
        total += ((chunk.to(torch.int64) + 1) * (places * _MIX | 1)).sum()
    return total


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, flat.numel(), _CHUNK):
        yield start, flat[start : start + _CHUNK]
