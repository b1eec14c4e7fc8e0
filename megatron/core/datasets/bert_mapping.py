"""Which sentences make which BERT sample: documents cut into runs of sentences, epoch after epoch, shuffled.

A sample is a run of consecutive sentences of one document, of about the tokens aimed at: most aim at the
longest that fits, a share of them at a random shorter length (Devlin et al. 2018, appendix A.2). A document
gives all its sentences in each epoch, and an epoch is always finished.

The array equals that of other systems of the Megatron family for the same data, length, number of samples and
seed. What aims shorter follows the 32-bit Mersenne twister, and the shuffle its 64-bit sister.
"""

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.gpt_indices import Allocate, allocate_in_memory

LARGEST_EPOCHS: Final = 2**31 - 2
LARGEST_UINT32: Final = 2**32 - 1


LONGEST_SENTENCE: Final = 512
"""A document of several sentences, one of them of more tokens than this, is left out."""


class NoUsableDocumentError(ValueError):
    """A split has no document that gives a sample."""


class MappingCounts(NamedTuple):
    """What became of the documents."""

    documents: int
    """All documents of the split."""
    empty: int
    """Left out: without sentences."""
    short: int
    """Left out: too few sentences, though not none."""
    long: int
    """Left out: several sentences, one of them of more tokens than the mapping takes."""
    epochs: int
    """How often the others were gone through."""

    @property
    def skipped(self) -> int:
        """Documents that give no sample."""
        return self.empty + self.short + self.long

    @property
    def usable(self) -> int:
        """Documents that give samples."""
        return self.documents - self.skipped


def build_bert_mapping(
    document_indices: npt.NDArray[np.int64],
    sequence_lengths: npt.NDArray[np.int32],
    *,
    num_samples: int | None,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
    allocate: Allocate = allocate_in_memory,
) -> dict[str, npt.NDArray[Any]]:
    """The samples of one split, in the order in which they are given.

    It goes through the documents twice, to count and to fill, and takes a byte a document beside its result.

    Args:
        document_indices: [d + 1] sentences of the dataset before each document of the split, and after the
            last.
        sequence_lengths: tokens in each sentence of the whole dataset.
        num_samples: fewest samples; whole epochs are laid out until there are as many. One epoch if None.
        max_seq_length: longest sample in tokens, special ones not counted; at least 2.
        short_seq_prob: share of samples that aim at fewer tokens.
        seed: of the shorter lengths, and of the shuffle.
        min_sentences: fewest sentences of a sample: 2 for pairs, else 1.
        allocate: makes the array of samples.

    Returns:
        ``sample_index`` [n, 3], uint32 (uint64 if the dataset has more sentences than that holds): first
        sentence, the one after the last, tokens aimed at. ``counts`` [5] int64, a :class:`MappingCounts`.

    Raises:
        NoUsableDocumentError: if no document gives a sample.
    """
    assert max_seq_length >= 2, max_seq_length
    # Numba takes a second to import: only who builds a mapping shall wait for it.
    from megatron.core.datasets import bert_kernels, mersenne

    documents = len(document_indices) - 1
    usable = np.empty(documents, np.bool_)
    skipped = bert_kernels.find_usable(
        document_indices, sequence_lengths, (min_sentences, LONGEST_SENTENCE), usable
    )
    counts = MappingCounts(documents, *skipped, epochs=0)
    if counts.usable == 0:
        raise NoUsableDocumentError(_none_usable(counts))

    until = (1, 1) if num_samples is None else (num_samples, LARGEST_EPOCHS)
    target = (max_seq_length, _one_in(short_seq_prob))
    dtype = np.uint32 if len(sequence_lengths) <= LARGEST_UINT32 else np.uint64

    def cut(rows: npt.NDArray[Any]) -> tuple[int, int]:
        return bert_kernels.cut_documents(
            document_indices,
            sequence_lengths,
            usable,
            min_sentences,
            target,
            mersenne.seed_32(seed),
            until,
            rows,
        )

    samples, epochs = cut(np.empty((0, 3), dtype))
    rows = allocate("sample_index", (samples, 3), dtype)
    # A view without the file behind it: the compiler knows plain arrays only.
    plain = rows.view(np.ndarray)
    cut(plain)
    bert_kernels.shuffle_rows(plain, mersenne.seed_64(seed + 1))
    return {"sample_index": rows, "counts": np.array(counts._replace(epochs=epochs), np.int64)}


def _one_in(probability: float) -> int:
    """One in how many has this probability, halves rounded up as C does; 0 if none."""
    return min(math.floor(1 / probability + 0.5), 2**31 - 1) if probability > 0 else 0


def _none_usable(counts: MappingCounts) -> str:
    found = (
        f"none of its {counts.documents} documents gives a sample: {counts.empty} are empty, {counts.short} "
        f"have one sentence where a pair takes two, {counts.long} have a sentence of more than "
        f"{LONGEST_SENTENCE} tokens"
    )
    if counts.documents == 0:
        return "it has no documents; give it more data or a larger share of --split"
    if counts.short:
        return (
            f"{found}; --bert-no-binary-head trains on single sentences, and preprocess_data.py "
            "--split-sentences divides documents into sentences"
        )
    return f"{found}; preprocess_data.py --split-sentences divides documents into sentences"
