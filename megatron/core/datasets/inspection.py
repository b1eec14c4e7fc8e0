"""Look for faults of a dataset that opening it does not find, and for differences between two."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import CHUNK, map_index
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.statistics import document_ends, token_chunks


@dataclass(frozen=True)
class DocumentEnds:
    """Where the end-of-document token stands."""

    documents: int
    """Documents with a token at least."""
    ended: int
    """Those whose last token it is."""
    inside: int
    """How often it stands anywhere else."""


def locate(dataset: IndexedDataset, token: int) -> str:
    """In words, where one of all tokens laid end to end lies; all numbers count from 0."""
    offsets = map_index(Path(f"{dataset.prefix}.idx")).offsets
    # A bisection by key, since NumPy's own copies an array that is mapped from the file.
    byte, sequences = token * dataset.dtype.itemsize, range(len(dataset))
    sequence = bisect_right(sequences, byte, key=offsets.item) - 1
    documents = range(dataset.num_documents)
    document = bisect_right(documents, sequence, key=dataset.document_indices.item) - 1
    place = token - offsets.item(sequence) // dataset.dtype.itemsize
    return f"token {token} (token {place} of sequence {sequence}, in document {document})"


def check_tokens(
    dataset: IndexedDataset, vocab_size: int | None, eod: int | None, advance: Callable[[int], None]
) -> DocumentEnds | None:
    """Check that each token is one of a vocabulary, or where that is not known, not negative.

    Args:
        dataset: one whose index is sound.
        vocab_size: one more than the largest id.
        eod: id of end-of-document, which is counted.
        advance: called with the number of bytes read since the last call.

    Returns:
        Where ``eod`` stands, if it was given.

    Raises:
        ValueError: for the first token that can't be right, saying where it lies.
    """
    if dataset.dtype.kind == "f":
        raise ValueError(f"{dataset.prefix}: holds {dataset.dtype.name} numbers, which are no tokens")
    everywhere = 0
    for start, chunk in token_chunks(dataset, advance):
        if chunk.min() < 0 or (vocab_size is not None and int(chunk.max()) >= vocab_size):
            outside = chunk < 0
            if vocab_size is not None:
                outside |= chunk >= vocab_size
            at = int(np.argmax(outside))
            known = "a token is never negative" if vocab_size is None else f"the vocabulary has {vocab_size}"
            raise ValueError(
                f"{dataset.prefix}.bin: {locate(dataset, start + at)} is {chunk[at]}, but {known}; was the "
                "data made with this tokenizer?"
            )
        if eod is not None:
            everywhere += int(np.count_nonzero(chunk == eod))
    return None if eod is None else _document_ends(dataset, eod, everywhere)


def _document_ends(dataset: IndexedDataset, eod: int, everywhere: int) -> DocumentEnds:
    documents = ended = 0
    for ends in document_ends(dataset):
        lasts = ends[1:][np.diff(ends) > 0] - 1
        documents += len(lasts)
        if len(lasts):
            first = int(lasts[0])
            mapped = dataset.tokens(first, int(lasts[-1]) + 1 - first)
            ended += int(np.count_nonzero(mapped[lasts - first] == eod))
    return DocumentEnds(documents, ended, everywhere - ended)


def first_difference(
    one: IndexedDataset, other: IndexedDataset, advance: Callable[[int], None]
) -> str | None:
    """In words the first difference of two datasets, in the order of their files; None if they are equal.

    Args:
        one: a dataset whose index is sound.
        other: another.
        advance: called with the number of bytes of ``one`` that were compared since the last call.
    """
    fields = [map_index(Path(f"{dataset.prefix}.idx")) for dataset in (one, other)]
    counts: dict[str, tuple[object, object]] = {
        "token type": (one.dtype.name, other.dtype.name),
        "number of sequences": (len(one), len(other)),
        "number of documents": (one.num_documents, other.num_documents),
        "number of modes": (len(fields[0].modes), len(fields[1].modes)),
    }
    for name, (here, there) in counts.items():
        if here != there:
            return _difference(name, one, here, other, there)
    for name, arrays in (
        ("length of sequence", [found.lengths for found in fields]),
        ("sequences before document", [found.documents for found in fields]),
        ("mode of sequence", [found.modes for found in fields]),
    ):
        for start in range(0, len(arrays[0]), CHUNK):
            parts = [array[start : start + CHUNK] for array in arrays]
            if (at := _first_unequal(*parts)) is not None:
                return _difference(f"{name} {start + at}", one, parts[0][at], other, parts[1][at])
    for start, chunk in token_chunks(one, advance):
        theirs = other.tokens(start, len(chunk))
        if (at := _first_unequal(chunk, theirs)) is not None:
            return _difference(locate(one, start + at), one, chunk[at], other, theirs[at])
    return None


def _first_unequal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int | None:
    unequal = one != other
    return int(np.argmax(unequal)) if unequal.any() else None


def _difference(what: str, one: IndexedDataset, here: object, other: IndexedDataset, there: object) -> str:
    return f"{what}: {here} in {one.prefix}, {there} in {other.prefix}"
