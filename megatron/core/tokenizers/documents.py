"""From lines of a corpus to the token ids of its documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.corpus import Chunk, texts_on_line
from megatron.core.tokenizers.sentences import split_sentences
from megatron.core.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents that some lines hold under one key, without the empty ones."""

    tokens: npt.NDArray[Any]
    """[t] ids of all documents, one after another."""
    sequence_lengths: npt.NDArray[np.int64]
    """[n] ids in each sequence, t together."""
    sequences_per_document: npt.NDArray[np.int64]
    """[m] sequences in each document, n together."""
    num_empty: int
    """Documents that were left out because there is nothing in them."""


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used."""

    path: str
    """The file."""
    line: int
    """Its number in the file, from 1."""
    reason: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class EncodedChunk:
    """What became of the lines of a chunk."""

    documents: tuple[EncodedDocuments, ...]
    """One for each key."""
    bad_lines: list[BadLine]
    """Lines of which nothing was taken."""
    bytes_read: int
    """As in the chunk: how far the reading of all files has come."""


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes token ids of a chunk of lines.

    A document is the text under one key of one line, or a list of texts there. It becomes one sequence, one
    for each text of a list, or one for each sentence. Texts of nothing but white space, sequences without
    tokens and documents without sequences are left out.
    """

    tokenizer: Tokenizer
    """Where ids come from."""
    keys: tuple[str, ...]
    """Keys of the texts in the JSON objects."""
    dtype: npt.DTypeLike
    """Type of a token id."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document id, which counts in its last sequence."""
    split_sentences: bool = False
    """Make each sentence a sequence of its own."""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encode the lines of a chunk; a line with anything wrong in it adds to no key."""
        parts = [_Part() for _ in self.keys]
        bad_lines = []
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                texts = texts_on_line(line, self.keys)
                documents = [self.encode_document(pieces) for pieces in texts or ()]
            except ValueError as error:
                bad_lines.append(BadLine(chunk.path, number, str(error)))
                continue
            for part, sequences in zip(parts, documents, strict=False):  # a blank line has no documents
                part.add(sequences)
        return EncodedChunk(tuple(part.done(self.dtype) for part in parts), bad_lines, chunk.bytes_read)

    def encode_document(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each sequence of one document; none if the document is empty.

        Raises:
            ValueError: if the tokenizer has no ids for a text.
        """
        if self.split_sentences:
            texts = [sentence for text in texts for sentence in split_sentences(text)]
        texts = [text for text in texts if text and not text.isspace()]
        prefix = self.tokenizer.prefix
        sequences = [ids[len(prefix) :] for ids in self.tokenizer.encode_batch(texts)]
        sequences = [ids for ids in sequences if ids]
        if sequences:
            sequences[0][:0] = prefix
            if self.append_eod:
                sequences[-1].append(self.tokenizer.eod)
        return sequences


class _Part:
    """Documents of one key, growing."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lengths: list[int] = []
        self.counts: list[int] = []
        self.num_empty = 0

    def add(self, sequences: list[list[int]]) -> None:
        if not sequences:
            self.num_empty += 1
            return
        for ids in sequences:
            self.tokens += ids
            self.lengths.append(len(ids))
        self.counts.append(len(sequences))

    def done(self, dtype: npt.DTypeLike) -> EncodedDocuments:
        return EncodedDocuments(
            tokens=np.array(self.tokens, dtype=dtype),
            sequence_lengths=np.array(self.lengths, dtype=np.int64),
            sequences_per_document=np.array(self.counts, dtype=np.int64),
            num_empty=self.num_empty,
        )
