"""Attention over sequences that the ranks of a context-parallel group share."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from megatron.core.device import seed_default_generator


def context_parallel_attention(  # noqa: PLR0913 - three tensors, their layout, and the kind of attention
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: ProcessGroup,
    comm_type: Literal["p2p", "all_gather", "a2a"],
    causal: bool,
    segment_ids: torch.Tensor | None,
    dropout_probability: float,
    dropout_key: int | None,
) -> torch.Tensor:
    """Attend within each sequence: softmax(Q K^T / sqrt(d)) V (Vaswani et al. 2017, eq. 1).

    Args:
        query: [s/cp, b, n/tp, d], sharded on dim 0 over cp in the order of
            :func:`~megatron.core.context_parallel.local_positions`.
        key: [s/cp, b, g/tp, d], sharded likewise.
        value: as ``key``.
        group: the context-parallel group.
        comm_type: how ranks see each other's keys and values.
        causal: whether a token sees only itself and earlier tokens.
        segment_ids: [b, s] integers of the whole sequence, replicated; a token sees only tokens with its own
            number. None: all of the sequence is one segment.
        dropout_probability: of each attention probability.
        dropout_key: names the dropout masks; the same key gives the same masks. None only without dropout.

    Returns:
        [s/cp, b, n/tp, d], sharded on dim 0 over cp like ``query``.
    """
    assert group.size() == 1, "more ranks are on their way"
    mask = None
    if segment_ids is not None:
        mask = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)
        mask = (mask.tril() if causal else mask).unsqueeze(1)
    if dropout_probability:
        assert dropout_key is not None
        seed_default_generator(query.device, dropout_key)
    attended = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        dropout_p=dropout_probability,
        is_causal=causal and mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.permute(2, 0, 1, 3)
