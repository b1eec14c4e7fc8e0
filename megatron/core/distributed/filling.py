"""How a bucket fills with the gradients of a step."""

import torch

from megatron.core.distributed.buffers import Bucket

_CAST_CHUNK = 1 << 20
"""Elements that are widened at a time: the temporary copy then stays in cache."""


class GradientPool:
    """Flat tensors that whole buckets of gradients live in for as long as a micro-batch fills them."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, bucket: Bucket) -> torch.Tensor:
        """A flat tensor [n] for a bucket, its content undefined: the shortest free one that will do."""
        dtype = bucket.own.gradients.dtype
        fitting = [flat for flat in self._free if flat.dtype == dtype and flat.numel() >= bucket.size]
        if fitting:
            taken = min(fitting, key=torch.Tensor.numel)
        else:
            taken = torch.empty(bucket.size, dtype=dtype, device=bucket.weights.device)
        # Where none was long enough a free one goes: the new one will do in its place.
        goes = taken if fitting else self._free[0] if self._free else None
        self._free = [flat for flat in self._free if flat is not goes]
        self._lent[taken.data_ptr()] = taken
        return taken[: bucket.size]

    def give(self, flat: torch.Tensor) -> None:
        """Take back what :meth:`take` gave."""
        self._free.append(self._lent.pop(flat.data_ptr()))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is lent and free."""
        return sum(flat.nbytes for flat in [*self._free, *self._lent.values()])

    def clear(self) -> None:
        """Free everything that has come back."""
        self._free.clear()


class Filling:
    """The gradients of one bucket during a step: what has arrived, and what has been reduced.

    Gradients are reduced in rounds: once a step, or once for each micro-batch. A parameter may run ahead of
    the others of its bucket by some micro-batches (a pipeline that defers some weight gradients); whatever it
    has got by then goes into a round, since gradients only add up.

    Attributes:
        bucket: the bucket.
        rounds_done: rounds of this step that have been taken to be reduced.
    """

    def __init__(self, bucket: Bucket, pool: GradientPool) -> None:
        self.bucket = bucket
        self.rounds_done = 0
        self._pool = pool
        self._whole: torch.Tensor | None = None
        self._written = [False] * len(bucket.slots)
        self._arrived = [0] * len(bucket.slots)
        self._of_round = [0] * len(bucket.slots)
        self._expected = [0] * len(bucket.slots)
        self._num_microbatches = 0
        self._missing = len(bucket.slots)

    def begin(self, num_microbatches: int, rounds: int) -> None:
        """Begin a step, in which each parameter gets ``num_microbatches`` gradients a use."""
        self.rounds_done = 0
        self._num_microbatches = num_microbatches
        self._expected = [slot.uses * num_microbatches for slot in self.bucket.slots]
        self._of_round = [expected // rounds for expected in self._expected]
        self._arrived = [0] * len(self._expected)
        self._written = [False] * len(self._expected)
        self._missing = len(self._expected)

    @property
    def full(self) -> bool:
        """Whether every parameter has got all that the round to be done next waits for."""
        return self._missing == 0

    def store(self, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the parameter in slot ``number``.

        Raises:
            RuntimeError: if the parameter has got all gradients of this step already.
        """
        slot = self.bucket.slots[number]
        self._arrived[number] += 1
        arrived = self._arrived[number]
        if arrived > self._expected[number]:
            raise RuntimeError(
                f"{slot.named.name} got gradient number {arrived} of a step that zero_grad() began with "
                f"{self._num_microbatches} micro-batches, where {self._expected[number]} were to come: its "
                "bucket may already be on its way to other ranks"
            )
        into = slot.view(self._gradients())
        if self._written[number]:
            _add(into, gradient)
        else:
            into.copy_(gradient)
            self._written[number] = True
        if arrived == (self.rounds_done + 1) * self._of_round[number]:
            self._missing -= 1

    def take(self) -> torch.Tensor:
        """The whole bucket's gradients [n] of this round, partial over the data-parallel ranks.

        What has not arrived is zero. The next gradient to arrive belongs to the next round.
        """
        whole = self._gradients()
        for slot, written in zip(self.bucket.slots, self._written, strict=True):
            if not written:
                slot.view(whole).zero_()
        self.rounds_done += 1
        self._whole = None
        self._written = [False] * len(self._written)
        self._missing = sum(
            arrived < (self.rounds_done + 1) * of_round
            for arrived, of_round in zip(self._arrived, self._of_round, strict=True)
        )
        return whole

    def _gradients(self) -> torch.Tensor:
        """Where the whole bucket's gradients are; between parameters it is zero."""
        if self._whole is None:
            if self.bucket.gradients is not None:
                self._whole = self.bucket.gradients
            else:
                self._whole = self._pool.take(self.bucket)
                for start, stop in self.bucket.gaps:
                    self._whole[start:stop].zero_()
        return self._whole


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
