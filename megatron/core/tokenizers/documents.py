"""From lines of a corpus to the token ids of its documents."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from megatron.core.tokenizers.blocks import Block, Stretch, lines_before, lines_of, sample_blocks
from megatron.core.tokenizers.corpus import texts_on_line
from megatron.core.tokenizers.fast_encoder import BatchEncoder, first_difference

_CHECKED_BLOCKS: Final = 8
"""Of so many blocks one has a piece of text encoded by the reference too, which takes 2% of the time."""
_CHECKED_CHARACTERS: Final = 500
_SAMPLED_BLOCKS: Final = 16
_SAMPLED_TEXTS: Final = 4
_SAMPLED_CHARACTERS: Final = 1000


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
    counted_from: int = 0
    """Byte of the file from which on ``line`` counts."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"

    def in_file(self) -> "BadLine":
        """The same with the number that the line has in its file."""
        return replace(self, line=lines_before(self.path, self.counted_from) + self.line, counted_from=0)


@dataclass(frozen=True)
class EncodedBlock:
    """What became of the lines of a block."""

    block: Block
    """The block, without its lines."""
    documents: tuple[EncodedDocuments, ...] = ()
    """One for each key."""
    bad_line: BadLine | None = None
    """The first line of which nothing was taken."""
    num_bad: int = 0
    """How many there are."""
    difference: str | None = None
    """Where the encoder's ids were found to be other than the tokenizer's; the ids cannot be used then."""
    problem: str | None = None
    """Why there are no documents."""


@dataclass(frozen=True)
class DocumentEncoder:
    """Makes token ids of a block of lines.

    A document is the text under one key of one line, or a list of texts there. It becomes one sequence, one
    for each text of a list, or one for each sentence. Texts of nothing but white space, sequences without
    tokens and documents without sequences are left out.
    """

    encode: BatchEncoder
    """Where ids come from."""
    keys: tuple[str, ...]
    """Keys of the texts in the JSON objects."""
    dtype: npt.DTypeLike
    """Type of a token id; every id of the tokenizer fits it."""
    prefix: tuple[int, ...] = ()
    """Ids to begin each document with."""
    eod: int | None = None
    """Id to end each document with; it counts in its last sequence."""
    split_sentences: Callable[[str], list[str]] | None = None
    """The sentences of a text, each to be a sequence of its own; None leaves texts whole."""
    reference: BatchEncoder | None = None
    """What ``encode`` is compared with all along."""

    def __call__(self, block: Block) -> EncodedBlock:
        """Encode the lines of a block; a line with anything wrong in it adds to no key."""
        try:
            lines = lines_of(block)
        except OSError as error:
            return EncodedBlock(replace(block, data=None), problem=f"{block.path}: {error.strerror}")
        numbers, columns, bad = documents_on_lines(lines, self.keys)
        del lines
        try:
            documents = tuple(map(self._encode_column, columns))
        except ValueError:
            bad += self._unencodable(numbers, columns)
            documents = tuple(map(self._encode_column, columns))
        first = min(bad, default=None)
        bad_line = None
        if first is not None:
            before, counted_from = (0, block.start) if block.data is None else (block.start, 0)
            bad_line = BadLine(block.path, before + first[0] + 1, first[1], counted_from)
        difference = self._difference(block, columns[0])
        return EncodedBlock(replace(block, data=None), documents, bad_line, len(bad), difference)

    def _unencodable(self, numbers: Sequence[int], columns: list[list[Any]]) -> list[tuple[int, str]]:
        """Take out the documents that have no ids; the number of each's line, and why."""
        bad = []
        for place in reversed(range(len(numbers))):
            try:
                for column in columns:
                    self._encode_column([column[place]])
            except ValueError as error:
                bad.append((numbers[place], str(error)))
                for column in columns:
                    del column[place]
        return bad

    def _encode_column(self, values: Sequence[str | list[str]]) -> EncodedDocuments:
        texts, owners = self._texts_of(values)
        ids, lengths = self.encode(texts)
        if not lengths.all():
            owners, lengths = owners[lengths > 0], lengths[lengths > 0]
        counts = np.bincount(owners, minlength=len(values)).astype(np.int64)
        counts = counts[counts > 0]
        tokens, lengths = self._framed(ids, lengths, counts)
        return EncodedDocuments(tokens, lengths, counts, len(values) - len(counts))

    def _texts_of(self, values: Sequence[str | list[str]]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """[n] the texts to encode, and the number of the document that each belongs to."""
        if self.split_sentences is None and set(map(type, values)) <= {str}:
            whole: list[str] = list(values)  # type: ignore[arg-type]
            if all(whole) and not any(map(str.isspace, whole)):
                return whole, np.arange(len(whole), dtype=np.int64)
        texts: list[str] = []
        owners: list[int] = []
        for number, value in enumerate(values):
            pieces = [value] if isinstance(value, str) else value
            if self.split_sentences is not None:
                pieces = [sentence for text in pieces for sentence in self.split_sentences(text)]
            for text in pieces:
                if text and not text.isspace():
                    texts.append(text)
                    owners.append(number)
        return texts, np.array(owners, np.int64)

    def _framed(
        self, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Ids of the right type, with what begins and ends a document, and the lengths of its sequences."""
        if ids.size and int(ids.max()) > np.iinfo(np.dtype(self.dtype)).max:
            raise OverflowError(f"token id {ids.max()} does not fit {np.dtype(self.dtype).name}")
        if not (self.prefix or self.eod is not None) or not len(counts):
            return ids.astype(self.dtype, copy=False), lengths
        last = np.cumsum(counts) - 1  # [m] last sequence of each document
        first = last - counts + 1
        ends = np.cumsum(lengths)
        before, after = len(self.prefix), int(self.eod is not None)
        starts_of_document = ends[first] - lengths[first]
        shift = np.arange(len(counts)) * (before + after)
        tokens = np.empty(len(ids) + len(counts) * (before + after), self.dtype)
        own = np.ones(len(tokens), np.bool_)
        for place, token in enumerate(self.prefix):
            own[starts_of_document + shift + place] = False
            tokens[starts_of_document + shift + place] = token
        if self.eod is not None:
            own[ends[last] + shift + before] = False
            tokens[ends[last] + shift + before] = self.eod
        tokens[own] = ids
        lengths = lengths.copy()
        lengths[first] += before
        lengths[last] += after
        return tokens, lengths

    def _difference(self, block: Block, values: Sequence[str | list[str]]) -> str | None:
        """Compare the ids of a piece of one text with the reference's, in some of the blocks."""
        number = block.start // max(1, block.stop - block.start) if block.data is None else block.start
        if self.reference is None or not values or number % _CHECKED_BLOCKS:
            return None
        value = values[number % len(values)]
        text = value if isinstance(value, str) else "".join(value[:1])
        return first_difference(self.encode, self.reference, [text[:_CHECKED_CHARACTERS]])


def documents_on_lines(
    lines: Sequence[bytes], keys: Sequence[str]
) -> tuple[Sequence[int], list[list[Any]], list[tuple[int, str]]]:
    """What lines of JSON hold under some keys.

    Args:
        lines: without line ends.
        keys: the values of ``--json-keys``.

    Returns:
        [m] the place among ``lines`` of each that can be used; for each key [m] its string or list of
        strings; and the place of each that cannot be used, with the reason. Blank lines are in neither.
    """
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        # Nearly always every line is as it should be; then no time is spent on looking at each.
        records = [orjson.loads(line) for line in lines]
        columns: list[list[Any]] = [[record[key] for record in records] for key in keys]
        if all(set(map(type, column)) <= {str} for column in columns):
            return range(len(lines)), columns, []
    numbers, bad = [], []
    columns = [[] for _ in keys]
    for number, line in enumerate(lines):
        try:
            texts = texts_on_line(line, keys)
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        if texts is not None:
            numbers.append(number)
            for each, found in zip(columns, texts, strict=True):
                each.append(found)
    return numbers, columns, bad


def sample_texts(stretches: Sequence[Stretch], keys: Sequence[str]) -> list[str]:
    """Pieces of some texts from all over the input, the same for the same input.

    Args:
        stretches: the whole input.
        keys: the values of ``--json-keys``.

    Raises:
        ValueError: for a file that is damaged or cut off.
        OSError: for a file that cannot be read.
    """
    count = min(len(stretches), _SAMPLED_BLOCKS)
    each = -(-_SAMPLED_BLOCKS // max(1, count))
    texts: list[str] = []
    for place in range(count):
        for block in sample_blocks(stretches[place * len(stretches) // count], keys, each):
            _, columns, _ = documents_on_lines(lines_of(block), keys)
            for column in columns:
                for value in column[:: max(1, len(column) // _SAMPLED_TEXTS)][:_SAMPLED_TEXTS]:
                    pieces = [value] if isinstance(value, str) else value[:_SAMPLED_TEXTS]
                    texts += [piece[:_SAMPLED_CHARACTERS] for piece in pieces]
    return texts
