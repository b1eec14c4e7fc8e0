"""Cut the shuffled documents of a split into samples of equal length: the three GPT index arrays.

Documents are laid end to end in a shuffled order, epoch after epoch, and cut every ``seq_length`` tokens. A
sample holds one token more than that: its last token is the label of the one before, and the first input of
the next sample, so that over an epoch every adjacent pair of tokens is predicted once. What is left at the
end and is shorter than a sample is dropped, or kept where that is asked for.

The arrays equal those of other systems of the Megatron family for the same data, length, number of samples
and seed; the shuffles come from NumPy's legacy generator, which is frozen for good.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.legacy_shuffle import shuffle

CHUNK: Final = 1 << 18
"""Documents, and samples, that are worked on at a time; bounds the memory beside the arrays themselves."""
INT32_MAX: Final = 2**31 - 1
MIXED_EPOCH_SHARE: Final = 0.80
"""A last epoch of which less than this share is needed is shuffled by itself, after the others."""

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
"""Makes the array of a name, shape and type; may map a file."""


def allocate_in_memory(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An :data:`Allocate` that maps no file."""
    return np.empty(shape, dtype)


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents of a split are gone through.

    Attributes:
        tokens: tokens in one epoch.
        epochs: number of epochs.
        samples: samples in all epochs together; may be more than were asked for.
        samples_before_last: samples that need no token of the last epoch.
        separate_last: the last epoch is shuffled by itself.
    """

    tokens: int
    epochs: int
    samples: int
    samples_before_last: int
    separate_last: bool


def samples_per_epoch(tokens: int, seq_length: int) -> int:
    """Samples that one epoch of so many tokens holds."""
    return max(tokens - 1, 0) // seq_length


def plan_epochs(
    tokens: int, seq_length: int, num_samples: int | None, *, keep_partial: bool = False
) -> EpochPlan:
    """The fewest epochs that hold ``num_samples`` samples, or one epoch if that is None.

    Args:
        tokens: in one epoch.
        seq_length: tokens that a sample predicts.
        num_samples: how many are asked for.
        keep_partial: what is left at the end is a sample too, shorter than the others. It does not count
            towards the samples that are asked for.

    Raises:
        ValueError: if an epoch has fewer tokens than a sample; a partial one has at least 2.
    """
    if keep_partial and tokens < 2:
        raise ValueError(f"{tokens} tokens, but a sample takes 2 or more")
    if tokens < seq_length + 1 and not keep_partial:
        raise ValueError(f"{tokens} tokens, but one sample takes --seq-length {seq_length} + 1 tokens")
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    before_last, separate = 0, False
    if num_samples is not None and epochs > 1:
        before_last = ((epochs - 1) * tokens - 1) // seq_length
        from_last = num_samples - before_last
        whole = samples_per_epoch(tokens, seq_length)
        assert 0 <= from_last <= whole + 1, (tokens, seq_length, num_samples)
        separate = from_last < int(MIXED_EPOCH_SHARE * whole)
    samples = (epochs * tokens - 1) // seq_length
    if keep_partial:
        samples = -((1 - epochs * tokens) // seq_length)  # the quotient rounded up, in whole numbers
    return EpochPlan(tokens, epochs, samples, before_last, separate)


def build_gpt_indices(
    lengths: npt.NDArray[np.int32],
    plan: EpochPlan,
    *,
    first_sequence: int,
    seq_length: int,
    seed: int,
    allocate: Allocate = allocate_in_memory,
    limit: int = INT32_MAX,
) -> dict[str, npt.NDArray[Any]]:
    """The document, sample and shuffle index of one split.

    Args:
        lengths: [n] tokens in each sequence of the split.
        plan: what :func:`plan_epochs` says for their sum.
        first_sequence: number, in the whole dataset, of the split's first sequence.
        seq_length: tokens that a sample predicts.
        seed: of the shuffles.
        allocate: makes the array for the sample index, the largest of them.
        limit: largest value that an index may hold in 32 bits.

    Returns:
        ``document_index`` [epochs * n], sequence numbers in the order in which they are laid end to end;
        ``sample_index`` [samples + 1, 2], for the start of each sample the position in the document index and
        the token inside that sequence; ``shuffle_index`` [samples], the sample to give at each place. Where a
        partial sample is kept, the last row is the last token.

        Memory beside the arrays that ``allocate`` maps: 4 bytes for each sequence, and for each entry of the
        document and the shuffle index (8 beyond 2^31 and 2^32).

    Raises:
        ValueError: if a length is negative.
    """
    # The file's array isn't aligned in memory, for which NumPy would copy it at every look-up.
    lengths = np.require(lengths, requirements="A")
    if len(lengths) and lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"sequence {first_sequence + at} has the negative length {lengths[at]}")
    generator = np.random.RandomState(seed)
    documents = _document_index(len(lengths), plan, first_sequence, generator, limit)
    wide = max(len(documents), int(lengths.max())) > limit
    samples = allocate("sample_index", (plan.samples + 1, 2), np.int64 if wide else np.int32)
    _fill_sample_index(samples, lengths, documents, first_sequence, plan.epochs * plan.tokens, seq_length)
    order = _shuffle_index(plan, generator)
    return {"document_index": documents, "sample_index": samples, "shuffle_index": order}


def _document_index(
    count: int, plan: EpochPlan, first: int, generator: np.random.RandomState, limit: int
) -> npt.NDArray[Any]:
    dtype = np.int64 if first + count - 1 > limit else np.int32
    once = np.arange(first, first + count, dtype=dtype)
    if not plan.separate_last:
        documents = np.tile(once, plan.epochs)
        shuffle(generator, documents)
        return documents
    documents = np.tile(once, plan.epochs)
    shuffle(generator, documents[:-count])
    shuffle(generator, documents[-count:])
    return documents


def _fill_sample_index(
    samples: npt.NDArray[Any],
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[Any],
    first: int,
    total: int,
    seq_length: int,
) -> None:
    """Fill row k with the place of token ``k * seq_length`` of the documents laid end to end.

    Only the row after a partial sample would lie beyond the last token, ``total - 1``; it is that token.
    """
    row, base = 0, 0
    for start in range(0, len(documents), CHUNK):
        chunk = documents[start : start + CHUNK]
        chunk_lengths = lengths.take(chunk - first if first else chunk)
        # All token positions in 64 bits: over the epochs they pass 2^31 long before anything else does.
        ends = np.cumsum(chunk_lengths, dtype=np.int64)
        ends += base
        base = int(ends[-1])
        stop_row = len(samples) if base == total else min(len(samples), -(-base // seq_length))
        while row < stop_row:
            stop = min(stop_row, row + CHUNK)
            tokens = np.arange(row, stop, dtype=np.int64) * seq_length
            tokens[-1] = min(tokens[-1], total - 1)
            inside = np.searchsorted(ends, tokens, side="right")  # passes over empty sequences
            samples[row:stop, 0] = inside + start
            samples[row:stop, 1] = tokens - ends[inside] + chunk_lengths[inside]
            row = stop
    assert row == len(samples)
    samples[0] = 0  # an empty sequence at the very start isn't passed over


def _shuffle_index(plan: EpochPlan, generator: np.random.RandomState) -> npt.NDArray[Any]:
    order = np.arange(plan.samples, dtype=np.uint32 if plan.samples < 2**32 - 2 else np.int64)
    if plan.separate_last:
        shuffle(generator, order[: plan.samples_before_last])
        shuffle(generator, order[plan.samples_before_last :])
    else:
        shuffle(generator, order)
    return order
