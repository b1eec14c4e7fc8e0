"""A tokenizer that needs no file: bytes are the tokens."""

from collections.abc import Sequence
from typing import Final

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.tokenizer import Tokenizer, sentinel_names, special_ids, splitter, utf8

NUM_BYTES: Final = 256
SPECIAL: Final = ("<eod>", "<bos>", "<pad>", "<cls>", "<sep>", "<mask>")
"""Special tokens; their ids follow the bytes in this order."""


class ByteLevelTokenizer(Tokenizer):
    """The bytes of a text in UTF-8, ids 0 to 255, as in ByT5 (Xue et al. 2022) without its offset.

    256 ends a document, 257 begins a sequence, 258 is padding, 259 to 261 are what BERT calls CLS, SEP and
    MASK; sentinels follow. No id of a special token is also a byte, so any text can be encoded and none looks
    like the end of a document.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self.name, self.source = "ByteLevelTokenizer", "no file"
        names = (*SPECIAL, *sentinel_names(config.vocab_extra_ids))
        self._special = {name: NUM_BYTES + n for n, name in enumerate(names)}
        self._text_of = {token_id: name.encode() for name, token_id in self._special.items()}
        self.eos, self.bos, self.pad = (self._special[name] for name in SPECIAL[:3])
        self.cls, self.sep, self.mask = (self._special[name] for name in SPECIAL[3:])
        self.sentinels = tuple(self._special.values())[len(SPECIAL) :]
        self.vocab_size = NUM_BYTES + len(names)
        self._split = splitter(self._special) if config.parse_special_tokens else None
        self.identity = {
            "type": self.name,
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "special": special_ids(self),
            "parse_special_tokens": config.parse_special_tokens,
        }

    def encode(self, text: str) -> list[int]:
        """The bytes of a text.

        Raises:
            ValueError: if half of a surrogate pair is in it.
        """
        if self._split is None:
            return list(utf8(text))
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else utf8(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some bytes, special tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        found = b"".join(self._text_of.get(one) or bytes((one,)) for one in ids)
        return found.decode(errors="replace")
