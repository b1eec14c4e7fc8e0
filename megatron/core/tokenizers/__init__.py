"""Tokenizers from local files, and the way from a text corpus to token ids."""

from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
