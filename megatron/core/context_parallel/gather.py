"""Keys and values of all ranks gathered at once (as in Llama Team 2024, arXiv:2407.21783, section 3.3.2).

What is gathered is not kept for the backward pass, which gathers it again: else every layer would hold the
keys and values of whole sequences. Traffic: see docs/context_parallelism.md.
"""

import torch
from torch import Tensor

from megatron.core.communication import Handle, reduce_scatter, start_all_gather
from megatron.core.context_parallel.block_attention import AttentionCall, PartialAttention, PartialGradients


def gather_forward(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Attend: 1 all-gather of [2, s/c, b, g/t, d], while the rank looks at its own keys.

    Args:
        call: what kind of attention.
        query: [s/cp, b, n/tp, d], sharded on dim 0 over cp.
        key: [s/cp, b, g/tp, d], sharded likewise.
        value: as ``key``.

    Returns:
        The output [s/cp, b, n/tp, d] and what the backward pass needs: query, key, value, output, lse.
    """
    pair = torch.stack((key, value))
    gathered, handle = _start_gather(call, pair)
    attention = PartialAttention(call, query, key)
    attention.add(call.group.rank(), key, value)
    handle.wait()
    for source in _others(call):
        attention.add(source, *gathered[source])
    output, lse = attention.results()
    return output, query, key, value, output, lse


def gather_backward(
    call: AttentionCall, saved: tuple[Tensor, ...], gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate: 1 all-gather as in the forward pass, and 1 reduce-scatter to [2, s/c, b, g/t, d].

    Args:
        call: what kind of attention.
        saved: query, key, value, output, lse.
        gradient: [s/cp, b, n/tp, d] of the output.

    Returns:
        Gradients of query, key and value, in their layouts.
    """
    _, key, value, _, _ = saved
    pair = torch.stack((key, value))
    gathered, handle = _start_gather(call, pair)
    gradients = PartialGradients(call, saved, gradient)
    own = gradients.add(call.group.rank(), key, value)
    handle.wait()
    parts = torch.empty_like(gathered)  # [cp, 2, s/cp, b, g/tp, d], partial over cp
    parts[call.group.rank()] = own
    for source in _others(call):
        parts[source] = gradients.add(source, *gathered[source])
    of_key, of_value = reduce_scatter(parts, call.group)[0]
    return gradients.of_query(), of_key, of_value


def _start_gather(call: AttentionCall, pair: Tensor) -> tuple[Tensor, Handle]:
    """Start to gather [2, s/cp, b, g/tp, d] of every rank into [cp, 2, s/cp, b, g/tp, d]."""
    gathered = pair.new_empty((call.group.size(), *pair.shape))
    return gathered, start_all_gather(gathered, pair.unsqueeze(0), call.group)


def _others(call: AttentionCall) -> list[int]:
    return [source for source in range(call.group.size()) if source != call.group.rank()]
