"""Cross entropy over a vocabulary that is split over tensor-parallel ranks, without gathering logits.

With logits z, label y and the true vocabulary of v tokens, the loss of a position is

    log(sum_j exp(z_j)) - (1 - a) z_y - (a / v) sum_j z_j

where a is the label smoothing: the target distribution has a / v on every token and 1 - a more on the label,
as in Szegedy et al. 2016, section 7, and in PyTorch. (To get a smoothing that is defined as a / (v - 1) on
the other tokens alone, give ``a * v / (v - 1)``.) Columns of padding take no probability.

Over the ranks go b * s elements for each of three reductions: the maximum of the logits, the sum of
exponentials, and the part that is linear in the logits (Shoeybi et al. 2019, section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import all_reduce
from megatron.core.tensor_parallel.mappings import apply_function
from megatron.core.tensor_parallel.vocab_shard import VocabShard


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup, shard: VocabShard, label_smoothing: float = 0.0
) -> Tensor:
    """Loss of every position from logits that are split over the vocabulary.

    Args:
        logits: [s, b, v_pad/tp], sharded on the last dim, any finite size.
        labels: [s, b], replicated, tokens of the true vocabulary.
        group: the tensor-parallel group.
        shard: this rank's part of the vocabulary.
        label_smoothing: a, in [0, 1).

    Returns:
        [s, b], replicated, in float32 or the wider type of the logits.

    Raises:
        ValueError: if the last dim of the logits is not this rank's shard, as when they are gathered already,
            or if the smoothing is out of range.
        RuntimeError: if a label is outside the vocabulary (see :meth:`VocabShard.check`).
    """
    if logits.shape[-1] != shard.rows:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns where the shard of this tensor-parallel rank has "
            f"{shard.rows}; logits that were gathered already need a plain cross entropy"
        )
    check_label_smoothing(label_smoothing)
    shard.check(labels, "label")
    return apply_function(_CrossEntropy, logits, labels, group, shard, label_smoothing)


def check_label_smoothing(label_smoothing: float) -> None:
    """Refuse a smoothing outside [0, 1).

    Raises:
        ValueError: if it is.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label smoothing is {label_smoothing}, but has to be at least 0 and below 1")


def combine_log_sums(
    maximum: Tensor, log_sum: Tensor, owed: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Join what each rank knows of its own columns.

    Args:
        maximum: [n], the largest logit of this rank's columns; -inf if it has none.
        log_sum: [n], log of the sum of exponentials of this rank's logits; -inf if it has no columns.
        owed: [n], partial: this rank's share of a sum over the vocabulary.
        group: the tensor-parallel group.

    Returns:
        The log of the sum of exponentials over the whole vocabulary, and the whole sum; both [n], replicated.
    """
    if group.size() == 1:
        return log_sum, owed
    maximum = all_reduce(maximum.clone(), group, dist.ReduceOp.MAX)
    both = all_reduce(torch.stack([(log_sum - maximum).exp(), owed]), group)
    return maximum + both[0].log(), both[1]


class _CrossEntropy(torch.autograd.Function):
    """forward: local sums, three reductions. backward: local, the gradient of this rank's columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup, shard: VocabShard, smoothing: float
    ) -> Tensor:
        wide = logits[..., : shard.valid].to(torch.promote_types(logits.dtype, torch.float32))
        ids, mine = shard.local(labels)
        if shard.valid:
            maximum = wide.amax(-1)
            log_sum = wide.logsumexp(-1)
            target = wide.gather(-1, ids[..., None]).squeeze(-1)
            linear = target if mine is None else target * mine
            if smoothing:
                linear = (1 - smoothing) * linear + smoothing / shard.vocab_size * wide.sum(-1)
        else:
            maximum = log_sum = wide.new_full(labels.shape, -torch.inf)
            linear = wide.new_zeros(labels.shape)
        log_sum, linear = combine_log_sums(maximum, log_sum, linear, group)
        ctx.save_for_backward(logits, log_sum, ids, mine)
        ctx.shard, ctx.smoothing = shard, smoothing
        return log_sum - linear

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, log_sum, ids, mine = ctx.saved_tensors
        shard, smoothing = ctx.shard, ctx.smoothing
        grad_logits = torch.zeros_like(logits)
        if shard.valid:
            own = logits[..., : shard.valid].to(log_sum.dtype)
            own = (own - log_sum[..., None]).exp_()
            if smoothing:
                own -= smoothing / shard.vocab_size
            share = torch.full_like(log_sum, smoothing - 1.0)
            share = share if mine is None else share * mine
            own.scatter_add_(-1, ids[..., None], share[..., None])
            grad_logits[..., : shard.valid] = own.mul_(gradient[..., None])
        return grad_logits, None, None, None, None
