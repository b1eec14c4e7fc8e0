"""Core attention: softmax(Q K^T / sqrt(d)) V of the heads of one rank, fused or in plain steps.

Vaswani et al. 2017, eq. 1. Both functions give the same numbers up to rounding; what differs is what they
keep for the backward pass. The plain one keeps what Korthikanti et al. 2022 (section 4.1) count: 5 a s^2 b
bytes of probabilities in 16 bits with dropout. The fused one keeps its output and one number a row of scores.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron.core.config import TransformerConfig
from megatron.core.device import fuses_dropout
from megatron.core.transformer.dropout import drop


class CoreAttention(Protocol):
    """Attention within each sequence, every token's heads apart from each other."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool,
        dropout_probability: float,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, n/tp, d], sharded on dim 2 over tp.
            key: [s, b, g/tp (at least 1), d], sharded likewise; head i serves queries i q to i q + q - 1,
                q being the queries of a group.
            value: as ``key``.
            causal: whether a token sees only itself and earlier tokens.
            dropout_probability: share of the probabilities to zero; drawn from the default generator.

        Returns:
            [s, b, n/tp * d], sharded on dim 2 over tp.
        """


def choose_core_attention(config: TransformerConfig, device: torch.device) -> CoreAttention:
    """The function that ``--attention-backend`` names.

    Where PyTorch's fused kernels know no dropout (on a CPU), it would fall back on plain steps that keep
    probabilities and masks in float32, so that a model with dropout takes our own plain steps instead.
    """
    if config.attention_backend in ("unfused", "local"):
        return unfused_attention
    return fused_attention if fuses_dropout(device) else fused_attention_without_dropout


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    dropout_probability: float,
) -> torch.Tensor:
    """See :class:`CoreAttention`. Keeps the three inputs, the output and a logarithm per row of scores."""
    # [s, b, n, d] is handed over as a strided [b, n, s, d]: the kernels take any strides and give the
    # output the strides of the query, so neither direction copies.
    attended = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        dropout_p=dropout_probability,
        is_causal=causal,
        enable_gqa=query.size(2) > key.size(2),
    )  # [b, n/tp, s, d]
    return attended.permute(2, 0, 1, 3).flatten(2)  # [s, b, n/tp * d]


def fused_attention_without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    dropout_probability: float,
) -> torch.Tensor:
    """See :class:`CoreAttention`: fused where nothing is dropped, in plain steps elsewhere."""
    attend = unfused_attention if dropout_probability else fused_attention
    return attend(query, key, value, causal=causal, dropout_probability=dropout_probability)


def unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    dropout_probability: float,
) -> torch.Tensor:
    """See :class:`CoreAttention`. Scores, softmax, dropout and a product, one after the other.

    Keeps the three inputs, the probabilities and, with dropout, a mask of one byte each and what it leaves.
    The softmax is computed in at least float32 and kept in the format of the activations.
    """
    s, b, n, d = query.shape
    g = key.size(2)
    rows = n // g * s  # the query heads of a group attend as one head of q * s rows: keys aren't repeated
    query = query.permute(1, 2, 0, 3).reshape(b * g, rows, d)  # q = 1: a view
    key = key.permute(1, 2, 3, 0).reshape(b * g, d, s)
    value = value.permute(1, 2, 0, 3).reshape(b * g, s, d)
    # The causal mask goes in as the term that baddbmm adds, of which autograd keeps nothing.
    future = query.new_full((s, s) if causal else (1, 1), -math.inf if causal else 0.0).triu_(1)
    scores = torch.baddbmm(future.repeat(n // g, 1) if causal else future, query, key, alpha=d**-0.5)
    probabilities = torch.softmax(scores, dim=-1)  # [b * g/tp, q * s, s]
    if dropout_probability:
        probabilities = drop(probabilities, dropout_probability)
    attended = torch.bmm(probabilities, value).view(b, n, s, d)
    return attended.permute(2, 0, 1, 3).reshape(s, b, n * d)
