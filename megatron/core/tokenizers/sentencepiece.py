"""Tokenizers of SentencePiece ``.model`` files."""

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from sentencepiece import SentencePieceProcessor

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.sentencepiece_model import llama_json, without_names
from megatron.core.tokenizers.tokenizer import (
    NO_TEXT_HOLDS,
    Tokenizer,
    digest,
    extend_vocabulary,
    named_file,
    sentinel_names,
    special_ids,
    split_apart,
    splitter,
    utf8,
)

KNOWN_ENDS: Final = ("<|endoftext|>", "</s>", "<EOD>")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Beginning, end and padding are the ids that the model file gives them (none where it gives -1). The end of
    a document is its end of sequence, or in a model without one the first of the pieces ``<|endoftext|>``,
    ``</s>`` and ``<EOD>`` that it has. ``<CLS>``, ``<SEP>`` and ``<MASK>`` are its pieces of these
    names. No pieces but sentinels are added to the model's own.

    ``SentencePieceTokenizer`` and ``GPTSentencePieceTokenizer`` are the same; ``Llama2Tokenizer`` puts the
    beginning of sequence before every text, as Llama's models expect. With ``parse_special_tokens`` special
    pieces are found where they occur in a text, and the text between them is encoded part by part.

    Raises:
        ValueError: if the file is missing or is no SentencePiece model.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self.name = str(config.tokenizer_type)
        self.source = f"--tokenizer-model {config.tokenizer_model}"
        what = "a SentencePiece .model file"
        path = named_file("--tokenizer-model", config.tokenizer_model, self.name, what)
        content = path.read_bytes()
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError:
            raise ValueError(f"{self.source}: not a SentencePiece model") from None
        self.bos = _id_or_none(self._model.bos_id())
        self.eos = _id_or_none(self._model.eos_id())
        self.pad = _id_or_none(self._model.pad_id())
        if self.eos is None:
            self.eos = next((found for name in KNOWN_ENDS if (found := self._marker(name)) is not None), None)
        self.cls, self.sep, self.mask = (self._marker(piece) for piece in ("<CLS>", "<SEP>", "<MASK>"))
        if self.name == "Llama2Tokenizer":
            if self.bos is None:
                raise ValueError(
                    f"{self.source}: the model has no beginning-of-sequence piece, which Llama2Tokenizer "
                    "puts before each text; use --tokenizer-type SentencePieceTokenizer"
                )
            self.prefix = (self.bos,)
        pieces = self._model.get_piece_size()
        names = sentinel_names(config.vocab_extra_ids)
        known = {name: found for name in names if (found := self._marker(name)) is not None}
        sentinels = extend_vocabulary(names, known, pieces)
        self.sentinels = tuple(sentinels.values())
        self._added = {token_id: name for name, token_id in sentinels.items() if token_id >= pieces}
        self.vocab_size = pieces + len(self._added)
        control = (self.bos, self.eos, self.pad, self.cls, self.sep, self.mask)
        self._special = {self._model.id_to_piece(found): found for found in control if found is not None}
        self._special |= sentinels
        self._split = splitter(self._special) if config.parse_special_tokens and self._special else None
        self._content = content
        self._encoder = self._model
        found_in_text = {found for found in self._special.values() if self._is_found_in_text(found)}
        if found_in_text and self._split is None:
            self._encoder = SentencePieceProcessor()
            self._encoder.LoadFromSerializedProto(without_names(content, found_in_text))
        self.identity = {
            "type": "Llama2Tokenizer" if self.prefix else "SentencePieceTokenizer",
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "special": special_ids(self),
            "parse_special_tokens": config.parse_special_tokens,
            "sha256": digest(content),
        }

    @cached_property
    def encoder_json(self) -> str | None:
        """Content of a ``tokenizer.json`` with the same merges, for models like Llama's."""
        return None if self._split is not None else llama_json(self._model, self._content)

    def _marker(self, piece: str) -> int | None:
        token_id = int(self._model.piece_to_id(piece))
        there = self._model.id_to_piece(token_id) == piece and not self._model.is_unknown(token_id)
        return token_id if there else None

    def _is_found_in_text(self, token_id: int) -> bool:
        """Whether the library takes the name of a special piece, where a text holds it, for the piece."""
        known = token_id < self._model.get_piece_size()
        return known and not (self._model.is_control(token_id) or self._model.is_unknown(token_id))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after ``prefix``; the prefix is not doubled where the text has it already."""
        ids = self._encode(text)
        begun = tuple(ids[: len(self.prefix)]) == self.prefix
        return ids if begun else [*self.prefix, *ids]

    def _encode(self, text: str) -> list[int]:
        utf8(text)  # says what the library does not
        if self._split is None:
            if self._encoder is not self._model and NO_TEXT_HOLDS in text:
                return [one for piece in split_apart(text) for one in self._encoder.encode(piece)]
            return list(self._encoder.encode(text))
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else self._encoder.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; SentencePiece gives control pieces no text, added sentinels are spelled out."""
        if not self._added:
            return str(self._model.decode(list(ids)))
        text, own = "", list[int]()
        for token_id in ids:
            if token_id in self._added:
                text, own = f"{text}{self._model.decode(own)}{self._added[token_id]}", []
            else:
                own.append(token_id)
        return text + str(self._model.decode(own))


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
