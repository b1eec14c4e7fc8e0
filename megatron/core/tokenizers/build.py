"""From flags to a tokenizer."""

from megatron.core.config.tokenizer import TOKENIZER_TYPES, TokenizerConfig
from megatron.core.tokenizers.bpe import gpt2_bpe_tokenizer, hugging_face_tokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that the flags describe, from local files only.

    Args:
        config: its type and its files.
        vocab_size: the value of ``--vocab-size``: NullTokenizer's vocabulary; for the others a bound that is
            checked.

    Raises:
        ValueError: if a flag is missing, a file is missing or not of its kind, or the vocabulary is larger
            than ``vocab_size``.
    """
    kind, literal = config.tokenizer_type, config.parse_special_tokens
    if kind is None:
        raise ValueError(f"--tokenizer-type is missing: give one of {', '.join(TOKENIZER_TYPES)}")
    tokenizer: Tokenizer
    if kind == "NullTokenizer":
        tokenizer = NullTokenizer(vocab_size)
    elif kind == "GPT2BPETokenizer":
        tokenizer = gpt2_bpe_tokenizer(config.vocab_file, config.merge_file, literal)
    elif kind == "HuggingFaceTokenizer":
        tokenizer = hugging_face_tokenizer(config.tokenizer_model, literal)
    else:
        tokenizer = SentencePieceTokenizer(kind, config.tokenizer_model, literal)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the vocabulary of {tokenizer.name} ({tokenizer.source}) has "
            f"{tokenizer.vocab_size} ids; leave the flag out, or give at least that"
        )
    return tokenizer
