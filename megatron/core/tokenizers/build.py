"""From flags to a tokenizer."""

from collections.abc import Callable, Mapping
from typing import Final

from megatron.core.config.tokenizer import TOKENIZER_TYPES, TokenizerConfig
from megatron.core.tokenizers.bpe import gpt2_bpe_tokenizer, hugging_face_tokenizer
from megatron.core.tokenizers.byte_level import ByteLevelTokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import TikTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.wordpiece import wordpiece_tokenizer

_BUILDERS: Final[Mapping[str, Callable[[TokenizerConfig], Tokenizer]]] = {
    "GPT2BPETokenizer": gpt2_bpe_tokenizer,
    "BertWordPieceLowerCase": wordpiece_tokenizer,
    "BertWordPieceCase": wordpiece_tokenizer,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": hugging_face_tokenizer,
    "ByteLevelTokenizer": ByteLevelTokenizer,
}


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that the flags describe, from local files only.

    Args:
        config: its type and its files.
        vocab_size: the value of ``--vocab-size``: NullTokenizer's vocabulary; the size to which TikTokenizer
            cuts the vocabulary of a JSON file; for the others a bound that is checked.

    Raises:
        ValueError: if a flag is missing, a file is missing or not of its kind, or the vocabulary is larger
            than ``vocab_size``.
    """
    kind = config.tokenizer_type
    if kind is None:
        raise ValueError(f"--tokenizer-type is missing: give one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer: Tokenizer
    if kind == "NullTokenizer":
        tokenizer = NullTokenizer(vocab_size, config.vocab_extra_ids)
    elif kind == "TikTokenizer":
        tokenizer = TikTokenizer(config, vocab_size)
    else:
        tokenizer = _BUILDERS[kind](config)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the vocabulary of {tokenizer.name} ({tokenizer.source}) has "
            f"{tokenizer.vocab_size} ids; leave the flag out, or give at least that"
        )
    return tokenizer
