"""Self-attention, its heads split over the tensor-parallel group."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.context_parallel import context_parallel_attention
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Piece, Placement
from megatron.core.tensor_parallel import ColumnParallelLinear, RandomStream, RowParallelLinear
from megatron.core.transformer.core_attention import choose_core_attention
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import recompute, recomputed_modules
from megatron.core.transformer.rotary import RotaryAngles, apply_rotary, split_heads


@dataclass(frozen=True)
class AttentionContext:
    """What the attention of all layers shares in one forward pass."""

    rotary: RotaryAngles | None = None
    """Angles for queries and keys; None without rotary positions."""
    segment_ids: torch.Tensor | None = None
    """[b, s] integers of the whole sequence, replicated over tp and cp: tokens see only tokens of an equal
    number. None: the sequence is one segment."""


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

    One all-reduce of [s, b, h] in the forward (``linear_proj``) and one in the backward (``linear_qkv``), or
    under sequence parallelism an all-gather and a reduce-scatter in each, and an all-gather for the weight
    gradient of ``linear_qkv``. Under context parallelism keys and values travel too.
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
        self.cp = parallel.cp
        self.cp_comm_type = parallel.cp_comm_type
        self.causal = causal
        self.dropout_probability = config.attention_dropout
        self.core_attention = choose_core_attention(config, placement.device)
        self.recomputes_core = "core_attn" in recomputed_modules(config)
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
            hidden_states: [s/cp, b, h], replicated over tp; [s/(cp tp), b, h] under sequence parallelism.
            context: angles and segments, shared by all layers.
            stream: of this layer; dropout of probabilities folds in the tensor-parallel rank, as each rank
                has other heads.

        Returns:
            As ``hidden_states``.
        """
        query, key, value = self._heads(hidden_states, context.rotary)
        stream = stream.fold("attention", "probabilities", self.tp_rank)
        if self.cp.size() > 1 or context.segment_ids is not None:
            attended = self._attend_by_blocks(query, key, value, context.segment_ids, stream)
        elif self.recomputes_core:
            attended = recompute(self._attend, query, key, value, stream)
        else:
            attended = self._attend(query, key, value, stream)
        output: torch.Tensor = self.linear_proj(attended)
        return output

    def _heads(
        self, hidden_states: torch.Tensor, rotary: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [s/cp, b, n/tp, d], keys and values [s/cp, b, g/tp (at least 1), d], sharded on dim 2.

        Normalised and turned. Where queries would be copied anyway, keys and values are cut off too, so that
        the fused tensor need not be kept beside the copy.
        """
        groups, queries = self.share.groups, self.share.queries_per_group
        fused = self.linear_qkv(hidden_states)  # [s/cp, b, (n + 2 g)/tp * d]
        fused = fused.view(*fused.shape[:2], groups, queries + 2, self.head_dim)
        if self.q_layernorm is None or self.k_layernorm is None:
            if rotary is None and queries == 1:
                query, key, value = fused.unbind(3)
                return query, key, value
            return split_heads(fused, rotary)
        query, key, value = fused.unbind(3) if queries == 1 else split_heads(fused, None)
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        return query, key, value

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: RandomStream
    ) -> torch.Tensor:
        """Core attention: heads in, [s, b, n/tp * d] out."""
        probability = self._dropout_now()
        if probability:
            stream.seed_default(query.device)
        return self.core_attention(query, key, value, causal=self.causal, dropout_probability=probability)

    def _attend_by_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segment_ids: torch.Tensor | None,
        stream: RandomStream,
    ) -> torch.Tensor:
        """Core attention of a sequence in segments or on several ranks: heads in, [s/cp, b, n/tp * d] out.

        It keeps no scores and recomputes them in any case.
        """
        probability = self._dropout_now()
        return context_parallel_attention(
            query,
            key,
            value,
            group=self.cp,
            comm_type=self.cp_comm_type,
            causal=self.causal,
            segment_ids=segment_ids,
            dropout_probability=probability,
            dropout_key=stream.key if probability else None,
        ).flatten(2)

    def _dropout_now(self) -> float:
        return self.dropout_probability if self.training else 0.0
