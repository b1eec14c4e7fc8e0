"""Made-up tokens with the interface of an indexed dataset, for runs that need no data."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

MOCK_SEQUENCES: Final = 100_000
MOCK_LONGEST: Final = 4096


class MockIndexedDataset:
    """100,000 sequences that count upwards: 1, 2, 3 … modulo the vocabulary, and end-of-document at the end.

    Args:
        vocab_size: true size of the vocabulary.
        eod: id of end-of-document; the last of the vocabulary if None.
    """

    prefix = "mock data"

    def __init__(self, vocab_size: int, eod: int | None) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        generator = np.random.default_rng(0)
        self.sequence_lengths: npt.NDArray[np.int32] = generator.integers(
            1, MOCK_LONGEST, size=MOCK_SEQUENCES, dtype=np.int32
        )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def count_tokens(self, start: int, stop: int) -> int:
        """Number of tokens in sequences ``start`` to ``stop``."""
        return int(self.sequence_lengths[start:stop].sum(dtype=np.int64))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence, or of a part of it: [length] int64."""
        whole = int(self.sequence_lengths[index])
        stop = whole if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == whole and len(tokens):
            tokens[-1] = self.eod
        return tokens

    def identity(self) -> dict[str, Any]:
        """What tells this data from any other."""
        return {"path": self.prefix, "vocab_size": self.vocab_size, "eod": self.eod}

    def verify(self) -> None:
        """There is nothing to be checked."""
