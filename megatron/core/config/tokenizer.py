"""How text becomes token ids."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]
TOKENIZER_TYPES: Final[tuple[str, ...]] = get_args(TokenizerType)

_FILES: Final = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "ByteLevelTokenizer": (),
    "NullTokenizer": (),
}
_TIKTOKEN: Final = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer and its files."""

    tokenizer_type: TokenizerType | None = None
    """Family of the tokenizer."""
    vocab_file: str | None = None
    """vocab.json of a BPE tokenizer, or vocab.txt of a WordPiece tokenizer."""
    merge_file: str | None = None
    """merges.txt of a BPE tokenizer."""
    tokenizer_model: str | None = None
    """A SentencePiece .model file; a Hugging Face tokenizer.json or a folder that holds one; or the ranks
    that TikTokenizer reads, a .tiktoken file or a JSON file."""
    vocab_extra_ids: int = 0
    """Sentinels, <extra_id_0> and so on, that follow the vocabulary where the file does not have them."""
    parse_special_tokens: bool = False
    """Read special-token text that occurs inside a document as that token; by default it is ordinary text."""
    tiktoken_pattern: Literal["v1", "v2", "cl100k", "o200k"] | None = None
    """How TikTokenizer splits a text before it merges bytes: v1 and v2 as elsewhere (v2 for JSON files that
    do not say), cl100k and o200k as OpenAI's vocabularies of those names."""
    tiktoken_num_special_tokens: int | None = None
    """Ids that TikTokenizer keeps for special tokens, before all others; 1000 where the file does not say."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first of them, <unk>, <s> and </s> among them."""

    def __post_init__(self) -> None:
        for name in ("vocab_extra_ids", "tiktoken_num_special_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 0")

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the fields that give the files of this type of tokenizer."""
        return _FILES.get(self.tokenizer_type or "", ("tokenizer_model",))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all fields that mean something to this type of tokenizer."""
        kind = self.tokenizer_type
        if kind is None or kind == "NullTokenizer":
            return ("tokenizer_type", "vocab_extra_ids")
        tiktoken = _TIKTOKEN if kind == "TikTokenizer" else ()
        return ("tokenizer_type", *self.files, "vocab_extra_ids", "parse_special_tokens", *tiktoken)
