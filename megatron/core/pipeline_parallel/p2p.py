"""Transfers between pipeline stages."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorSpec:
    """What travels between two stages: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    """Usually [s, b, h]; on every stage and for every micro-batch the same."""
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A fresh buffer to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor that the receiver doesn't expect; on the wire it would be garbage or a hang.

        Raises:
            ValueError: naming both shapes and types.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"a pipeline stage made an activation {tuple(tensor.shape)} of {tensor.dtype}, "
                f"but the next one expects {self.shape} of {self.dtype}"
            )


def exchange(group: ProcessGroup, peer: int, *, send: Tensor | None, receive: Tensor | None) -> None:
    """Send one tensor to a stage and receive one from it, both at once; return when both are through.

    On NCCL "through" holds for the current stream, so that the tensors can be used and freed right away. All
    transfers are batched ones: they share the group's one communicator, which NCCL makes when every
    rank has come to its first batch, and every stage's first transfer is one.

    Args:
        group: the pipeline group.
        peer: the other stage, as a rank in ``group``.
        send: contiguous tensor that leaves, or None.
        receive: contiguous buffer that is filled, or None.
    """
    operations = []
    if send is not None:
        operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=peer))
    if receive is not None:
        operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=peer))
    # gloo gives a handle for each tensor, NCCL one for the batch.
    for work in dist.batch_isend_irecv(operations):
        work.wait()
