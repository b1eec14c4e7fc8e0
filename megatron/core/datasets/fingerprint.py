"""Tell by few reads whether two datasets hold the same, wherever they lie and whenever they were written."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.gpt_dataset import SequenceSource
from megatron.core.datasets.indexed_dataset import IndexedDataset

BLOCKS: Final = 32
"""Blocks that are read of each array: the first, the last, and others spread evenly between."""
BLOCK: Final = 4096
"""Entries of a block."""


def content_digest(source: SequenceSource, *, documents: bool = False) -> str:
    """Hash of what a dataset holds, 32 hexadecimal digits.

    It covers the token type, the numbers of sequences, documents and tokens, and 32 blocks of 4,096 entries
    each of the sequence lengths and of the tokens: all of them up to 131,072. Of a larger file what lies
    between the blocks is not seen, unless it changes a number or moves what comes after it: a token written
    over in place, say. A corpus made anew, shuffled, or by another tokenizer changes blocks too.

    Args:
        source: the dataset.
        documents: cover also which sequences make a document.
    """
    if not isinstance(source, IndexedDataset):
        return value_digest(source.identity())
    sizes = [source.dtype.name, source.num_sequences, source.num_tokens]
    found = hashlib.blake2b(json.dumps(sizes).encode(), digest_size=16)
    for start, stop in _blocks(source.num_sequences):
        found.update(source.sequence_lengths[start:stop].tobytes())
    for start, stop in _blocks(source.num_tokens):
        found.update(source.tokens(start, stop - start).tobytes())
    if documents:
        for start, stop in _blocks(len(source.document_indices)):
            found.update(source.document_indices[start:stop].tobytes())
    return found.hexdigest()


def value_digest(value: Any) -> str:
    """Hash of a JSON value, 32 hexadecimal digits, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def array_digest(array: npt.NDArray[Any]) -> str:
    """Hash of an array's type, shape and entries, 32 hexadecimal digits."""
    found = hashlib.blake2b(json.dumps([array.dtype.str, array.shape]).encode(), digest_size=16)
    found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Where the blocks of so many entries start and stop: all entries, where the blocks hold them."""
    if count <= BLOCKS * BLOCK:
        yield 0, count
        return
    for number in range(BLOCKS):
        start = number * (count - BLOCK) // (BLOCKS - 1)
        yield start, start + BLOCK
