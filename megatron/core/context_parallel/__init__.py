"""Sequences shared by several ranks: who holds which tokens, and attention among them."""

from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.context_parallel.layout import local_positions, take_local

__all__ = ["context_parallel_attention", "local_positions", "take_local"]
