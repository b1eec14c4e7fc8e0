"""Put datasets together: the documents of one after those of another, the same bytes as written at once."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from megatron.core.datasets.index_format import map_index
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

_KINDS: Final = ("document", "sentence")


@dataclass(frozen=True)
class MergeInput:
    """One dataset to be merged, looked at but not read."""

    prefix: str
    dtype: str
    """Name of the type of a token."""
    num_bytes: int
    """Size of its ``.bin``."""


@dataclass(frozen=True)
class MergedCounts:
    """What a merged dataset holds."""

    documents: int
    sequences: int
    tokens: int


class _CountedReads(IndexedDataset):
    """A dataset that says of each block of tokens how many bytes were read.

    It reads the file and does not map it, so that memory shows what the work needs.
    """

    def __init__(self, prefix: str, advance: Callable[[int], None]) -> None:
        super().__init__(prefix, mmap=False)
        self._advance = advance

    def tokens(self, start: int, count: int) -> npt.NDArray[Any]:
        found = super().tokens(start, count)
        self._advance(found.nbytes)
        return found


def prefixes_in(folder: str | os.PathLike[str]) -> list[str]:
    """Prefixes of all datasets of a folder, sorted by name; other files in it do not matter.

    Raises:
        ValueError: if it is no folder, holds no dataset, or half of one.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path}: {'is no folder' if path.exists() else 'there is no such folder'}")
    names = {
        suffix: {file.stem for file in path.iterdir() if file.suffix == suffix and file.is_file()}
        for suffix in (".bin", ".idx")
    }
    halves = names[".bin"] ^ names[".idx"]
    if halves:
        name = min(halves)
        there, missing = (".bin", ".idx") if name in names[".bin"] else (".idx", ".bin")
        raise ValueError(
            f"{path / name}{there} is there without {name}{missing}: the dataset is incomplete; finish it or "
            "remove it first"
        )
    if not names[".bin"]:
        raise ValueError(f"{path}: holds no dataset, no pair of .bin and .idx")
    return [str(path / name) for name in sorted(names[".bin"])]


def check_merge(prefixes: Sequence[str], output: str) -> list[MergeInput]:
    """Check that some datasets can be merged, at a cost that does not grow with them.

    Args:
        prefixes: of the datasets, in the order in which their documents will come.
        output: prefix of the merged dataset.

    Raises:
        ValueError: if a dataset is missing or damaged, two do not fit together, or the output is an input.
    """
    if not Path(output).name or Path(output).is_dir():
        raise ValueError(f"the output prefix {output!r} is a folder: add the beginning of a file name to it")
    inputs = [_look_at(prefix) for prefix in prefixes]
    if mixed := _two_kinds({one.prefix: one.dtype for one in inputs}):
        raise ValueError(
            "{} holds {} tokens and {} {}: a dataset has one type of token; make all of them with one "
            "tokenizer and one --vocab-size, which decide the type".format(*mixed)
        )
    if mixed := _two_kinds({prefix: kind for prefix in prefixes if (kind := _kind(prefix))}):
        raise ValueError(
            "{} has a sequence for each {}, {} for each {}: merge each kind by itself".format(*mixed)
        )
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            if os.path.exists(output + suffix) and os.path.samefile(output + suffix, prefix + suffix):
                raise ValueError(
                    f"the output {output}{suffix} is among the inputs; give another output prefix, or move "
                    "it away if it is an earlier result"
                )
    return inputs


def _look_at(prefix: str) -> MergeInput:
    dataset = IndexedDataset(prefix)
    modes = len(map_index(Path(f"{prefix}.idx")).modes)
    if modes:
        raise ValueError(
            f"{prefix}.idx: holds a mode for each of {modes} sequences, as for several modalities; only text "
            "datasets can be merged"
        )
    return MergeInput(prefix, dataset.dtype.name, dataset.num_tokens * dataset.dtype.itemsize)


def _two_kinds(kinds: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    """The first prefix and its kind, and the first of another kind; None if all are of one."""
    first = next(iter(kinds.items()), ("", ""))
    others = [item for item in kinds.items() if item[1] != first[1]]
    return (*first, *others[0]) if others else None


def _kind(prefix: str) -> str:
    """What the sequences of a dataset are, by its name; empty if that does not say."""
    return next((kind for kind in _KINDS if prefix.endswith(f"_{kind}")), "")


def merge_datasets(inputs: Sequence[MergeInput], output: str, advance: Callable[[int], None]) -> MergedCounts:
    """Write a dataset of all documents of others; it is complete, or not there.

    Memory: 4 bytes a sequence and 8 bytes a document, and one block of tokens.

    Args:
        inputs: what :func:`check_merge` gave.
        output: prefix of the merged dataset, in a folder that exists.
        advance: called with the bytes of tokens that were copied since the last call.

    Raises:
        ValueError: if an index is damaged.
        OSError: if the files can't be written.
    """
    tokens = 0
    with IndexedDatasetBuilder(output, inputs[0].dtype) as builder:
        for one in inputs:
            dataset = _CountedReads(one.prefix, advance)
            builder.add_dataset(dataset)
            tokens += dataset.num_tokens
        return MergedCounts(builder.num_documents, builder.num_sequences, tokens)
