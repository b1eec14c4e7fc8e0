"""Sequence shards exchanged for heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

An all-to-all gives every rank whole sequences of n/(tp cp) heads, attention runs as on one rank, and another
all-to-all gives the outputs back. Traffic: see docs/context_parallelism.md.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.communication import start_all_to_all
from megatron.core.context_parallel.block_attention import AttentionCall, PartialAttention, PartialGradients
from megatron.core.context_parallel.layout import dealt_order, natural_order


def ulysses_forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Attend: 2 all-to-alls, of queries, keys and values, and of outputs.

    Args:
        call: what kind of attention.
        query: [s/cp, b, n/tp, d], sharded on dim 0 over cp.
        key: [s/cp, b, g/tp, d], sharded likewise. Where cp does not divide g/tp, key and value heads are
            repeated until there are lcm(g/tp, cp).
        value: as ``key``.

    Returns:
        The output [s/cp, b, n/tp, d] and what the backward pass needs: query, key, value, output, lse of
        whole sequences and this rank's heads.

    Raises:
        ValueError: if the heads do not divide over the group.
    """
    group = call.group
    heads, key_heads = query.shape[2], key.shape[2]
    if heads % group.size():
        raise ValueError(
            f"--cp-comm-type a2a deals the {heads} heads of a rank (--num-attention-heads / "
            f"--tensor-model-parallel-size) over --context-parallel-size {group.size()}, which does not "
            f"divide {heads}; use p2p or all_gather, or a size that divides it"
        )
    repeats = math.lcm(key_heads, group.size()) // key_heads
    key, value = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (key, value))
    query, key, value = _to_heads((query, key, value), group)
    attention = PartialAttention(call.over_whole_sequences(), query, key)
    attention.add(0, key, value)
    output, lse = attention.results()
    (local,) = _to_sequence(output, (heads,), group)
    return local, query, key, value, output, lse


def ulysses_backward(
    call: AttentionCall, saved: tuple[Tensor, ...], gradient: Tensor, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate: 2 all-to-alls, of the gradient of outputs, and of queries, keys and values.

    Args:
        call: what kind of attention.
        saved: query, key, value, output, lse of whole sequences and this rank's heads.
        gradient: [s/cp, b, n/tp, d] of the output.
        key_heads: g/tp.

    Returns:
        Gradients of query, key and value, in the layouts of the forward's arguments.
    """
    group = call.group
    query, key, value, _, _ = saved
    (gradient,) = _to_heads((gradient,), group)
    gradients = PartialGradients(call.over_whole_sequences(), saved, gradient)
    of_pair = gradients.add(0, key, value).to(key.dtype)
    packed = torch.cat((gradients.of_query(), *of_pair), dim=2)
    heads = query.shape[2] * group.size(), key.shape[2] * group.size(), key.shape[2] * group.size()
    of_query, of_key, of_value = _to_sequence(packed, heads, group)
    return of_query, _sum_repeats(of_key, key_heads), _sum_repeats(of_value, key_heads)


def _to_heads(tensors: tuple[Tensor, ...], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange sequence shards for heads in one all-to-all: [s/cp, b, k, d] each -> [s, b, k/cp, d] each."""
    by_rank = [torch.unflatten(x, 2, (group.size(), -1)) for x in tensors]  # [s/cp, b, cp, k/cp, d]
    packed = torch.cat(by_rank, dim=3).movedim(2, 0).contiguous()  # [cp, s/cp, b, sum of k/cp, d]
    received = torch.empty_like(packed)
    start_all_to_all(received, packed, group).wait()
    return torch.split(natural_order(received), [x.shape[3] for x in by_rank], dim=2)


def _to_sequence(packed: Tensor, heads: tuple[int, ...], group: ProcessGroup) -> tuple[Tensor, ...]:
    """Undo :func:`_to_heads` in one all-to-all: [s, b, sum of k/cp, d] -> [s/cp, b, k, d] each."""
    dealt = dealt_order(packed, group.size())  # [cp, s/cp, b, sum of k/cp, d]
    received = torch.empty_like(dealt)
    start_all_to_all(received, dealt, group).wait()
    parts = torch.split(received.movedim(0, 2), [k // group.size() for k in heads], dim=3)
    return tuple(part.flatten(2, 3) for part in parts)


def _sum_repeats(x: Tensor, key_heads: int) -> Tensor:
    """Sum the gradients of repeated heads: [s/cp, b, r k, d] -> [s/cp, b, k, d]."""
    if x.shape[2] == key_heads:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.unflatten(x, 2, (key_heads, -1)).sum(dim=3, dtype=wide).to(x.dtype)
