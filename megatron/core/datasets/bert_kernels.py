"""The two loops of the BERT sample mapping that follow a random stream step by step, compiled by numba."""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.mersenne import (
    WORDS_32,
    WORDS_64,
    compiled,
    draw_32,
    draw_64,
)


@compiled
def find_usable(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    limits: tuple[int, int],
    usable: npt.NDArray[np.bool_],
) -> tuple[int, int, int]:
    """Mark the documents that give samples.

    Args:
        documents: [d + 1] sentences before each document.
        lengths: tokens in each sentence of the whole dataset.
        limits: fewest sentences of a usable document, and most tokens of a sentence if there are several.
        usable: [d], filled.

    Returns:
        How many documents are empty, have too few sentences though not none, and have a sentence that is too
        long.
    """
    min_sentences, longest_sentence = limits
    empty, short, long = 0, 0, 0
    for document in range(len(documents) - 1):
        first, last = documents[document], documents[document + 1]
        if last == first:
            empty += 1
        elif last - first < min_sentences:
            short += 1
        else:
            fits = True
            if last - first > 1:
                for sentence in range(first, last):
                    fits &= lengths[sentence] <= longest_sentence
            usable[document] = fits
            long += not fits
            continue
        usable[document] = False
    return empty, short, long


@compiled
def _sample_end(lengths: npt.NDArray[np.int32], first: int, last: int, min_sentences: int, aim: int) -> int:
    """Where a sample ends that begins with sentence ``first`` of a document that ends before ``last``."""
    end = min(first + min_sentences, last)
    tokens = 0
    for sentence in range(first, end):
        tokens += lengths[sentence]
    while end < last - 1 and tokens < aim:
        tokens += lengths[end]
        end += 1
    # A single sentence is never left over for a sample of its own.
    return end if end < last - 1 else last


@compiled
def cut_documents(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    usable: npt.NDArray[np.bool_],
    min_sentences: int,
    target: tuple[int, int],
    state: npt.NDArray[np.uint32],
    until: tuple[int, int],
    rows: npt.NDArray[Any],
) -> tuple[int, int]:
    """Cut the usable documents into samples of consecutive sentences, epoch after epoch.

    Args:
        documents: [d + 1] sentences before each document.
        lengths: tokens in each sentence of the whole dataset.
        usable: [d] the documents that give samples, at least one.
        min_sentences: fewest sentences of a sample.
        target: longest sample in tokens; one sample in how many is to be shorter, 0 for none.
        state: [624] of the 32-bit twister that decides which are, and how short; changed.
        until: samples after which no new epoch is begun, and epochs after which none is.
        rows: [n, 3] filled with the first sentence, the one after the last, and the tokens aimed at; with
            n = 0 samples are only counted.

    Returns:
        Number of samples, and of epochs.
    """
    max_length, ratio = target
    max_samples, max_epochs = until
    draws = np.empty(WORDS_32, np.uint32)
    place = WORDS_32
    fill = len(rows) > 0
    count, epoch = 0, 0
    while epoch < max_epochs and count < max_samples:
        for document in range(len(usable)):
            if not usable[document]:
                continue
            first, last = documents[document], documents[document + 1]
            while True:
                aim = max_length
                if ratio > 0:
                    if place == WORDS_32:
                        draw_32(state, draws)
                        place = 0
                    drawn = int(draws[place])
                    place += 1
                    if drawn % ratio == 0:
                        aim = 2 + drawn % (max_length - 1)
                if first == last:  # a number is drawn even after the last sample of a document
                    break
                end = _sample_end(lengths, first, last, min_sentences, aim)
                if fill:
                    rows[count, 0], rows[count, 1], rows[count, 2] = first, end, aim
                count += 1
                first = end
        epoch += 1
    return count, epoch


@compiled
def shuffle_rows(rows: npt.NDArray[Any], state: npt.NDArray[np.uint64]) -> None:
    """Shuffle rows in place, from the last to the first.

    Args:
        rows: [n, 3].
        state: [312] of the 64-bit twister that says which change places; changed.
    """
    draws = np.empty(WORDS_64, np.uint64)
    place = WORDS_64
    for i in range(len(rows) - 1, 0, -1):
        if place == WORDS_64:
            draw_64(state, draws)
            place = 0
        j = np.int64(draws[place] % np.uint64(i + 1))
        place += 1
        for column in range(3):
            rows[i, column], rows[j, column] = rows[j, column], rows[i, column]
