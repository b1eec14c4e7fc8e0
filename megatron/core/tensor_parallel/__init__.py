"""Layers, loss and random streams of tensor parallelism."""

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.init import initialize_parameters
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    defer_weight_gradients,
    vocab_facts,
)
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from megatron.core.tensor_parallel.random import RandomStream
from megatron.core.tensor_parallel.vocab_shard import VocabShard

__all__ = [
    "ColumnParallelLinear",
    "RandomStream",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabShard",
    "copy_to_tensor_parallel_region",
    "defer_weight_gradients",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "initialize_parameters",
    "linear_cross_entropy",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "vocab_facts",
    "vocab_parallel_cross_entropy",
]
