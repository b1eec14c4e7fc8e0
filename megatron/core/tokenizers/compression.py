"""What kind of file an input is, by its first bytes, and compressed files as a stream of plain bytes."""

import bz2
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import zstandard

Kind = Literal["plain", "gzip", "zstd", "bzip2", "parquet"]

PIECE_BYTES: Final = 1 << 20
"""Plain bytes that are handed on at a time, about."""
_FEED_BYTES: Final[dict[str, int]] = {"gzip": 1 << 14, "zstd": 1 << 12, "bzip2": 1 << 16}
"""Compressed bytes that are worked on at a time: so few that even zeros, which shrink a thousandfold or more,
do not make a large piece. bzip2 can be told how much to give at once."""
_MAGIC: Final[dict[bytes, Kind]] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"PAR1": "parquet",
}
_ZSTD_SKIPPABLE: Final = b"\x2a\x4d\x18"
"""Second to fourth byte of a frame that holds no text; the first is 0x50 to 0x5f."""
_FOREIGN: Final = {
    b"\xfd7zXZ\x00": "an xz",
    b"PK\x03\x04": "a zip",
    b"\x04\x22\x4d\x18": "an lz4",
    b"7z\xbc\xaf\x27\x1c": "a 7z",
    b"\xff\xfe": "a UTF-16",
    b"\xfe\xff": "a UTF-16",
}
_SUFFIXES: Final[dict[str, Kind]] = {
    ".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".parquet": "parquet",
}  # fmt: skip
_TEXT_STARTS: Final = b"{ \t\r\n\xef"
_LARGEST_WINDOW: Final = 1 << 31


def kind_of(path: Path) -> Kind:
    """What a file is, by its content: its name may say anything.

    Raises:
        ValueError: if it is a compressed file of a kind that is not read, or has the name of one that is and
            the content of none.
    """
    with path.open("rb") as file:
        head = file.read(16)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[1:4] == _ZSTD_SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    for magic, name in _FOREIGN.items():
        if head.startswith(magic):
            raise ValueError(
                f"{path}: this is {name} file; what is read is JSON lines in UTF-8, plain or as gzip, zstd "
                "or bzip2, and parquet"
            )
    promised = _SUFFIXES.get(path.suffix.lower())
    if promised is not None and head[:1] not in [bytes([byte]) for byte in _TEXT_STARTS]:
        found = f"starts with {head[:4]!r}" if head else "is empty"
        raise ValueError(f"{path}: the {promised} file is damaged or cut off: it {found}")
    return "plain"


DAMAGE: Final = (EOFError, OSError, zlib.error, zstandard.ZstdError)
"""What :func:`plain_pieces` raises for a file that is damaged or cut off."""

_DECODERS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj(),
    "bzip2": bz2.BZ2Decompressor,
}


def plain_pieces(raw: BinaryIO, kind: Kind) -> Iterator[bytes]:
    """The plain bytes of a file, in pieces of bounded size; several members or frames count as one text.

    Args:
        raw: the file, open at its start.
        kind: what it is; no parquet.

    Raises:
        EOFError, OSError, zlib.error, zstandard.ZstdError: for a file that is damaged or cut off, once what
            comes before the damage has been given.
    """
    if kind == "plain":
        while piece := raw.read(PIECE_BYTES):
            yield piece
    else:
        yield from _decompressed(raw, kind)


def _decompressed(raw: BinaryIO, kind: Kind) -> Iterator[bytes]:
    decoder, begun, ended_once = _DECODERS[kind](), False, False
    while data := raw.read(_FEED_BYTES[kind]):
        while data:
            if kind == "gzip" and not begun and ended_once:
                data = data.lstrip(b"\0")  # a tape's or an archive's padding
                if not data:
                    break
            begun = True
            if kind == "bzip2":
                yield from _bounded(decoder, data)
            elif piece := decoder.decompress(data):
                yield piece
            data = b""
            if decoder.eof:
                data, decoder, begun, ended_once = decoder.unused_data, _DECODERS[kind](), False, True
    if begun or not ended_once:
        raise EOFError("it ends in the middle")


def _bounded(decoder: bz2.BZ2Decompressor, data: bytes) -> Iterator[bytes]:
    while True:
        if piece := decoder.decompress(data, PIECE_BYTES):
            yield piece
        data = b""
        if decoder.needs_input or decoder.eof:
            return
