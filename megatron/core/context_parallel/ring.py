"""Keys and values passed round a ring (Liu et al. 2023, arXiv:2310.01889).

Every rank sends what it has just got to the next one while it computes with it, so the transfer of the next
keys is hidden where computing takes longer. Traffic: see docs/context_parallelism.md.
"""

import torch
from torch import Tensor

from megatron.core.communication import Handle, start_exchange
from megatron.core.context_parallel.block_attention import AttentionCall, PartialAttention, PartialGradients


def ring_forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Attend: c - 1 sends of [2, s/c, b, g/t, d].

    Args:
        call: what kind of attention.
        query: [s/cp, b, n/tp, d], sharded on dim 0 over cp.
        key: [s/cp, b, g/tp, d], sharded likewise.
        value: as ``key``.

    Returns:
        The output [s/cp, b, n/tp, d] and what the backward pass needs: query, key, value, output, lse.
    """
    group = call.group
    attention = PartialAttention(call, query, key)
    held = torch.stack((key, value)) if group.size() > 1 else None  # [2, s/cp, b, g/tp, d]
    pair: tuple[Tensor, Tensor] = (key, value)
    for step in range(group.size()):
        moving = _pass_on(call, held) if held is not None and step + 1 < group.size() else None
        attention.add((group.rank() - step) % group.size(), *pair)
        if moving is not None:
            held = _arrived(moving)
            pair = (held[0], held[1])
    output, lse = attention.results()
    return output, query, key, value, output, lse


def ring_backward(
    call: AttentionCall, saved: tuple[Tensor, ...], gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate: c - 1 sends of [2, s/c, b, g/t, d] keys and values, and c - 1 of their gradients.

    The gradients of a rank's keys start at the next rank, collect each rank's part while they travel one step
    behind the keys, and come home with the last send; the rank's own part waits for them there.

    Args:
        call: what kind of attention.
        saved: query, key, value, output, lse.
        gradient: [s/cp, b, n/tp, d] of the output.

    Returns:
        Gradients of query, key and value, in their layouts.
    """
    group = call.group
    _, key, value, _, _ = saved
    gradients = PartialGradients(call, saved, gradient)
    held = torch.stack((key, value)) if group.size() > 1 else None
    pair: tuple[Tensor, Tensor] = (key, value)
    own: Tensor | None = None
    returning: tuple[Tensor, Handle] | None = None
    for step in range(group.size()):
        moving = _pass_on(call, held) if held is not None and step + 1 < group.size() else None
        part = gradients.add((group.rank() - step) % group.size(), *pair)
        if own is None:
            own = part
        else:
            collected = part.to(key.dtype) if returning is None else _arrived(returning).add_(part)
            returning = _pass_on(call, collected)
        if moving is not None:
            held = _arrived(moving)
            pair = (held[0], held[1])
    assert own is not None, "a group has a rank at least"
    if returning is not None:
        own += _arrived(returning)
    of_key, of_value = own.to(key.dtype)
    return gradients.of_query(), of_key, of_value


def _pass_on(call: AttentionCall, x: Tensor) -> tuple[Tensor, Handle]:
    """Start sending to the next rank and receiving the like from the one before."""
    group = call.group
    buffer = torch.empty_like(x)
    following, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    return buffer, start_exchange(group, [(x, following)], [(buffer, before)])


def _arrived(transfer: tuple[Tensor, Handle]) -> Tensor:
    buffer, handle = transfer
    handle.wait()
    return buffer
