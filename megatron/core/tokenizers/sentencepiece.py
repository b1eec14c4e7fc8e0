"""Tokenizers of SentencePiece ``.model`` files."""

from collections.abc import Sequence
from typing import Final

from sentencepiece import SentencePieceProcessor

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.tokenizer import (
    NO_TEXT_HOLDS,
    Tokenizer,
    digest,
    extend_vocabulary,
    named_file,
    sentinel_names,
    splitter,
    utf8,
)

_PIECE: Final = 10
"""A protocol buffer's key of field number 1 with bytes in it."""
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
        self._encoder = self._model
        found_in_text = {found for found in self._special.values() if self._is_found_in_text(found)}
        if found_in_text and self._split is None:
            self._encoder = SentencePieceProcessor()
            self._encoder.LoadFromSerializedProto(without_names(content, found_in_text))
        self.identity = {
            "type": "Llama2Tokenizer" if self.prefix else "SentencePieceTokenizer",
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "parse_special_tokens": config.parse_special_tokens,
            "sha256": digest(content),
        }

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


def without_names(model: bytes, ids: set[int]) -> bytes:
    """The same SentencePiece model, in which some pieces have names that no text contains.

    A model file is a protocol buffer: fields one after another, of which number 1 is a piece, whose own field
    number 1 is its name.

    Args:
        model: content of the ``.model`` file.
        ids: the pieces.
    """
    parts, start, piece = [], 0, 0
    while start < len(model):
        key, begin = _varint(model, start)
        end = _end_of_value(model, key & 7, begin)
        part = model[start:end]
        if key == _PIECE:
            if piece in ids:
                begin = _varint(model, begin)[1]
                name_end = _end_of_value(model, 2, begin + 1)
                assert model[begin] == _PIECE, "a piece begins with its name"
                name = NO_TEXT_HOLDS.encode() + model[_varint(model, begin + 1)[1] : name_end]
                message = _field(name) + model[name_end:end]
                part = _field(message)
            piece += 1
        parts.append(part)
        start = end
    return b"".join(parts)


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value, shift = 0, 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, start


def _end_of_value(data: bytes, kind: int, start: int) -> int:
    """Where the value of a field ends: a number, 8 bytes, bytes after their length, or 4 bytes."""
    if kind == 0:
        return _varint(data, start)[1]
    if kind == 2:
        length, start = _varint(data, start)
        return start + length
    return start + {1: 8, 5: 4}[kind]


def _field(content: bytes) -> bytes:
    """Field number 1 with some bytes."""
    length, size = len(content), bytearray()
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes((_PIECE, *size, length)) + content
