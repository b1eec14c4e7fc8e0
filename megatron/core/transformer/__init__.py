"""Transformer layers built of tensor-parallel linear layers."""

from megatron.core.transformer.attention import AttentionContext, SelfAttention
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.dropout import dropout
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import LayerNorm, RMSNorm, build_norm, use_layer_norm
from megatron.core.transformer.rotary import RotaryAngles, RotaryEmbedding, apply_rotary

__all__ = [
    "MLP",
    "AttentionContext",
    "LayerNorm",
    "RMSNorm",
    "RotaryAngles",
    "RotaryEmbedding",
    "SelfAttention",
    "TransformerBlock",
    "TransformerLayer",
    "apply_rotary",
    "build_norm",
    "dropout",
    "use_layer_norm",
]
