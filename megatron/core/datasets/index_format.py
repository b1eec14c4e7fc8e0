"""The ``.idx`` file: what its bytes mean, and whether they can be right.

The format is that of the Megatron family (``MMIDIDX``, version 1), all integers little-endian:

========================  ===========================================================================
bytes                     field
========================  ===========================================================================
9                         magic: ``MMIDIDX`` and two zero bytes
8, 1                      version (uint64, 1), code of the token type (uint8)
8, 8                      S, the number of sequences; D, the number of documents + 1 (uint64 each)
4 S                       tokens in each sequence (int32)
8 S                       offset of each sequence in ``.bin``, in bytes (int64)
8 D                       document index: sequences before each document, and S at the end (int64)
S, optional               a mode per sequence (int8), which text data does not need
========================  ===========================================================================

There are two checks. :func:`map_index` and :func:`check_ends` look at the header, the sizes of both files and
both ends of each array, so that their cost does not grow with the data: every rank of a job does that.
:func:`check_entries` walks all of the index; whoever makes something of it that others rely on does that
once.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CHUNK: Final = 1 << 18
"""Index entries that are checked, or laid out for writing, at a time: it needs little memory."""
LONGEST_SEQUENCE: Final = 2**31 - 1


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token type that a writer uses for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


@dataclass(frozen=True)
class IndexFields:
    """The arrays of an index, mapped from its file; nothing else of them has been read.

    Attributes:
        dtype: type of a token.
        lengths: [S] int32, tokens in each sequence.
        offsets: [S] int64, bytes of ``.bin`` before each sequence.
        documents: [D] int64, sequences before each document, and S at the end.
        modes: [S] or [0] uint8, what follows.
    """

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    modes: npt.NDArray[np.uint8]


def map_index(path: Path) -> IndexFields:
    """Map an index file whose header fits its size.

    Raises:
        ValueError: naming the file, what was found and what was expected.
    """
    size = path.stat().st_size
    if size < HEADER.size:
        raise ValueError(
            f"{path}: {size} bytes, but the header alone has {HEADER.size}; "
            "the file is cut off or is no index"
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    dtype, sequences, entries = _header(path, raw[: HEADER.size].tobytes())
    lengths_end = HEADER.size + 4 * sequences
    offsets_end = lengths_end + 8 * sequences
    documents_end = offsets_end + 8 * entries
    if size not in (documents_end, documents_end + sequences):
        raise ValueError(
            f"{path}: {size} bytes, but its header ({sequences} sequences, {entries} "
            f"document-index entries) makes {documents_end}, or {documents_end + sequences} with modes; "
            "the file is cut off or damaged"
        )
    return IndexFields(
        dtype,
        raw[HEADER.size : lengths_end].view("<i4"),
        raw[lengths_end:offsets_end].view("<i8"),
        raw[offsets_end:documents_end].view("<i8"),
        raw[documents_end:],
    )


def _header(path: Path, header: bytes) -> tuple[np.dtype[Any], int, int]:
    magic, version, code, sequences, entries = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(f"{path}: starts with {magic!r}, but an index starts with {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} of the index format; only version {VERSION} is known")
    if code not in DTYPES:
        known = ", ".join(f"{key} {value.name}" for key, value in DTYPES.items())
        raise ValueError(f"{path}: token type code {code} is none of {known}")
    return DTYPES[code], sequences, entries


def check_ends(path: Path, fields: IndexFields, tokens_path: Path) -> None:
    """Check both ends of each array, and the size of the token file; its cost does not grow with the data.

    Of a file without modes, in which there is a token at all, no cut and no changed bit of the header gets
    past :func:`map_index` and this; except that a wrong number of sequences may make the last bytes look like
    modes, which :func:`check_entries` finds.

    Raises:
        ValueError: naming the file, what was found and what was expected.
    """
    documents, sequences = fields.documents, len(fields.lengths)
    if len(documents) == 0 or documents[0] != 0:
        start = "is empty" if len(documents) == 0 else f"starts with {documents[0]}"
        raise ValueError(f"{path}: the document index {start}; it must start with 0")
    if documents[-1] != sequences:
        raise ValueError(
            f"{path}: the document index ends with {documents[-1]}; it must end with the "
            f"number of sequences, {sequences}"
        )
    _check_modes(path, fields)
    if sequences and fields.offsets[0] != 0:
        raise _misplaced(path, 0, int(fields.offsets[0]), 0)
    found = tokens_path.stat().st_size
    if found % fields.dtype.itemsize:
        raise ValueError(
            f"{tokens_path}: {found} bytes, which is no whole number of {fields.dtype.name} tokens"
        )
    expected = _described_bytes(path, fields)
    if found != expected:
        raise ValueError(
            f"{tokens_path}: {found} bytes, but {path} describes {expected} "
            f"({expected // fields.dtype.itemsize} tokens of {fields.dtype.itemsize} bytes); "
            "the two files are not of one run, or one is cut off"
        )


def _described_bytes(path: Path, fields: IndexFields) -> int:
    """Where the last sequence ends, with the last that is not empty looked at too."""
    for stop in range(len(fields.lengths), 0, -CHUNK):
        start = max(0, stop - CHUNK)
        filled = np.flatnonzero(fields.lengths[start:stop])
        if len(filled):
            last = start + int(filled[-1])
            length = int(fields.lengths[last])
            if length < 0:
                raise _negative(path, last, length)
            end = int(fields.offsets[last]) + length * fields.dtype.itemsize
            if last + 1 < len(fields.lengths) and fields.offsets[-1] != end:
                raise _misplaced(path, len(fields.lengths) - 1, int(fields.offsets[-1]), end)
            return end
    return 0


def _check_modes(path: Path, fields: IndexFields) -> None:
    """Refuse document-index entries that the header's count leaves to be read as modes."""
    modes = fields.modes
    if len(modes) and len(modes) % 8 == 0 and (modes.view("<i8") == len(fields.lengths)).all():
        raise ValueError(
            f"{path}: its header counts {len(fields.documents)} document-index entries, but "
            f"{len(modes) // 8} more, all {len(fields.lengths)}, follow; the header is damaged"
        )


def check_entries(path: Path, fields: IndexFields) -> None:
    """Walk the whole index: no length negative, each sequence where the one before ends, documents in order.

    Raises:
        ValueError: naming the file, the entry, what was found and what was expected.
    """
    expected = 0
    for start in range(0, len(fields.lengths), CHUNK):
        lengths = fields.lengths[start : start + CHUNK]
        if lengths.min() < 0:
            at = start + int(np.argmax(lengths < 0))
            raise _negative(path, at, int(fields.lengths[at]))
        sizes = lengths * np.int64(fields.dtype.itemsize)
        offsets = fields.offsets[start : start + CHUNK].copy()  # aligned, unlike the file
        steps = np.diff(offsets, prepend=offsets[:1])
        steps[0] = offsets[0] - expected
        steps[1:] -= sizes[:-1]
        if steps.any():
            at = int(np.flatnonzero(steps)[0])
            right = int(offsets[at - 1] + sizes[at - 1]) if at else expected
            raise _misplaced(path, start + at, int(offsets[at]), right)
        expected = int(offsets[-1] + sizes[-1])
    documents = fields.documents
    for start in range(0, len(documents) - 1, CHUNK):
        falls = np.diff(documents[start : start + CHUNK + 1]) < 0
        if falls.any():
            at = start + int(np.argmax(falls))
            raise ValueError(
                f"{path}: the document index falls from {documents[at]} to "
                f"{documents[at + 1]} at document {at + 1}; it must never fall"
            )


def _negative(path: Path, sequence: int, length: int) -> ValueError:
    return ValueError(f"{path}: sequence {sequence} has the negative length {length}")


def _misplaced(path: Path, sequence: int, found: int, expected: int) -> ValueError:
    return ValueError(
        f"{path}: sequence {sequence} is said to lie at byte {found}, but the sequences before it end at "
        f"byte {expected}"
    )
