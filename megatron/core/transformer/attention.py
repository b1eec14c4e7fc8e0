"""Self-attention, its heads split over the tensor-parallel group."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Piece, Placement
from megatron.core.tensor_parallel import ColumnParallelLinear, RandomStream, RowParallelLinear
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of all layers shares in one forward pass."""

    rotary: RotaryAngles | None = None
    """Angles for queries and keys; None without rotary positions."""
    segment_ids: torch.Tensor | None = None
    """[b, s] integers of the whole sequence, replicated over tp and cp: tokens see only tokens of an equal
    number. None: the sequence is one segment."""


def segment_mask(segment_ids: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Let tokens see only tokens of their own segment.

    Args:
        segment_ids: [b, s] integers, replicated; equal numbers are one segment.
        causal: and of those only themselves and earlier ones.

    Returns:
        [b, 1, s, s] boolean, True where attention is allowed. No row is all False.
    """
    allowed = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [b, s, s]
    return (allowed.tril() if causal else allowed).unsqueeze(1)


@dataclass(frozen=True)
class HeadShare:
    """The heads of one tensor-parallel rank.

    With at least as many query groups as ranks a rank has whole groups. With fewer, each group's key and
    value heads are on several ranks, which divide its query heads among them.
    """

    groups: int
    """Key-value heads on this rank."""
    queries_per_group: int
    """Query heads of each of them on this rank."""
    pieces: tuple[Piece, ...]
    """Where this rank's rows of the fused query-key-value weight lie in the whole weight."""

    @staticmethod
    def of(config: TransformerConfig, tp_rank: int, tp_size: int) -> "HeadShare":
        """The share of rank ``tp_rank`` of ``tp_size``.

        The whole weight has for each group its query heads, its key head, its value head, d rows each.

        Raises:
            ValueError: if heads or groups do not divide evenly.
        """
        heads, groups, d = config.num_attention_heads, config.num_kv_groups, config.head_dim
        if heads % tp_size:
            raise ValueError(
                f"--num-attention-heads {heads} does not divide by --tensor-model-parallel-size {tp_size}; "
                f"valid sizes divide {heads}"
            )
        if groups % tp_size and tp_size % groups:
            raise ValueError(
                f"--num-query-groups {groups} and --tensor-model-parallel-size {tp_size}: one must divide "
                "the other, so that ranks hold whole groups or share one"
            )
        group_rows = (heads // groups + 2) * d
        if groups >= tp_size:
            local = groups // tp_size
            piece = Piece(local=0, start=tp_rank * local * group_rows, length=local * group_rows)
            return HeadShare(local, heads // groups, (piece,))
        sharers = tp_size // groups
        group, position = divmod(tp_rank, sharers)
        queries = heads // tp_size
        start = group * group_rows
        query_piece = Piece(local=0, start=start + position * queries * d, length=queries * d)
        key_value_piece = Piece(
            local=queries * d, start=start + heads // groups * d, length=2 * d, primary=position == 0
        )
        return HeadShare(1, queries, (query_piece, key_value_piece))


class SelfAttention(nn.Module):
    """Multi-head attention with grouped queries (Shoeybi et al. 2019, section 3; Ainslie et al. 2023).

    One all-reduce of [s, b, h] in the forward (``linear_proj``) and one in the backward (``linear_qkv``).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        parallel: ModelParallel,
        placement: Placement,
        causal: bool,
    ) -> None:
        """Make the projections and, with ``qk_layernorm``, a norm over each query and key head.

        Args:
            config: shape of the model.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            causal: whether a token sees only itself and earlier tokens.

        Raises:
            ValueError: if heads or query groups do not divide over the group.
        """
        super().__init__()
        self.head_dim = config.head_dim
        self.share = HeadShare.of(config, parallel.tp.rank(), parallel.tp.size())
        self.tp_rank = parallel.tp.rank()
        self.causal = causal
        self.dropout_probability = config.attention_dropout
        heads, groups, d = config.num_attention_heads, config.num_kv_groups, config.head_dim
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * groups) * d,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std,
            bias=config.add_bias_linear or config.add_qkv_bias,
            pieces=self.share.pieces,
        )
        self.linear_proj = RowParallelLinear(
            heads * d,
            config.hidden_size,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            self.q_layernorm = build_norm(
                config, d, parallel=parallel, placement=placement, over_local_heads=True
            )
            self.k_layernorm = build_norm(
                config, d, parallel=parallel, placement=placement, over_local_heads=True
            )

    def forward(
        self, hidden_states: torch.Tensor, context: AttentionContext, stream: RandomStream
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            hidden_states: [s, b, h], replicated.
            context: angles and segments, shared by all layers.
            stream: of this layer; dropout of probabilities folds in the tensor-parallel rank, as each rank
                has other heads.

        Returns:
            [s, b, h], replicated.
        """
        query, key, value = self._heads(hidden_states)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if context.rotary is not None:
            query, key = apply_rotary(query, context.rotary), apply_rotary(key, context.rotary)
        output: torch.Tensor = self.linear_proj(self._attend(query, key, value, context.segment_ids, stream))
        return output

    def _heads(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [s, b, n/tp, d], keys and values [s, b, g/tp (at least 1), d], sharded on dim 2."""
        s, b, _ = hidden_states.shape
        groups, queries = self.share.groups, self.share.queries_per_group
        fused = self.linear_qkv(hidden_states).view(s, b, groups, queries + 2, self.head_dim)
        query, key, value = fused.split((queries, 1, 1), dim=3)
        return query.reshape(s, b, groups * queries, self.head_dim), key.squeeze(3), value.squeeze(3)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segment_ids: torch.Tensor | None,
        stream: RandomStream,
    ) -> torch.Tensor:
        """softmax(Q K^T / sqrt(d)) V (Vaswani et al. 2017, eq. 1), heads in and [s, b, n/tp * d] out."""
        mask = None if segment_ids is None else segment_mask(segment_ids, causal=self.causal)
        probability = self.dropout_probability if self.training else 0.0
        if probability:
            stream.fold("attention", "probabilities", self.tp_rank).seed_default(query.device)
        # [s, b, n, d] is handed over as a strided [b, n, s, d]: the kernels take any strides and give the
        # output the strides of the query, so neither direction copies.
        attended = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            dropout_p=probability,
            is_causal=self.causal and mask is None,
            enable_gqa=self.share.queries_per_group > 1,
        )  # [b, n/tp, s, d]
        return attended.permute(2, 0, 1, 3).flatten(2)  # [s, b, n/tp * d]
