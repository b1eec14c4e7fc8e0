"""Transfers between pipeline stages, started in one place and finished in another: they overlap compute."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import Handle, all_reduce, plain, start_all_gather, start_exchange
from megatron.core.pipeline_parallel.actions import Channel


@dataclass(frozen=True)
class TensorSpec:
    """What travels between two stages: activations one way, their gradients the other."""

    shape: tuple[int, ...]
    """Usually [s/cp, b, h], with sequence parallelism [s/(cp tp), b, h]; at every boundary and for every
    micro-batch the same."""
    dtype: torch.dtype
    device: torch.device

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


@dataclass(frozen=True)
class PipelineChannels:
    """The groups over which the stages of a pipeline hand tensors on."""

    activations: ProcessGroup
    """The pipeline group: a rank in it is a stage. Activations travel here."""
    gradients: ProcessGroup
    """The same ranks with channels of their own, so that gradients do not queue behind activations."""
    tp: ProcessGroup
    """Ranks that share this stage; each talks to the rank of the same place in the other stages."""
    scatter_gather: bool = False
    """Whether each rank of ``tp`` sends its slice alone, and the receivers gather theirs (Narayanan et al.
    2021, arXiv:2104.04473, section 4.1): b s h / t elements cross a boundary per rank, not b s h. Only where
    what travels is replicated over tp: with sequence parallelism it is sliced already."""

    def group(self, channel: Channel) -> ProcessGroup:
        """The group of a channel."""
        return self.activations if channel == "activations" else self.gradients

    def slices(self, numel: int) -> int:
        """Into how many slices a tensor of ``numel`` elements is cut for its way; 1 sends it whole.

        A tensor that does not divide by the size of ``tp`` travels whole.
        """
        size = self.tp.size()
        return size if self.scatter_gather and numel % size == 0 else 1


def open_channels(channels: PipelineChannels, device: torch.device) -> None:
    """Make the connections of the channels; all ranks call this together, once, at set-up.

    NCCL makes a group's communicator in the group's first call, and the host of each rank waits there for all
    others. In the middle of a schedule, where one stage's first transfer comes after another stage's second,
    that would be a deadlock. Not counted as traffic.

    Args:
        channels: the channels of this rank.
        device: where the tensors that are going to travel live.
    """
    for group in (channels.activations, channels.gradients):
        all_reduce(torch.zeros(1, device=device), plain(group))


class Sending:
    """A tensor on its way to another stage; kept until :meth:`finish`."""

    def __init__(self, handle: Handle, buffer: Tensor) -> None:
        self._handle = handle
        self._buffer: Tensor | None = buffer

    def finish(self) -> None:
        """Return when the buffer is free again (NCCL: free for what the current stream does from here)."""
        self._handle.wait()
        self._buffer = None


class Receiving:
    """A tensor on its way from another stage."""

    def __init__(self, handle: Handle, whole: Tensor, own: Tensor, tp: ProcessGroup) -> None:
        """Make it.

        Args:
            handle: what to wait for.
            whole: the tensor that arrives.
            own: the slice of it that travels to this rank; where none are cut, all of it.
            tp: the ranks that the other slices travel to.
        """
        self._handle = handle
        self._whole = whole
        self._own = own
        self._tp = tp

    def finish(self) -> Tensor:
        """Wait for it, and gather it over tp where slices travel: the ranks of tp call this together."""
        self._handle.wait()
        if self._own.numel() < self._whole.numel():
            start_all_gather(self._whole.view(-1), self._own, self._tp).wait()
        return self._whole


def start_send(channels: PipelineChannels, channel: Channel, peer: int, tensor: Tensor) -> Sending:
    """Post a send and return at once.

    Args:
        channels: the channels of this rank.
        channel: the one to take.
        peer: the stage that receives.
        tensor: what leaves; not to be changed until the sending is finished. Where slices travel, this rank's
            is copied out, and ``tensor`` itself is not held.
    """
    buffer = tensor.contiguous()
    if channels.slices(tensor.numel()) > 1:
        buffer = _own_slice(channels, buffer).clone()  # [b s h / t]
    return Sending(start_exchange(channels.group(channel), [(buffer, peer)], []), buffer)


def start_receive(channels: PipelineChannels, channel: Channel, peer: int, spec: TensorSpec) -> Receiving:
    """Post a receive and return at once.

    Args:
        channels: the channels of this rank.
        channel: the one to take.
        peer: the stage that sends.
        spec: what arrives.
    """
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    own = _own_slice(channels, whole)
    handle = start_exchange(channels.group(channel), [], [(own, peer)])
    return Receiving(handle, whole, own, channels.tp)


def _own_slice(channels: PipelineChannels, tensor: Tensor) -> Tensor:
    """The slice of a contiguous tensor that this rank sends or receives: all of it where none are cut."""
    slices = channels.slices(tensor.numel())
    return tensor.view(slices, -1)[channels.tp.rank() if slices > 1 else 0]
