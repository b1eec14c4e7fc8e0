"""Attention over sequences that the ranks of a context-parallel group share."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.context_parallel.block_attention import AttentionCall
from megatron.core.context_parallel.dropout import ProbabilityDropout
from megatron.core.context_parallel.gather import gather_backward, gather_forward
from megatron.core.context_parallel.layout import chunk_size
from megatron.core.context_parallel.ring import ring_backward, ring_forward
from megatron.core.context_parallel.ulysses import ulysses_backward, ulysses_forward
from megatron.core.context_parallel.visibility import Visibility

CommType = Literal["p2p", "all_gather", "a2a"]


def context_parallel_attention(  # noqa: PLR0913 - three tensors, their layout, and the kind of attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: ProcessGroup,
    comm_type: CommType,
    causal: bool,
    segment_ids: Tensor | None,
    dropout_probability: float,
    dropout_key: int | None,
) -> Tensor:
    """Attend within each sequence: softmax(Q K^T / sqrt(d)) V (Vaswani et al. 2017, eq. 1).

    Neither scores nor a mask of s x s elements ever exist. Only query, key, value, output and one number per
    query and head are kept for the backward pass, which computes the probabilities again (Dao et al. 2022).

    Args:
        query: [s/cp, b, n/tp, d], sharded on dim 0 over cp in the order of
            :func:`~megatron.core.context_parallel.local_positions`.
        key: [s/cp, b, g/tp, d], sharded likewise; g/tp divides n/tp.
        value: as ``key``.
        group: the context-parallel group; one rank is as good as several.
        comm_type: how ranks see each other's keys and values.
        causal: whether a token sees only itself and earlier tokens.
        segment_ids: [b, s] integers of the whole sequence, replicated; a token sees only tokens with its own
            number. None: all of the sequence is one segment. On the CPU, also where the rest is on a GPU: it
            decides what is computed, and the host would wait for it.
        dropout_probability: of each attention probability, in [0, 1).
        dropout_key: names the dropout masks: the same key gives the same masks, and each rank has its own.
            None only without dropout.

    Returns:
        [s/cp, b, n/tp, d], sharded on dim 0 over cp like ``query``.

    Raises:
        ValueError: if the sequence does not divide into 2 cp equal chunks, or with ``a2a`` the heads over cp.
    """
    length, batch_size = query.shape[:2]
    chunk_size(length * group.size(), group.size())
    assert segment_ids is None or segment_ids.shape == (batch_size, length * group.size())
    dropout = None
    if dropout_probability:
        assert dropout_key is not None, "dropout needs a key"
        dropout = ProbabilityDropout(dropout_probability, dropout_key)
    segments: npt.NDArray[np.int64] | None = None
    if segment_ids is not None:
        segments = segment_ids.cpu().numpy()
    call = AttentionCall(group, Visibility(causal, group.size(), segments), dropout)
    # On one rank nothing travels: a ring of one is the attention itself.
    chosen = comm_type if group.size() > 1 else "p2p"
    attend: Callable[..., Tensor] = _ContextParallelAttention.apply
    return attend(query, key, value, call, chosen)


class _ContextParallelAttention(torch.autograd.Function):
    """forward: output of this rank's queries. backward: gradients of this rank's queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, comm_type: CommType
    ) -> Tensor:
        forward = {"p2p": ring_forward, "all_gather": gather_forward, "a2a": ulysses_forward}[comm_type]
        output, *saved = forward(call, query, key, value)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.comm_type, ctx.key_heads = call, comm_type, key.shape[2]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call: AttentionCall = ctx.call
        if ctx.comm_type == "a2a":
            gradients = ulysses_backward(call, ctx.saved_tensors, gradient, ctx.key_heads)
        else:
            backward = {"p2p": ring_backward, "all_gather": gather_backward}[ctx.comm_type]
            gradients = backward(call, ctx.saved_tensors, gradient)
        return *gradients, None, None
