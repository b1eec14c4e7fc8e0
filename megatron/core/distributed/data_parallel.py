"""Gradients of a step: accumulated over micro-batches in float32, then summed over data-parallel ranks.

Nothing is averaged. Every loss is divided by the number of counted tokens of the *global* batch before its
backward, so gradients only ever add up: over micro-batches here, and over ranks in one all-reduce a bucket.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.buffers import Bucket, ParameterBuffers, Slot

_CAST_CHUNK = 1 << 20
"""Elements that are widened at a time: the temporary copy then stays in cache."""


class GradientReducer:
    """Gathers each parameter's ``.grad`` into its bucket, and sums the buckets over data-parallel ranks.

    A hook runs as soon as a parameter's gradient of one micro-batch is complete: the first of a step is
    copied into the bucket, later ones are added, and ``.grad`` is dropped. So buckets need no zeroing, and a
    16-bit gradient lives only for a moment. A step is::

        reducer.zero_grad()
        for each micro-batch: backward, with reducer.prepare_last_backward() right before the last one
        reducer.finish()
    """

    def __init__(self, buffers: ParameterBuffers, data_group: ProcessGroup, *, overlap: bool) -> None:
        """Hook onto the parameters of ``buffers``.

        Args:
            buffers: this rank's parameters and gradients.
            data_group: ranks that hold the same parameters.
            overlap: reduce a bucket as soon as the last backward has filled it.
        """
        self._buffers = buffers
        self._group = data_group
        self._overlap = overlap and data_group.size() > 1
        self._written: set[Slot] = set()  # what this step has stored so far
        self._missing: list[set[Slot]] | None = None  # by bucket, once the last backward is armed
        self._reduced = 0  # buckets whose reduction has started
        self._handles: list[dist.Work] = []
        for index, bucket in enumerate(buffers.buckets):
            for slot in bucket.slots:
                hook = self._hook(index, bucket, slot)
                slot.named.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Begin a step: whatever the buckets hold counts as zero from here on."""
        assert not self._handles, "finish() has not been called since the last backward"
        self._written.clear()
        self._missing = None
        self._reduced = 0

    def prepare_last_backward(self) -> None:
        """Say that the next backward is this step's last, so that full buckets may be reduced during it."""
        if self._overlap:
            self._missing = [set(bucket.slots) for bucket in self._buffers.buckets]

    def finish(self) -> None:
        """Complete the gradients of this step: afterwards every data-parallel rank holds the same sums.

        Parameters that got no gradient at all have a zero one.
        """
        for bucket in self._buffers.buckets[self._reduced :]:
            for slot in bucket.slots:
                if slot not in self._written:
                    slot.view(bucket.gradients).zero_()
        while self._reduced < len(self._buffers.buckets):
            self._reduce_next()
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        self._missing = None

    def _hook(self, index: int, bucket: Bucket, slot: Slot) -> Callable[[nn.Parameter], None]:
        return partial(self._store, index, slot, slot.view(bucket.gradients))

    def _store(self, index: int, slot: Slot, into: torch.Tensor, parameter: nn.Parameter) -> None:
        """Take over a parameter's gradient of one micro-batch."""
        gradient = parameter.grad
        assert gradient is not None
        if slot in self._written:
            _add(into, gradient)
        else:
            into.copy_(gradient)
            self._written.add(slot)
        parameter.grad = None
        if self._missing is not None:
            if slot not in self._missing[index]:
                raise RuntimeError(
                    f"{slot.named.name} got a second gradient after prepare_last_backward(), when its bucket "
                    "may already be on its way to other ranks; call it before a step's last backward only"
                )
            self._missing[index].remove(slot)
            self._reduce_full_buckets(self._missing)

    def _reduce_full_buckets(self, missing: list[set[Slot]]) -> None:
        """Start reducing what is full, in the order of buckets: collectives must match on all ranks."""
        while self._reduced < len(missing) and not missing[self._reduced]:
            self._reduce_next()

    def _reduce_next(self) -> None:
        gradients = self._buffers.buckets[self._reduced].gradients
        self._reduced += 1
        if self._group.size() > 1:
            handle = dist.all_reduce(gradients, group=self._group, async_op=True)
            assert handle is not None
            self._handles.append(handle)


def _add(into: torch.Tensor, gradient: torch.Tensor) -> None:
    """``into += gradient``, both of one shape, the sum formed in the dtype of ``into``.

    Where the dtypes differ PyTorch makes a wide copy first, so that a large one goes in chunks.
    """
    if into.dtype == gradient.dtype or into.numel() <= _CAST_CHUNK:
        into.add_(gradient)
        return
    chunks = zip(
        torch.split(into.view(-1), _CAST_CHUNK), torch.split(gradient.reshape(-1), _CAST_CHUNK), strict=True
    )
    for target, part in chunks:
        target.add_(part)
