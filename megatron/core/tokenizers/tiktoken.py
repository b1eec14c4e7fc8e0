"""Byte-level BPE by the ranks of its tokens, run by the ``tiktoken`` library."""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import tiktoken
import tokenizers
from tokenizers import pre_tokenizers

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.ranks import MergeRanks, read_ranks, tokenizer_json
from megatron.core.tokenizers.tokenizer import (
    Tokenizer,
    digest,
    extend_vocabulary,
    named_file,
    sentinel_names,
    special_ids,
    splitter,
    utf8,
)

PATTERNS: Final = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""The values of ``--tiktoken-pattern``: what is never merged across."""

REQUIRED: Final = ("<unk>", "<s>", "</s>")
DEFAULT_NAMES: Final = (*REQUIRED, "<mask>", "<pad>", "<cls>", "<sep>")
DEFAULT_NUM_SPECIAL: Final = 1000
DEFAULT_VOCAB_SIZE: Final = 1 << 17
"""To which the vocabulary of a JSON file is cut where neither the file nor ``--vocab-size`` says."""

_LONG_SPACE: Final = 100_000
_LONG_SPACES: Final = re.compile(rf"\s{{{_LONG_SPACE}}}")


class TikTokenizer(Tokenizer):
    """BPE whose merges are ranks, with the ids of special tokens before all others.

    Id k is the k-th special token: ``--tiktoken-special-tokens``, then ``<SPECIAL_k>`` up to
    ``--tiktoken-num-special-tokens``. After them come the tokens of the file by their rank, then sentinels.
    ``<s>``, ``</s>``, ``<pad>``, ``<cls>``, ``<sep>`` and ``<mask>`` are what their names say, where they are
    among the special tokens; ``</s>`` is the end of a document.

    Args:
        config: its flags. ``--tokenizer-model`` is one of

            * a ``.tiktoken`` file: a token in base64 and its rank on each line;
            * a JSON list of objects with ``rank`` and ``token_bytes``, in order of rank;
            * a JSON object with such a list as ``vocab`` (a ``tekken.json``), whose ``config`` and
              ``special_tokens`` say what the flags leave open.
        vocab_size: the value of ``--vocab-size``: a JSON file has more tokens than the vocabulary, which is
            cut to this size; 131072 if neither this nor the file says.

    Raises:
        ValueError: if the file is missing or not of its kind, or the flags do not fit it.
    """

    def __init__(self, config: TokenizerConfig, vocab_size: int | None = None) -> None:
        self.name, self.source = "TikTokenizer", f"--tokenizer-model {config.tokenizer_model}"
        what = "a .tiktoken file or a JSON file of ranks"
        path = named_file("--tokenizer-model", config.tokenizer_model, self.name, what)
        file = read_ranks(path)
        self._pattern = _pattern(config, file, self.source)
        names = _special_names(config, file)
        ranks = file.ranks
        if file.has_more:
            size = vocab_size or file.vocab_size or DEFAULT_VOCAB_SIZE
            ranks = {token: rank for token, rank in ranks.items() if rank < size - len(names)}
        if not all(bytes((byte,)) in ranks for byte in range(256)):
            raise ValueError(
                f"{self.source}: the vocabulary does not hold all 256 bytes"
                + (f" when it is cut to {size} ids" if file.has_more else "")
            )
        self._ranks = {token: rank + len(names) for token, rank in ranks.items()}
        size = max(self._ranks.values()) + 1
        special = {name: token_id for token_id, name in enumerate(names)}
        sentinels = extend_vocabulary(sentinel_names(config.vocab_extra_ids), special, size)
        self.sentinels = tuple(sentinels.values())
        self._special = special | sentinels
        self.vocab_size = max([size, *(token_id + 1 for token_id in self.sentinels)])
        self.bos, self.eos, self.pad = (special.get(name) for name in ("<s>", "</s>", "<pad>"))
        self.cls, self.sep, self.mask = (special.get(name) for name in ("<cls>", "<sep>", "<mask>"))
        self._library = tiktoken.Encoding(
            self.name, pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens=self._special
        )
        self._split = splitter(self._special) if config.parse_special_tokens and self._special else None
        self.identity = {
            "type": self.name,
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "special": special_ids(self),
            "parse_special_tokens": config.parse_special_tokens,
            "sha256": digest(path.read_bytes(), self._pattern.encode(), *(name.encode() for name in names)),
        }

    @cached_property
    def encoder_json(self) -> str:
        """Content of a ``tokenizer.json`` with the same ranks as merges."""
        parse = self._split is not None
        return tokenizer_json(self._ranks, self._pattern, self._special, parse_special_tokens=parse)

    def encode(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
            ValueError: if half of a surrogate pair is in it.
        """
        utf8(text)  # tiktoken would replace it
        if self._split is None:
            return self._encode(text)
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else self._encode(part)
        return ids

    def _encode(self, text: str) -> list[int]:
        if len(text) < _LONG_SPACE or not _LONG_SPACES.search(text):
            return self._library.encode_ordinary(text)
        # tiktoken's regular expressions panic on a million spaces; those of the other library do not.
        ids: list[int] = []
        for piece, _ in self._splitter.pre_tokenize_str(text):
            ids += self._merger.encode_ordinary(piece)
        return ids

    @cached_property
    def _splitter(self) -> pre_tokenizers.Split:
        return pre_tokenizers.Split(tokenizers.Regex(self._pattern), "isolated")

    @cached_property
    def _merger(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            self.name, pat_str="(?s:.+)", mergeable_ranks=self._ranks, special_tokens=self._special
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._library.decode(list(ids))


def _pattern(config: TokenizerConfig, file: MergeRanks, source: str) -> str:
    if config.tiktoken_pattern is not None:
        return PATTERNS[config.tiktoken_pattern]
    if file.pattern is not None:
        return file.pattern
    if file.has_more:
        return PATTERNS["v2"]
    raise ValueError(
        f"{source}: a .tiktoken file does not say how a text is split before bytes are merged: give "
        f"--tiktoken-pattern, one of {', '.join(PATTERNS)}"
    )


def _special_names(config: TokenizerConfig, file: MergeRanks) -> list[str]:
    """Names of the special tokens, in order of their ids."""
    number = config.tiktoken_num_special_tokens
    number = (file.num_special_tokens or DEFAULT_NUM_SPECIAL) if number is None else number
    names = config.tiktoken_special_tokens
    if names is None:
        names = file.special_tokens or DEFAULT_NAMES
        names = names[:number]
    elif len(set(names)) != len(names) or not set(REQUIRED) <= set(names):
        raise ValueError(
            f"--tiktoken-special-tokens {' '.join(names)}: give each name once, and {', '.join(REQUIRED)} "
            "among them"
        )
    if len(names) > number:
        raise ValueError(
            f"--tiktoken-num-special-tokens {number}: --tiktoken-special-tokens names {len(names)}; give at "
            "least that"
        )
    return [*names, *(f"<SPECIAL_{number}>" for number in range(len(names), number))]
