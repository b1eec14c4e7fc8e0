"""Floating-point operations of a training step."""

from megatron.core.config import TransformerConfig


def training_flops(config: TransformerConfig, batch_size: int, padded_vocab_size: int) -> float:
    """Model FLOPs of one iteration over ``batch_size`` sequences, forward and backward.

    Counts every matrix product once forward and twice backward, two operations a multiply-add, attention
    scores halved for causality; norms, softmax, lookups and recomputation are not counted. This is how
    Megatron-LM counts since its release 0.12, so figures compare.

    Args:
        config: the architecture.
        batch_size: sequences in the global batch.
        padded_vocab_size: rows of the output layer, padding included.
    """
    h, layers, s = config.hidden_size, config.num_layers, config.seq_length
    query = config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_kv_groups * config.head_dim
    tokens = batch_size * s
    mlp = h * config.ffn_size * (3 if config.swiglu else 2)
    attention = h * (query + key_value) + query * h
    dense = 6.0 * tokens * (layers * (mlp + attention) + h * padded_vocab_size)
    scores = 6.0 * query * layers * batch_size * s * s
    return dense + scores
