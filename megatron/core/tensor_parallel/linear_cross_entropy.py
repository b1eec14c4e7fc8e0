"""The output layer and its loss as one function, which never holds all logits.

The gradients are formed in the forward. For a block of tokens the logits are computed and turned, in place,
into probabilities and then into their own gradient, which is multiplied at once into the gradients of the
hidden states and of the weight; the same memory then serves the next block. Nothing is recomputed, so this
costs the three matrix products of a plain output layer, and the elementwise passes in between are made over a
few rows at a time, which stay in a CPU's cache.

For this the weight of each token's loss has to be known in the forward: the function gives the weighted *sum*
of losses, and the backward merely scales. Between forward and backward it keeps [s, b, h] and [v_pad/tp, h]
elements of gradient in place of [s, b, v_pad/tp] logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import Handle, all_gather, start_all_reduce, start_reduce_scatter
from megatron.core.device import elementwise_tile
from megatron.core.tensor_parallel.cross_entropy import check_label_smoothing, combine_log_sums
from megatron.core.tensor_parallel.vocab_shard import VocabShard

BLOCK_BYTES = 2**27
"""Most memory for a block of logits. The longer a block, the less often the weight's gradient is added to."""
COLUMNS = 8192
"""Columns of logits that go into one product for the weight's gradient."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    shard: VocabShard,
    *,
    token_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross entropies of ``hidden @ weight.T``, and every token's own.

    forward: as :func:`vocab_parallel_cross_entropy` on the logits. backward: the gradient of ``hidden``,
    already all-reduced, so that the caller needs no operator f; that of ``weight`` stays local. Under
    sequence parallelism the forward gathers ``hidden`` and reduce-scatters its gradient, once each.

    Args:
        hidden: [s, b, h] replicated, or [s/tp, b, h] sharded on dim 0 under sequence parallelism.
        weight: [v_pad/tp, h], sharded on dim 0.
        labels: [s, b], replicated, tokens of the true vocabulary.
        group: the tensor-parallel group.
        shard: this rank's part of the vocabulary.
        token_weights: [s, b], replicated: what each token's loss counts. None: all count 1. Tokens of weight
            0 are left out, whatever their label: no work is done for them.
        label_smoothing: as in :mod:`megatron.core.tensor_parallel.cross_entropy`.
        sequence_parallel: whether ``hidden`` is a part of the sequence.

    Returns:
        The weighted sum, a scalar, and the losses [s, b] (detached; 0 for tokens left out). Both replicated,
        in float32 or the wider type of ``hidden``.

    Raises:
        ValueError: if ``weight`` is not this rank's shard, ``hidden`` does not go with the labels, or the
            smoothing is out of range.
        RuntimeError: if a label is outside the vocabulary (see :meth:`VocabShard.check`).
    """
    if weight.shape[0] != shard.rows:
        raise ValueError(
            f"the output weight has {weight.shape[0]} rows where the shard of this tensor-parallel rank has "
            f"{shard.rows}"
        )
    check_label_smoothing(label_smoothing)
    ranks = group.size() if sequence_parallel else 1
    if hidden.shape[0] * ranks != labels.shape[0]:
        raise ValueError(
            f"hidden states of {hidden.shape[0]} tokens on each of {ranks} ranks for {labels.shape[0]} labels"
        )
    row_labels, row_weights, counted = labels.reshape(-1), None, None  # [s * b]
    if token_weights is not None:
        row_weights = token_weights.reshape(-1).to(torch.promote_types(hidden.dtype, torch.float32))
        counted = row_weights.nonzero().squeeze(1)
        if counted.numel() == labels.numel():
            counted = None
        else:
            row_labels, row_weights = row_labels[counted], row_weights[counted]
    shard.check(row_labels, "label")
    training = torch.is_grad_enabled()
    plan = _Plan(
        group=group,
        shard=shard,
        smoothing=label_smoothing,
        needs_hidden=training and hidden.requires_grad,
        needs_weight=training and weight.requires_grad,
        sequence_parallel=ranks > 1,
        counted=counted,
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    total, losses = _LinearCrossEntropy.apply(rows, weight, row_labels, row_weights, plan)  # type: ignore[no-untyped-call]
    if counted is not None:
        losses = losses.new_zeros(labels.numel()).index_copy_(0, counted, losses)
    return total, losses.view(labels.shape)


@dataclass(frozen=True)
class _Plan:
    """What needs no gradient."""

    group: ProcessGroup
    shard: VocabShard
    smoothing: float
    needs_hidden: bool
    needs_weight: bool
    sequence_parallel: bool
    counted: Tensor | None
    """Rows of the whole sequence that work is done for; None: all."""


class _LinearCrossEntropy(torch.autograd.Function):
    """On flat hidden states, [s * b, h] or [s/tp * b, h], with labels and weights of the rows that count."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        rows = all_gather(hidden, plan.group) if plan.sequence_parallel else hidden
        if plan.counted is not None:
            rows = rows.index_select(0, plan.counted)
        ctx.plan, ctx.shape = plan, hidden.shape
        losses, grad_hidden, grad_weight = _walk(rows, weight, labels, weights, plan, hidden.shape[0])
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses if weights is None else losses * weights).sum(), losses

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # In place, for [v_pad/tp, h] is too large to copy; autograd refuses a second backward after this.
        kept, grad_weight = (None if kept is None else kept.mul_(gradient) for kept in ctx.saved_tensors)
        if kept is not None and not ctx.plan.sequence_parallel:
            kept = _spread(kept, ctx.plan.counted, ctx.shape[0])
        return kept, grad_weight, None, None, None


def _walk(
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    plan: _Plan,
    local_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Go through rows [n, h], replicated, of the tokens that count.

    Returns:
        Their losses; the gradient of ``rows``, replicated, or under sequence parallelism that of this rank's
        ``local_rows`` hidden states; and the gradient of ``weight`` (in float32 at least if blocks add up).
    """
    size = _block_size(rows, plan.shard)
    losses = rows.new_empty(rows.shape[0], dtype=torch.promote_types(rows.dtype, torch.float32))
    sum_dtype = weight.dtype if size >= rows.shape[0] else losses.dtype
    grad_rows = torch.empty_like(rows) if plan.needs_hidden else None
    grad_hidden = grad_rows
    if plan.needs_hidden and plan.sequence_parallel:
        grad_hidden = rows.new_zeros(local_rows, rows.shape[1])
    grad_weight = torch.empty_like(weight, dtype=sum_dtype) if plan.needs_weight else None
    if grad_weight is not None and not rows.shape[0]:
        grad_weight.zero_()  # no block will write it
    buffer = rows.new_empty(size, plan.shard.rows)
    works: list[Handle] = []
    for first in range(0, rows.shape[0], size):
        part = slice(first, first + size)
        x = rows[part]
        logits = torch.mm(x, weight.t(), out=buffer[: x.shape[0]])
        losses[part] = _logits_to_gradient(logits, labels[part], plan)
        scale = None if weights is None else weights[part, None].to(x.dtype)
        if grad_rows is not None and grad_hidden is not None:
            own = torch.mm(logits, weight, out=grad_rows[part])
            if scale is not None:
                own.mul_(scale)
            # What is sent travels while the weight's gradient is computed.
            if not plan.sequence_parallel:
                works.append(start_all_reduce(own, plan.group))
            elif part.stop >= rows.shape[0]:
                partial = _spread(grad_rows, plan.counted, local_rows * plan.group.size())
                works.append(start_reduce_scatter(grad_hidden, partial, plan.group))
        if grad_weight is not None:
            _write_product(grad_weight, logits, x if scale is None else x * scale, add=first > 0)
    for work in works:
        work.wait()
    return losses, grad_hidden, grad_weight


def _spread(rows: Tensor, counted: Tensor | None, num_rows: int) -> Tensor:
    """Put ``rows`` at their places among ``num_rows``, zeros elsewhere."""
    if counted is None:
        return rows
    return rows.new_zeros(num_rows, rows.shape[1]).index_copy_(0, counted, rows)


def _block_size(rows: Tensor, shard: VocabShard) -> int:
    """Tokens in a block: as equal blocks as they go, each within the memory allowed."""
    # By the padded size, which is the same on every rank: all walk the same blocks.
    whole = rows.shape[0] * shard.rows * rows.element_size()
    blocks = max(-(-whole // BLOCK_BYTES), 1)
    return max(-(-rows.shape[0] // blocks), 1)


def _logits_to_gradient(logits: Tensor, labels: Tensor, plan: _Plan) -> Tensor:
    """Losses of a block [n]; ``logits`` [n, v_pad/tp] become their own gradient, where one is needed.

    Padding is kept in (a whole number of aligned columns is faster to multiply) with a probability of zero.
    """
    shard, smoothing = plan.shard, plan.smoothing
    ids, mine = shard.local(labels)
    wide = torch.promote_types(logits.dtype, torch.float32)
    maximum, log_sum = logits.new_full((2, logits.shape[0]), -torch.inf, dtype=wide)
    linear = logits.new_zeros(logits.shape[0], dtype=wide)
    target = linear
    logits[:, shard.valid :] = -torch.inf if shard.valid else 0.0
    if shard.valid:
        target = logits.gather(1, ids[:, None]).squeeze(1).to(wide)
        linear = target if mine is None else target * mine
        if smoothing:
            linear = (1 - smoothing) * linear
        step = max(elementwise_tile(logits.device) // shard.rows, 1)
        for first in range(0, logits.shape[0], step):
            part = slice(first, first + step)
            some = logits[part].to(wide)
            maximum[part] = some.amax(1)
            if smoothing:
                linear[part] += smoothing / shard.vocab_size * some[:, : shard.valid].sum(1)
            torch.softmax(some, 1, out=some)
            # The largest of these probabilities is 1 / sum(exp(logits - maximum)).
            log_sum[part] = maximum[part] - some.amax(1).log()
            if some.dtype != logits.dtype:
                logits[part] = some
    log_whole, linear = combine_log_sums(maximum, log_sum, linear, plan.group)
    if shard.valid and (plan.needs_hidden or plan.needs_weight):
        if plan.group.size() > 1:
            logits.mul_((log_sum - log_whole).exp()[:, None])  # probabilities among the whole vocabulary
        if smoothing:
            logits[:, : shard.valid] -= smoothing / shard.vocab_size
        # The label's entry from its logit, in full precision, as probability and 1 nearly cancel.
        at_label = (target - log_whole).exp() - (1 - smoothing + smoothing / shard.vocab_size)
        at_label = at_label.to(logits.dtype)
        if mine is not None:
            at_label = torch.where(mine, at_label, logits.gather(1, ids[:, None]).squeeze(1))
        # Not scatter_, which on a CPU copies all of a bfloat16 tensor to float32 and back.
        logits[torch.arange(ids.numel(), device=ids.device), ids] = at_label
    return log_whole - linear


def _write_product(total: Tensor, grad_logits: Tensor, rows: Tensor, *, add: bool) -> None:
    """Set ``total`` [v_pad/tp, h] to ``grad_logits.T @ rows``, or add to it, some columns at a time."""
    for first in range(0, total.shape[0], COLUMNS):
        part = slice(first, first + COLUMNS)
        columns = grad_logits[:, part].t()
        if total.dtype != rows.dtype:
            product = torch.mm(columns, rows)
            if add:
                total[part] += product
            else:
                total[part] = product
        elif add:
            total[part].addmm_(columns, rows)
        else:
            torch.mm(columns, rows, out=total[part])
