"""Bytes that training needs on one device: activations of a layer, model state of a parameter.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198, table 2). For the layer that the table is for
(16-bit formats, dropout, GELU with f = 4h, one key-value head a query head, attention in plain steps) a layer
keeps, in units of s b h bytes, with t tensor-parallel ranks:

======================================================  =============================
nothing recomputed                                      34 + 5 a s/h
tensor parallel                                         10 + 24/t + 5 a s/(h t)
and sequence parallel                                   (34 + 5 a s/h) / t
core attention recomputed, tensor parallel              10 + 24/t
and sequence parallel                                   34/t
everything recomputed                                   2 (2/t with sequence parallelism, or with the saved
                                                        inputs divided over the ranks)
core attention in a fused kernel, tensor parallel       10 + 24/t + 4 a/(h t)
and sequence parallel                                   (34 + 4 a/h) / t
======================================================  =============================

A fused kernel keeps neither probabilities nor masks, only its output, which the projection keeps anyway, and
for every row of scores the logarithm of its sum of exponentials in float32 (Dao et al. 2022, algorithm 1).
The statistics of norms (16 bytes a token) are left out, as in the paper.
"""

from typing import Literal

from megatron.core.config import ParallelConfig, TransformerConfig

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


def activation_bytes_per_layer(
    config: TransformerConfig,
    parallel: ParallelConfig,
    micro_batch_size: int,
    *,
    position: int = 0,
    element_bytes: int = 2,
) -> float:
    """What one layer keeps between forward and backward of one micro-batch, on one rank.

    Summed up from what each operation keeps (Korthikanti et al. 2022, section 4.1), so that it holds for
    other shapes than the paper's too. While a recomputed unit runs again, what its layers keep comes on top
    once.

    Args:
        config: shape, attention backend and recomputation of the model.
        parallel: tensor, sequence and context parallelism.
        micro_batch_size: b.
        position: number of the layer in its stage, from 0; with ``--recompute-method block`` only the first
            ``--recompute-num-layers`` are recomputed.
        element_bytes: width of the activations' format; 2 for the formula of the paper.

    Returns:
        Bytes; with recomputed units of several layers, a layer's share.
    """
    tokens = config.seq_length * micro_batch_size / parallel.context_parallel_size
    t = parallel.tensor_model_parallel_size
    shared = t if parallel.sequence_parallel else 1  # ranks that divide what is replicated without it
    if config.recompute_granularity == "full":
        count = 1 if config.recompute_num_layers is None else config.recompute_num_layers
        if config.recompute_method == "uniform" or position < count:
            holders = t if config.distribute_saved_activations else shared
            layers = count if config.recompute_method == "uniform" else 1
            return tokens * element_bytes * config.hidden_size / holders / layers
    recomputed: tuple[str, ...] = ()
    if config.recompute_granularity == "selective":
        recomputed = config.recompute_modules or ("core_attn",)
    replicated = _replicated_bytes_per_token(config, element_bytes, norms_again="layernorm" in recomputed)
    split = _projection_bytes_per_token(config, element_bytes, t)
    if "core_attn" not in recomputed:
        split += _core_attention_bytes_per_token(config, parallel, element_bytes)
    if "mlp" not in recomputed:
        split += element_bytes * (3 if config.swiglu else 2) * config.ffn_size  # input of activation and fc2
    return tokens * (replicated / shared + split / t)


def _replicated_bytes_per_token(config: TransformerConfig, element_bytes: int, *, norms_again: bool) -> float:
    """Inputs of both norms and of both linear layers after them, and a byte a mask of hidden dropout."""
    kept = 2 if norms_again else 4
    masks = 2 if config.hidden_dropout else 0
    return config.hidden_size * (kept * element_bytes + masks)


def _projection_bytes_per_token(config: TransformerConfig, element_bytes: int, tensor_ranks: int) -> float:
    """Queries, keys, values and what attention hands to its output projection, of all ranks together."""
    heads, key_values = config.num_attention_heads, max(config.num_kv_groups, tensor_ranks)
    kept = 2 * heads + 2 * key_values
    if config.qk_layernorm:  # the norms keep queries and keys, core attention what comes out
        kept += heads + key_values
    return element_bytes * config.head_dim * kept


def _core_attention_bytes_per_token(
    config: TransformerConfig, parallel: ParallelConfig, element_bytes: int
) -> float:
    """What lies between queries, keys and values and the output, of all heads."""
    heads = config.num_attention_heads
    plain = config.attention_backend in ("unfused", "local")
    if not plain or parallel.context_parallel_size > 1:
        return 4 * heads
    row = element_bytes * config.seq_length  # probabilities
    if config.attention_dropout:
        row += (1 + element_bytes) * config.seq_length  # mask and dropped probabilities
    return heads * row


def model_state_bytes_per_parameter(strategy: ShardingStrategy, data_parallel_size: int) -> float:
    """Weights, gradients and optimizer state of mixed-precision Adam, for each parameter of a rank.

    A 16-bit weight (2), a float32 gradient (4), a float32 weight (4) and two float32 moments (8) make 18.
    Rajbhandari et al. 2020 (arXiv:1910.02054, section 5) divide the last two, then the gradients, then the
    weights over the d data-parallel ranks (with context parallelism, those of a sequence are among them).

    Args:
        strategy: what is divided: nothing, optimizer state (6 + 12/d), also gradients (2 + 16/d), also
            weights (16/d: no 16-bit copy is kept).
        data_parallel_size: d.

    Returns:
        Bytes, without what is gathered for a while.
    """
    weight, gradient, state = 2.0, 4.0, 12.0
    if strategy != "no_shard":
        state /= data_parallel_size
    if strategy in ("optim_grads", "optim_grads_params"):
        gradient /= data_parallel_size
    if strategy == "optim_grads_params":
        weight = 0.0  # gathered while it is used, rounded from the main weights
    return weight + gradient + state
