"""The parameters of one rank, on paper: what a stage of a GPT holds, in the order of its module tree."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config import ParallelConfig, TransformerConfig


@dataclass(frozen=True)
class LocalParameter:
    """What one rank holds of a parameter of the whole model."""

    name: str
    rows: int
    """Size of the first dim of the local tensor."""
    row_size: int = 1
    """Elements of one row; 1 for a vector."""
    split: bool = False
    """Whether tensor-parallel ranks hold different parts of it."""
    partial: bool = False
    """Whether each tensor-parallel rank holds all of it and sees a part of its gradient."""
    tied: bool = False
    """Whether another stage holds it too."""
    shared_from: int | None = None
    """First element of the rows at its end that other tensor-parallel ranks hold too (the keys and values of
    a query group, where there are fewer groups than ranks); None if there are none."""
    holders: int = 1
    """Different sets of such rows among the tensor-parallel ranks: the number of query groups."""

    @property
    def size(self) -> int:
        """Elements of the local tensor."""
        return self.rows * self.row_size

    @property
    def weight_decay(self) -> bool:
        """Whether weight decay applies: to matrices."""
        return self.row_size > 1


@dataclass(frozen=True)
class Part:
    """A run of the model's layers with what belongs before and after them."""

    layers: range
    first: bool
    """Whether it begins with the embeddings."""
    last: bool
    """Whether it ends with the output layer and the loss."""


def part_parameters(
    model: TransformerConfig, parallel: ParallelConfig, part: Part, *, tied_elsewhere: bool
) -> list[list[LocalParameter]]:
    """The parameters of a part of the model on one rank.

    Args:
        model: the shape; every value resolved.
        parallel: its layout.
        part: which layers, and what is around them.
        tied_elsewhere: whether the two ends of the model are on different ranks.

    Returns:
        Groups of parameters: the embeddings, each layer by itself, and what comes after the layers.
    """
    t, h = parallel.tensor_model_parallel_size, model.hidden_size
    sequence = parallel.sequence_parallel and t > 1
    vocabulary = model.padded_vocab_size(t) // t
    split_vocabulary = vocabulary != model.true_vocab_size  # padding counts, as it does for the buckets
    tied = not model.untie_embeddings_and_output_weights
    before: list[LocalParameter] = []
    if part.first:
        in_two_places = tied and tied_elsewhere
        before.append(LocalParameter("word", vocabulary, h, split=split_vocabulary, tied=in_two_places))
        if model.position_embedding_type == "learned_absolute":
            before.append(LocalParameter("position", model.num_positions, h, partial=sequence))
    after: list[LocalParameter] = []
    if part.last:
        after += _norm(model, "final", h, sequence)
        if not tied or tied_elsewhere:
            after.append(LocalParameter("output", vocabulary, h, split=split_vocabulary, tied=tied))
    return [before, *(list(_layer(model, t, sequence)) for _ in part.layers), after]


def _layer(model: TransformerConfig, t: int, sequence: bool) -> Iterator[LocalParameter]:
    h, d, f = model.hidden_size, model.head_dim, model.ffn_size // t
    split, bias = t > 1, model.add_bias_linear
    yield from _norm(model, "input", h, sequence)
    yield from _query_key_value(model, t)
    yield LocalParameter("proj", h, model.num_attention_heads * d // t, split=split)
    if bias:
        yield LocalParameter("proj.bias", h, partial=sequence)
    if model.qk_layernorm:
        for name in ("query", "key"):
            yield from _norm(model, name, d, partial=split)
    yield from _norm(model, "pre_mlp", h, sequence)
    wide = 2 * f if model.swiglu else f
    yield LocalParameter("fc1", wide, h, split=split)
    if bias:
        yield LocalParameter("fc1.bias", wide, split=split)
    yield LocalParameter("fc2", h, f, split=split)
    if bias:
        yield LocalParameter("fc2.bias", h, partial=sequence)


def _query_key_value(model: TransformerConfig, t: int) -> Iterator[LocalParameter]:
    h, d, heads, groups = model.hidden_size, model.head_dim, model.num_attention_heads, model.num_kv_groups
    queries = heads // t * d
    rows = queries + 2 * d * max(groups // t, 1)
    shared, holders = groups < t, min(groups, t)
    split = t > 1
    yield LocalParameter(
        "qkv", rows, h, split=split, shared_from=queries * h if shared else None, holders=holders
    )
    if model.add_bias_linear or model.add_qkv_bias:
        yield LocalParameter(
            "qkv.bias", rows, split=split, shared_from=queries if shared else None, holders=holders
        )


def _norm(model: TransformerConfig, name: str, size: int, partial: bool) -> list[LocalParameter]:
    weight = LocalParameter(f"{name}_norm", size, partial=partial)
    if model.normalization == "RMSNorm":
        return [weight]
    return [weight, LocalParameter(f"{name}_norm.bias", size, partial=partial)]
