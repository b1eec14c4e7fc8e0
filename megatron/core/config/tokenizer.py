"""How text becomes token ids."""

from dataclasses import dataclass
from typing import Literal

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
)


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: (
        Literal[
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = None
    """Family of the tokenizer."""
    vocab_file: str | None = None
    """vocab.json of a BPE tokenizer."""
    merge_file: str | None = None
    """merges.txt of a BPE tokenizer."""
    tokenizer_model: str | None = None
    """A SentencePiece .model file, a Hugging Face tokenizer.json, or a folder that holds one."""
    parse_special_tokens: bool = False
    """Read special-token text that occurs inside a document as that token; by default it is ordinary text."""
