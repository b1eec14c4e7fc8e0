"""Tokenized text in a pair of files, ``prefix.bin`` and ``prefix.idx``: a reader, and a writer.

``.bin`` is the tokens one after another, nothing else; ``.idx`` says where each sequence and each document
begins, see :mod:`megatron.core.datasets.index_format`. A document without tokens has an entry in the document
index and no sequence.
"""

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import (
    CHUNK,
    DTYPES,
    HEADER,
    LONGEST_SEQUENCE,
    MAGIC,
    VERSION,
    check_ends,
    check_entries,
    map_index,
)
from megatron.core.datasets.index_format import best_dtype as best_dtype
from megatron.core.datasets.prefix import check_prefix
from megatron.core.datasets.token_reader import FileTokens, MappedTokens, TokenReader

COPY_BYTES: Final = 1 << 24
"""Size of a block in which the tokens of another dataset are copied."""


class IndexedDataset:
    """Read access to the sequences of one prefix.

    Opening maps the index and checks its header, the ends of its arrays and the sizes of both files, at a
    cost that does not grow with the data: each of thousands of ranks opens each dataset. :meth:`verify`
    checks the rest. Nothing else is read until it is asked for. Where the object is unpickled, the files are
    opened anew.

    Args:
        prefix: path of the two files, without their suffixes.
        mmap: map the tokens into memory too; else each request reads the file, and a read that fails is tried
            again.

    Attributes:
        prefix: path of the two files, without their suffixes.
        dtype: type of a token.
        sequence_lengths: [S] int32, tokens in each sequence.
        document_indices: [D] int64, sequences before each document, and S at the end.

    Raises:
        ValueError: if a file is missing, cut off or damaged; with the file, what was found and expected.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.mmap = mmap
        check_prefix(self.prefix)
        self._index_path, self._tokens_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        self._open()
        check_ends(self._index_path, self._fields, self._tokens_path)
        if len(self._fields.modes):
            # Text has no modes; where bytes are left for them, the counts in the header may as well be wrong.
            self.verify()

    def _open(self) -> None:
        self._index_path, self._tokens_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        self._fields = map_index(self._index_path)
        self.dtype = self._fields.dtype
        self.sequence_lengths = self._fields.lengths
        self.document_indices = self._fields.documents
        reader = MappedTokens if self.mmap else FileTokens
        self._tokens: TokenReader = reader(self._tokens_path, self.dtype)
        self._verified = False

    def verify(self) -> None:
        """Walk the whole index, once in the life of this object: lengths, places, and order of documents.

        Raises:
            ValueError: for the first entry that can't be right, with what was found and expected.
        """
        if not self._verified:
            check_entries(self._index_path, self._fields)
            self._verified = True

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
        return self._tokens.count

    def count_tokens(self, start: int, stop: int) -> int:
        """Number of tokens in sequences ``start`` to ``stop``, from two entries of the index."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.prefix}: no sequences {start} to {stop}; there are {len(self)}")
        return self._first_token(stop) - self._first_token(start)

    def _first_token(self, index: int) -> int:
        """Tokens before a sequence."""
        if index == len(self):
            return self._tokens.count
        return self._fields.offsets.item(index) // self.dtype.itemsize

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence, or of a part of it: [length], not to be written to.

        Args:
            index: the sequence, from 0.
            offset: tokens to leave out at its start.
            length: tokens to give; all that are left if None.

        Raises:
            IndexError: if the file has no such sequence, or the sequence no such part.
            OSError: if the file can't be read (only without ``mmap``).
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix}: no sequence {index}; there are {len(self)}")
        whole = self.sequence_lengths.item(index)
        stop = whole if length is None else offset + length
        if not 0 <= offset <= stop <= whole:
            raise IndexError(
                f"{self.prefix}: sequence {index} has {whole} tokens; asked for {offset} to {stop}"
            )
        first = self._fields.offsets.item(index) // self.dtype.itemsize
        return self._tokens.read(first + offset, first + stop)

    def tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens ``start`` to ``start + count`` of all sequences laid end to end; not to be written to."""
        return self._tokens.read(start, min(start + count, self._tokens.count))

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

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "mmap": self.mmap}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self.mmap = state["prefix"], state["mmap"]
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
        self._documents.frombytes((self.num_sequences + np.cumsum(counts)).view(np.uint8).data)
        self._lengths.frombytes(lengths.astype(np.int32).view(np.uint8).data)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Add all documents of another dataset; its tokens are copied in large blocks.

        Raises:
            ValueError: if its index is damaged, or a token does not fit the token type.
        """
        assert self._file is not None, "the builder is closed"
        dataset.verify()
        block = COPY_BYTES // dataset.dtype.itemsize
        for start in range(0, dataset.num_tokens, block):
            self._file.write(self._encode(dataset.tokens(start, block)).data)
        before = self.num_sequences
        for start in range(1, len(dataset.document_indices), CHUNK):
            self._documents.frombytes((before + dataset.document_indices[start : start + CHUNK]).tobytes())
        for start in range(0, len(dataset), CHUNK):
            self._lengths.frombytes(dataset.sequence_lengths[start : start + CHUNK].tobytes())

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
        # In 64 bits: in bytes they pass 2 GiB long before lengths do.
        ends = np.zeros(CHUNK + 1, dtype="<i8")
        for start in range(0, len(lengths), CHUNK):
            some = lengths[start : start + CHUNK]
            before, ends[0] = int(ends[0]), 0
            np.cumsum(some, out=ends[1 : len(some) + 1])
            ends *= self.dtype.itemsize
            ends += before
            index.write(ends[: len(some)].data)
            ends[0] = ends[len(some)]
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
