"""Tokenized text in a pair of files, ``prefix.bin`` and ``prefix.idx``: a memory-mapped reader, and a writer.

The format is that of the Megatron family (``MMIDIDX``, version 1), all integers little-endian:

========================  ===========================================================================
bytes of ``.idx``         field
========================  ===========================================================================
9                         magic: ``MMIDIDX`` and two zero bytes
8, 1                      version (uint64, 1), code of the token type (uint8)
8, 8                      S, the number of sequences; D, the number of documents + 1 (uint64 each)
4 S                       tokens in each sequence (int32)
8 S                       offset of each sequence in ``.bin``, in bytes (int64)
8 D                       document index: sequences before each document, and S at the end (int64)
S, optional               a mode per sequence (int8), which text data does not need
========================  ===========================================================================

``.bin`` is the tokens one after another, nothing else. A document without tokens has an entry in the document
index and no sequence.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.prefix import check_prefix

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
CHUNK: Final = 1 << 20
"""Index entries that are checked, or laid out for writing, at a time: it needs little memory."""
LONGEST_SEQUENCE: Final = 2**31 - 1


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The token type that a writer uses for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """Read access to the sequences of one prefix, checked whole when it is opened.

    Nothing is read until it is asked for; the two files are memory-mapped, and mapped anew where the object
    is unpickled.

    Attributes:
        prefix: path of the two files, without their suffixes.
        dtype: type of a token.
        sequence_lengths: [S] int32, tokens in each sequence.
        document_indices: [D] int64, sequences before each document, and S at the end.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        check_prefix(self.prefix)
        self._open()
        self._check()

    def _open(self) -> None:
        self._index_path, self._tokens_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        index_size = self._index_path.stat().st_size
        if index_size < HEADER.size:
            raise ValueError(
                f"{self._index_path}: {index_size} bytes, but the header alone has {HEADER.size}; "
                "the file is cut off or is no index"
            )
        raw = np.memmap(self._index_path, dtype=np.uint8, mode="r").view(np.ndarray)
        self.dtype, sequences, entries = self._header(raw[: HEADER.size].tobytes())
        lengths_end = HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        documents_end = offsets_end + 8 * entries
        if index_size not in (documents_end, documents_end + sequences):
            raise ValueError(
                f"{self._index_path}: {index_size} bytes, but its header ({sequences} sequences, {entries} "
                f"document-index entries) makes {documents_end}, or {documents_end + sequences} with modes; "
                "the file is cut off or damaged"
            )
        self.sequence_lengths: npt.NDArray[np.int32] = raw[HEADER.size : lengths_end].view("<i4")
        self._offsets: npt.NDArray[np.int64] = raw[lengths_end:offsets_end].view("<i8")
        self.document_indices: npt.NDArray[np.int64] = raw[offsets_end:documents_end].view("<i8")
        self._tokens = self._map_tokens()

    def _header(self, header: bytes) -> tuple[np.dtype[Any], int, int]:
        magic, version, code, sequences, entries = HEADER.unpack(header)
        if magic != MAGIC:
            raise ValueError(f"{self._index_path}: starts with {magic!r}, but an index starts with {MAGIC!r}")
        if version != VERSION:
            raise ValueError(
                f"{self._index_path}: version {version} of the index format; only version {VERSION} is known"
            )
        if code not in DTYPES:
            known = ", ".join(f"{key} {value.name}" for key, value in DTYPES.items())
            raise ValueError(f"{self._index_path}: token type code {code} is none of {known}")
        return DTYPES[code], sequences, entries

    def _map_tokens(self) -> npt.NDArray[Any]:
        size = self._tokens_path.stat().st_size
        if size % self.dtype.itemsize:
            raise ValueError(
                f"{self._tokens_path}: {size} bytes, which is no whole number of {self.dtype.name} tokens"
            )
        if size == 0:  # an empty file can't be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self._tokens_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def _check(self) -> None:
        expected = 0
        for start in range(0, len(self), CHUNK):
            lengths = self.sequence_lengths[start : start + CHUNK].astype(np.int64)
            if lengths.min() < 0:
                at = start + int(np.argmax(lengths < 0))
                raise ValueError(
                    f"{self._index_path}: sequence {at} has the negative length {self.sequence_lengths[at]}"
                )
            ends = expected + np.cumsum(lengths * self.dtype.itemsize)
            starts = np.concatenate(([expected], ends[:-1]))
            wrong = starts != self._offsets[start : start + CHUNK]
            if wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"{self._index_path}: sequence {start + at} is said to lie at byte "
                    f"{self._offsets[start + at]}, but the sequences before it end at byte {starts[at]}"
                )
            expected = int(ends[-1])
        found = self._tokens_path.stat().st_size
        if found != expected:
            raise ValueError(
                f"{self._tokens_path}: {found} bytes, but {self._index_path} describes {expected} "
                f"({expected // self.dtype.itemsize} tokens of {self.dtype.itemsize} bytes); "
                "the two files are not of one run, or one is cut off"
            )
        self._check_documents()

    def _check_documents(self) -> None:
        documents = self.document_indices
        if len(documents) == 0 or documents[0] != 0:
            found = "is empty" if len(documents) == 0 else f"starts with {documents[0]}"
            raise ValueError(f"{self._index_path}: the document index {found}; it must start with 0")
        if documents[-1] != len(self):
            raise ValueError(
                f"{self._index_path}: the document index ends with {documents[-1]}; it must end with the "
                f"number of sequences, {len(self)}"
            )
        for start in range(0, len(documents) - 1, CHUNK):
            falls = np.diff(documents[start : start + CHUNK + 1]) < 0
            if falls.any():
                at = start + int(np.argmax(falls))
                raise ValueError(
                    f"{self._index_path}: the document index falls from {documents[at]} to "
                    f"{documents[at + 1]} at document {at + 1}; it must never fall"
                )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones too."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self._tokens)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence, or of a part of it: [length], a read-only view of the file.

        Args:
            index: the sequence, from 0.
            offset: tokens to leave out at its start.
            length: tokens to give; all that are left if None.

        Raises:
            IndexError: if the file has no such sequence, or the sequence no such part.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix}: no sequence {index}; there are {len(self)}")
        whole = int(self.sequence_lengths[index])
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(
                f"{self.prefix}: sequence {index} has {whole} tokens; asked for {offset} to {stop}"
            )
        first = int(self._offsets[index]) // self.dtype.itemsize
        return self._tokens[first + offset : first + stop]

    def tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``start + count`` of all sequences laid end to end; a read-only view."""
        return self._tokens[start : start + count]

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """All tokens of one sequence."""
        return self.get(index)

    def identity(self) -> dict[str, Any]:
        """What tells this state of the files from any other: path, and size and time of change of each."""
        files = (self._index_path, self._tokens_path)
        stats = {path.suffix: path.stat() for path in files}
        return {
            "path": os.path.abspath(self.prefix),
            **{suffix: [stat.st_size, stat.st_mtime_ns] for suffix, stat in stats.items()},
        }

    def __getstate__(self) -> dict[str, str]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.prefix = state["prefix"]
        self._open()


class IndexedDatasetBuilder:
    """Writes documents one after another; the two files appear under their names only when all is written.

    Memory: 4 bytes a sequence and 8 bytes a document. As a context manager it finishes on a clean exit, and
    leaves nothing behind when an exception passes through.

    Args:
        prefix: path of the two files, without their suffixes; the folder must exist.
        dtype: type of a token, one that the format knows; see ``best_dtype``.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {known: code for code, known in DTYPES.items()}
        if self.dtype not in codes:
            names = ", ".join(known.name for known in codes)
            raise ValueError(f"token type {self.dtype.name}: the .idx format knows {names}")
        self._code = codes[self.dtype]
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._partial_tokens = Path(f"{self.prefix}.bin.partial-{os.getpid()}")
        self._partial_index = Path(f"{self.prefix}.idx.partial-{os.getpid()}")
        self._file: BinaryIO | None = self._partial_tokens.open("wb")

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    def add_document(self, tokens: npt.ArrayLike, sequence_lengths: Sequence[int] | None = None) -> None:
        """Add one document.

        Args:
            tokens: [t] all its tokens; none makes an entry in the document index and no sequence.
            sequence_lengths: tokens in each of its sequences (say, sentences); one sequence if None.

        Raises:
            ValueError: if the lengths don't add up to t, or a token does not fit the token type.
        """
        flat = np.asarray(tokens).reshape(-1)
        if sequence_lengths is None:
            sequence_lengths = [len(flat)] if len(flat) else []
        self.add_many(flat, sequence_lengths, [len(sequence_lengths)])

    def add_many(
        self, tokens: npt.ArrayLike, sequence_lengths: npt.ArrayLike, sequences_per_document: npt.ArrayLike
    ) -> None:
        """Add many documents at once.

        Args:
            tokens: [t] tokens of all the documents, one after another.
            sequence_lengths: [n] tokens in each sequence, t together.
            sequences_per_document: [m] sequences in each document, n together; 0 is an empty document.

        Raises:
            ValueError: if the numbers don't add up, or a token does not fit the token type.
        """
        assert self._file is not None, "the builder is closed"
        flat = np.asarray(tokens).reshape(-1)
        lengths = np.asarray(sequence_lengths, dtype=np.int64).reshape(-1)
        counts = np.asarray(sequences_per_document, dtype=np.int64).reshape(-1)
        if lengths.sum() != len(flat) or counts.sum() != len(lengths):
            raise ValueError(
                f"{self.prefix}: {len(flat)} tokens and {len(lengths)} sequences, but the lengths add up to "
                f"{lengths.sum()} and the documents to {counts.sum()} sequences"
            )
        if lengths.size and not 0 <= lengths.min() <= lengths.max() <= LONGEST_SEQUENCE:
            raise ValueError(
                f"{self.prefix}: a sequence has 0 to {LONGEST_SEQUENCE} tokens in the .idx format"
            )
        self._file.write(self._encode(flat).data)
        self._documents.frombytes((self.num_sequences + np.cumsum(counts)).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())

    def _encode(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if tokens.size and self.dtype.kind in "iu" and tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            lowest, highest = tokens.min(), tokens.max()
            if tokens.dtype.kind not in "iu" or lowest < limits.min or highest > limits.max:
                raise ValueError(
                    f"{self.prefix}: tokens from {lowest} to {highest} do not fit {self.dtype.name}, "
                    f"which holds {limits.min} to {limits.max}; is the vocabulary size right?"
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def finalize(self) -> None:
        """Complete both files and give them their names, ``.idx`` last: without it there is no dataset."""
        assert self._file is not None, "the builder is closed"
        _flush(self._file)
        self._file.close()
        self._file = None
        with self._partial_index.open("wb") as index:
            self._write_index(index)
            _flush(index)
        index_path = Path(f"{self.prefix}.idx")
        # An older index must not lie beside newer tokens, not even for a moment.
        index_path.unlink(missing_ok=True)
        self._partial_tokens.replace(f"{self.prefix}.bin")
        self._partial_index.replace(index_path)
        _flush_folder(index_path.parent)

    def _write_index(self, index: BinaryIO) -> None:
        lengths = np.asarray(self._lengths)
        documents = np.asarray(self._documents)
        index.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        index.write(lengths.astype("<i4", copy=False).data)
        end = 0
        for start in range(0, len(lengths), CHUNK):
            # 64 bits before the sum: offsets pass 2 GiB long before lengths do.
            offsets = np.cumsum(lengths[start : start + CHUNK], dtype=np.int64) * self.dtype.itemsize
            index.write((end + np.concatenate(([0], offsets[:-1]))).astype("<i8").data)
            end += int(offsets[-1])
        index.write(documents.astype("<i8", copy=False).data)

    def discard(self) -> None:
        """Give up: close, and delete what was written so far."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._partial_tokens.unlink(missing_ok=True)
        self._partial_index.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif self._file is not None:
            self.finalize()


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
