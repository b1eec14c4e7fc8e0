"""Gradients of a step: accumulated over micro-batches in float32, then summed over data-parallel ranks.

Every loss is divided by the number of counted tokens of the *global* batch before its backward, so gradients
only ever add up: over micro-batches here, and over ranks in one collective a bucket. What that is depends on
what the ranks divide among them (Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; d ranks, m
micro-batches, P elements of the padded buckets, 4 bytes each, 2 with a 16-bit collective):

* nothing: one all-reduce, 2 (d - 1)/d · 4P bytes a step;
* optimizer state: one reduce-scatter, (d - 1)/d · 4P bytes a step;
* gradients too: one reduce-scatter after every micro-batch, m (d - 1)/d · 4P bytes a step. That is the price
  of never holding more than a few whole buckets of gradients.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.communication import all_reduce, start_all_reduce, start_reduce_scatter
from megatron.core.distributed.buffers import ParameterBuffers
from megatron.core.distributed.filling import Filling, GradientPool

_UNDER_WAY = 2
"""Pooled buckets that may be on their way at a time, before the next one waits for the oldest."""


class GradientReducer:
    """Gathers each parameter's ``.grad`` into its bucket, and sums the buckets over data-parallel ranks.

    A hook runs as soon as a parameter's gradient of one micro-batch is complete: the first is copied into the
    bucket, later ones are added, and ``.grad`` is dropped. So buckets need no zeroing, and a 16-bit gradient
    lives only for a moment. Gradients are counted, so that a full bucket is known. A step is::

        reducer.zero_grad(num_microbatches)
        the forward and backward passes of the micro-batches, in any order
        reducer.finish()

    Afterwards the gradients of ``buffers.buckets`` are sums over all ranks. All data-parallel ranks reduce
    the same buckets in the same order. With divided gradients that takes it that each pass gives gradients
    to the same parameters on all of them, which is checked.
    """

    def __init__(
        self,
        buffers: ParameterBuffers,
        data_group: ProcessGroup,
        *,
        overlap: bool,
        average: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Hook onto the parameters of ``buffers``.

        Args:
            buffers: this rank's parameters and gradients.
            data_group: ranks that hold the same parameters.
            overlap: reduce a bucket as soon as it is full, while the backward passes go on.
            average: divide by the number of ranks in the collective; see :attr:`loss_factor`.
            reduce_dtype: format that gradients travel and are summed over ranks in; None is their own.
        """
        self._buffers = buffers
        self._group = data_group
        self._overlap = overlap
        self._average = average
        self._reduce_dtype = reduce_dtype if data_group.size() > 1 else None
        self._pool = GradientPool()
        self._rounds = 0
        self._order = 0  # a hash of the order in which buckets have been reduced
        self._under_way: list[Callable[[], None]] = []
        self._fillings = [Filling(bucket, self._pool) for bucket in buffers.flat_buckets]
        for index, filling in enumerate(self._fillings):
            for number, slot in enumerate(filling.bucket.slots):
                hook = partial(self._arrive, index, number)
                slot.named.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def loss_factor(self) -> int:
        """What every loss is to be multiplied by: the number of ranks, where the collective divides by it."""
        return self._group.size() if self._average else 1

    @property
    def _each_microbatch(self) -> bool:
        """Whether gradients are reduced after every micro-batch, and not once a step."""
        return self._buffers.strategy == "optim_grads"

    def zero_grad(self, num_microbatches: int) -> None:
        """Begin a step of so many micro-batches: whatever the buckets hold counts as zero from here on.

        A parameter is complete when it has got one gradient for each micro-batch and each model chunk of this
        rank that uses it.
        """
        assert not self._under_way, "finish() has not been called since the last backward"
        self._rounds = num_microbatches if self._each_microbatch else 1
        self._order = 0
        for filling in self._fillings:
            filling.begin(num_microbatches, self._rounds)

    def finish(self) -> None:
        """Complete the gradients of this step: afterwards each own bucket holds the sums over all ranks.

        Parameters that got no gradient at all have a zero one.

        Raises:
            RuntimeError: on all ranks, if divided gradients were reduced in another order on some of them.
        """
        for done in range(self._rounds):
            for filling in self._fillings:
                if filling.rounds_done <= done:
                    self._reduce(filling)
        self._complete(leave=0)
        self._pool.clear()
        if self._each_microbatch and self._group.size() > 1:
            self._check_order()

    def _check_order(self) -> None:
        """Refuse sums of buckets that do not belong together."""
        orders = torch.tensor([self._order, -self._order], device=self._buffers.device)
        highest, lowest = all_reduce(orders, self._group, dist.ReduceOp.MAX).tolist()
        if highest != -lowest:
            raise RuntimeError(
                "data-parallel ranks have reduced gradients in different orders, since some parameters got "
                "gradients in other passes than on other ranks: this step's gradients are worthless. Use "
                "--data-parallel-sharding-strategy optim"
            )

    def _arrive(self, index: int, number: int, parameter: nn.Parameter) -> None:
        """Take over a parameter's gradient of one micro-batch."""
        gradient = parameter.grad
        if gradient is None:  # a backward pass that leaves this weight's gradient for later
            return
        filling = self._fillings[index]
        filling.store(number, gradient)
        parameter.grad = None
        if filling.full and (self._overlap or self._each_microbatch):
            self._reduce_full_buckets(index)

    def _reduce_full_buckets(self, index: int) -> None:
        """Start reducing what is full, from bucket ``index`` on, no bucket ahead of the one before it."""
        while index < len(self._fillings):
            filling = self._fillings[index]
            waits = index > 0 and self._fillings[index - 1].rounds_done <= filling.rounds_done
            if waits or not filling.full:
                return
            self._reduce(filling)
            index += 1

    def _reduce(self, filling: Filling) -> None:
        """Start to sum a bucket over the ranks; what is left to do then waits in ``_under_way``."""
        self._order = (self._order * 1_000_003 + self._fillings.index(filling) + 1) % (1 << 62)
        first = filling.rounds_done == 0
        whole = filling.take()
        bucket = filling.bucket
        sent = whole if self._reduce_dtype is None else whole.to(self._reduce_dtype)
        scale = 1.0
        if self._buffers.sharded:
            piece = bucket.own_slice(sent)
            handle = start_reduce_scatter(piece, sent, self._group)
            scale = 1.0 / self.loss_factor  # a sum that is scattered is divided where it arrives
        else:
            piece = sent
            handle = start_all_reduce(
                sent, self._group, dist.ReduceOp.AVG if self._average else dist.ReduceOp.SUM
            )

        def complete() -> None:
            handle.wait()
            own = bucket.own.gradients
            if not first:
                own.add_(piece, alpha=scale)
            else:
                if piece.data_ptr() != own.data_ptr():
                    own.copy_(piece)
                if scale != 1.0:
                    own.mul_(scale)
            if self._each_microbatch:
                self._pool.give(whole)

        self._under_way.append(complete)
        if self._each_microbatch:
            self._complete(leave=_UNDER_WAY if self._overlap else 0)

    def _complete(self, leave: int) -> None:
        """Complete the oldest reductions until ``leave`` are under way."""
        while len(self._under_way) > leave:
            self._under_way.pop(0)()
