"""Which tokens of a BERT sample are to be predicted, and what the model sees in their place.

Whole words are masked, in runs of one to three (Joshi et al. 2019, SpanBERT, section 3.1; Lan et al. 2019,
ALBERT, section 4.1). Of their tokens 80% are replaced by the mask, 10% by a random token, and 10% stay
(Devlin et al. 2018, section 3.1).
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MASKED_SHARE = 0.8
"""Of the tokens to predict, those that are replaced by the mask."""
KEPT_SHARE = 0.5
"""Of the others, those that stay as they are."""


@dataclass(frozen=True)
class WordMasking:
    """How words are chosen and hidden.

    Attributes:
        vocab_size: v; a random token is one of 0..v-1.
        cls: id that begins a sample, never to be predicted.
        sep: id that ends a segment, never to be predicted.
        mask: id that hides a token.
        continues_word: [v] bool, True for a piece that goes on with the word before it; None makes each piece
            a word of its own.
        mask_prob: share of tokens to predict.
        max_ngram: longest run of words that is chosen at once; runs of n are 1/n as likely as single words.
    """

    vocab_size: int
    cls: int
    sep: int
    mask: int
    continues_word: npt.NDArray[np.bool_] | None = field(default=None, repr=False, compare=False)
    mask_prob: float = 0.15
    max_ngram: int = 3

    def __post_init__(self) -> None:
        for name in ("cls", "sep", "mask"):
            token = getattr(self, name)
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"the tokenizer's {name} id {token} is not in 0 to {self.vocab_size - 1}")
        continues = self.continues_word
        if continues is not None and continues.shape != (self.vocab_size,):
            raise ValueError(
                f"the tokenizer says of {len(continues)} ids whether they continue a word, but has "
                f"{self.vocab_size}"
            )

    def apply(
        self, tokens: npt.NDArray[np.int64], target: int, generator: np.random.RandomState
    ) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Choose tokens to predict, and hide them.

        Args:
            tokens: [t] a sample without padding.
            target: tokens that the sample aimed at, special ones not counted; it limits the number chosen.
            generator: moves on.

        Returns:
            The tokens with the chosen ones hidden, [t]; and the places of those, in the order of choice.
        """
        # Fractional if the target sets it, and below 1 for the shortest: then no token is chosen.
        limit = min(self.mask_prob * target, max(1, round(len(tokens) * self.mask_prob)))
        places, bounds = self._words(tokens)
        order = np.arange(len(bounds) - 1)
        generator.shuffle(order)
        likely = self._length_distribution()
        draw = generator.random_sample
        chosen: list[int] = []
        taken = bytearray(len(places))
        masked = tokens.copy()
        for word in order.tolist():
            if len(chosen) >= limit:
                break
            start = bounds[word]
            # A run ends with the sample, and is shortened word by word until it fits.
            following = bounds[word + 1 : word + 2 + bisect_right(likely, draw())]
            stop = next((stop for stop in reversed(following) if len(chosen) + stop - start <= limit), None)
            if stop is None or taken.find(1, start, stop) >= 0:
                continue
            taken[start:stop] = b"\1" * (stop - start)
            for place in places[start:stop]:
                chosen.append(place)
                if draw() < MASKED_SHARE:
                    masked[place] = self.mask
                elif draw() >= KEPT_SHARE:
                    masked[place] = generator.randint(0, self.vocab_size)
        return masked, chosen

    def _words(self, tokens: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Places of the tokens that may be chosen, [c]; where in it each word begins, and c at the end."""
        places = np.flatnonzero((tokens != self.cls) & (tokens != self.sep))
        if self.continues_word is None or len(places) == 0:
            return places.tolist(), list(range(len(places) + 1))
        begins = ~self.continues_word[tokens[places]]
        begins[0] = True  # a word whose beginning was cut off
        return places.tolist(), [*np.flatnonzero(begins).tolist(), len(places)]

    def _length_distribution(self) -> list[float]:
        """Cumulative probability of runs of 1, 2, … words, computed as NumPy's ``choice`` does."""
        shares = 1.0 / (np.arange(self.max_ngram) + 1)
        shares /= shares.sum()
        shares /= shares.sum()
        cumulative = shares.cumsum()
        return list((cumulative / cumulative[-1]).tolist())
