"""What a SentencePiece ``.model`` file holds: a protocol buffer, read and rewritten without its library.

The numbers are those of sentencepiece_model.proto.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from sentencepiece import SentencePieceProcessor

from megatron.core.tokenizers.tokenizer import NO_TEXT_HOLDS

_PIECE: Final = 1
_TRAINER: Final = 2
_NORMALIZER: Final = 3
"""Fields of the file."""
_TYPE: Final = 3
_USER_DEFINED: Final = 4
"""Field of a piece, and one of its values."""
_MODEL_TYPE: Final = 3
_BPE: Final = 2
_SPACE_BEHIND: Final = 24
_BYTE_FALLBACK: Final = 35
"""Fields of the trainer's settings, and one of the values of the first."""
_CHARACTER_MAP: Final = 2
_SPACE_BEFORE: Final = 3
_SPACES_REMOVED: Final = 4
_SPACES_SHOWN: Final = 5
"""Fields of the normalizer's settings; numbers are 1 where they are not there."""


def without_names(model: bytes, ids: set[int]) -> bytes:
    """The same SentencePiece model, in which some pieces have names that no text contains.

    A model file is a protocol buffer: fields one after another, of which number 1 is a piece, whose own field
    number 1 is its name.

    Args:
        model: content of the ``.model`` file.
        ids: the pieces.
    """
    parts, piece = [], 0
    for number, start, value, end in _fields(model):
        part = model[start:end]
        if number == _PIECE:
            if piece in ids:
                message = model[value:end]
                (first, _, name, name_end), *_ = _fields(message)
                assert first == 1, "a piece begins with its name"
                part = _field(_field(NO_TEXT_HOLDS.encode() + message[name:name_end]) + message[name_end:])
            piece += 1
        parts.append(part)
    return b"".join(parts)


def llama_json(library: SentencePieceProcessor, model: bytes) -> str | None:
    """Content of a ``tokenizer.json`` that gives the ids of a model like Llama's.

    Such a model merges pieces (BPE), leaves the text as it is but for a space before it and ``\u2581`` for
    each space, and spells characters that it does not have in bytes. None for a model of another kind.

    Any two neighbours that together are a piece can be merged into it, so each way to cut a piece in two is a
    merge, in the order of the pieces' scores.
    """
    if not _is_like_llama(model):
        return None
    ids = range(library.get_piece_size())
    if sum(map(library.is_byte, ids)) != 256:
        return None
    pieces = {
        library.id_to_piece(one): one
        for one in ids
        if not (library.is_control(one) or library.is_unknown(one) or library.is_byte(one))
    }
    if any(character not in pieces for piece in pieces for character in piece):
        return None
    by_score = sorted(pieces, key=lambda piece: -library.get_score(pieces[piece]))
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": library.id_to_piece(library.unk_id()),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {library.id_to_piece(one): one for one in ids},
            "merges": merges,
        },
    }
    return json.dumps(whole, ensure_ascii=False)


def _is_like_llama(model: bytes) -> bool:
    user_defined = any(
        _settings(model[value:end]).get(_TYPE) == _USER_DEFINED
        for number, _, value, end in _fields(model)
        if number == _PIECE
    )
    trainer, normalizer = (
        _settings(b"".join(model[value:end] for number, _, value, end in _fields(model) if number == wanted))
        for wanted in (_TRAINER, _NORMALIZER)
    )
    return (
        not user_defined
        and trainer.get(_MODEL_TYPE) == _BPE
        and bool(trainer.get(_BYTE_FALLBACK))
        and not normalizer.get(_CHARACTER_MAP)
        and bool(normalizer.get(_SPACE_BEFORE, 1))
        and not normalizer.get(_SPACES_REMOVED, 1)
        and bool(normalizer.get(_SPACES_SHOWN, 1))
        and not trainer.get(_SPACE_BEHIND)
    )


def _settings(message: bytes) -> dict[int, int]:
    """The numbers in a message by their field, and for a field of bytes how many there are."""
    found = {}
    for number, start, value, end in _fields(message):
        kind = _varint(message, start)[0] & 7
        found[number] = _varint(message, value)[0] if kind == 0 else end - value
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, and where the field, its value and what follows begin."""
    start = 0
    while start < len(message):
        key, value = _varint(message, start)
        end = _end_of_value(message, key & 7, value)
        if key & 7 == 2:
            value = _varint(message, value)[1]
        yield key >> 3, start, value, end
        start = end


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
    return bytes((1 << 3 | 2, *size, length)) + content
