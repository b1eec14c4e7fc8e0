"""The shape and numerics of a Transformer."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.field import flag

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm")
"""What selective recomputation can leave out of the activations that are kept."""


@dataclass(frozen=True)
class TransformerConfig:
    """Model architecture, dropout and recomputation.

    ``resolve`` in ``megatron/training/arguments.py`` replaces every None by the value it stands for; the
    properties below give those values typed, resolved or not.
    """

    num_layers: int = flag()
    """Transformer layers of the whole model."""
    hidden_size: int = flag()
    """Width of the residual stream (h)."""
    num_attention_heads: int = flag()
    """Attention heads of a layer (n)."""
    seq_length: int = flag()
    """Tokens of a training sequence (s)."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP (f); default 4h, or 8h/3 rounded down to a multiple of 64 with --swiglu."""
    kv_channels: int | None = None
    """Width of one attention head (d); default hidden size / heads."""
    group_query_attention: bool = False
    """Let several query heads share one key-value head."""
    num_query_groups: int = 1
    """Key-value heads (g) when --group-query-attention is given."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table, at least --seq-length; default --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: int = 10000
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = 1.0
    """Share of a head's width that is rotated."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm before attention, before the MLP and after the last layer."""
    norm_epsilon: float = flag(1e-5, aliases=("--layernorm-epsilon",))
    """Epsilon under the root of a norm."""
    swiglu: bool = False
    """Gated MLP with SiLU in place of GELU."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """No bias in linear layers."""
    add_qkv_bias: bool = False
    """A bias on the query-key-value projection even with --disable-bias-linear."""
    qk_layernorm: bool = False
    """Normalise every query and key head."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a matrix of its own instead of the word embeddings'."""
    vocab_size: int | None = None
    """True vocabulary size (v); only NullTokenizer needs it, others are checked against it."""
    make_vocab_size_divisible_by: int = 128
    """The embedding table is padded to a multiple of this times the tensor-parallel size."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 x layers)."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    hidden_dropout: float = 0.1
    """Dropout on embeddings and on what attention and MLP add to the residual stream."""
    label_smoothing: float = 0.0
    """Share of the target probability that is spread evenly over the vocabulary."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Core attention: PyTorch's fastest fused kernel (auto, flash, fused), or plain matrix products and a
    softmax (unfused, local)."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: keep only layer inputs (full), or only leave out what
    --recompute-modules names (selective)."""
    recompute_modules: tuple[str, ...] | None = None
    """What selective recomputation leaves out: core_attn (default), mlp, layernorm."""
    distribute_saved_activations: bool = False
    """With full recomputation: divide the saved layer inputs over the tensor-parallel ranks."""
    recompute_method: Literal["uniform", "block"] | None = None
    """uniform: units of --recompute-num-layers layers; block: only the first --recompute-num-layers layers of
    a stage."""
    recompute_num_layers: int | None = None
    """Layers of one recomputed unit (uniform), or recomputed layers of a stage (block)."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "seq_length",
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "rotary_base",
            "recompute_num_layers",
        ):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "must be at least 1")
        for name in ("attention_dropout", "hidden_dropout", "label_smoothing"):
            self._require(name, 0 <= getattr(self, name) < 1, "must lie in [0, 1)")
        self._require("rotary_percent", 0 < self.rotary_percent <= 1, "must lie in (0, 1]")
        self._require("init_method_std", self.init_method_std >= 0, "must be 0 or above")
        self._require("norm_epsilon", self.norm_epsilon >= 0, "must be 0 or above")
        self._check_heads()
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise ValueError(
                f"--seq-length {self.seq_length} is longer than --max-position-embeddings "
                f"{self.max_position_embeddings}; raise the latter to at least {self.seq_length}"
            )
        if self.recompute_granularity is None and (self.recompute_method or self.recompute_num_layers):
            raise ValueError(
                "--recompute-method and --recompute-num-layers have no effect without "
                "--recompute-granularity full; add it, or leave them out"
            )
        self._check_recompute()

    def _check_heads(self) -> None:
        if self.num_query_groups not in (1, self.num_attention_heads) and not self.group_query_attention:
            raise ValueError(
                f"--num-query-groups {self.num_query_groups} has no effect without --group-query-attention; "
                "add it"
            )
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} does not divide by --num-attention-heads "
                f"{self.num_attention_heads}; change one, or give the width of a head by --kv-channels"
            )
        if self.num_attention_heads % self.num_kv_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} does not divide by --num-query-groups "
                f"{self.num_query_groups}"
            )

    def _check_recompute(self) -> None:
        unknown = sorted(set(self.recompute_modules or ()) - set(RECOMPUTE_MODULES))
        if unknown:
            raise ValueError(
                f"--recompute-modules {' '.join(unknown)}: unknown; valid are {', '.join(RECOMPUTE_MODULES)}"
            )
        if self.recompute_modules and self.recompute_granularity != "selective":
            raise ValueError(
                "--recompute-modules has no effect without --recompute-granularity selective; add it, or "
                "leave it out"
            )
        if self.distribute_saved_activations and self.recompute_granularity != "full":
            raise ValueError(
                "--distribute-saved-activations has no effect without --recompute-granularity full; add it, "
                "or leave it out"
            )

    def _require(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: {rule}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head (d)."""
        return (
            self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads
        )

    @property
    def num_kv_groups(self) -> int:
        """Key-value heads of a layer (g)."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP (f)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(self.hidden_size * 4 * 2 / 3) // 64 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def num_positions(self) -> int:
        """Rows of the learned position table."""
        return self.max_position_embeddings if self.max_position_embeddings is not None else self.seq_length

    @property
    def true_vocab_size(self) -> int:
        """Vocabulary without padding (v)."""
        if self.vocab_size is None:
            raise ValueError("the vocabulary size is not known yet: give --vocab-size or a tokenizer")
        return self.vocab_size

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Rows of the embedding table: the vocabulary padded to a multiple of the divisor times TP."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.true_vocab_size // multiple) * multiple
