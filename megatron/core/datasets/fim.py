"""Fill in the middle (Bavarian et al. 2022, https://arxiv.org/abs/2207.14255): text with its middle put last.

A document is turned back into text and cut at two places between characters into prefix, middle and suffix,
which are tokenized again, each by itself. What the model reads is one of

- prefix-token, prefix, suffix-token, suffix, middle-token, middle (PSM);
- prefix-token, suffix-token, suffix, middle-token, prefix, middle (SPM; the paper's second variant).

Whether a document is rearranged, where it is cut and in which order it comes depends on the seed and the
number of the sample alone: not on which samples were read before, so a run that resumes, or is laid out
otherwise, sees the same text.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.config.fim import FimConfig

Ids = npt.NDArray[np.int64]

_BROKEN: Final = "\ufffd"
"""What a decoder gives for bytes that are no character, as where a sample begins inside one."""
_PROBE: Final = "one and two, then three"
"""A text to see whether a tokenizer's pieces can be put together again."""


class TextTokenizer(Protocol):
    """What of a tokenizer is needed."""

    name: str
    source: str
    vocab_size: int
    eos: int | None
    prefix: tuple[int, ...]
    identity: dict[str, Any]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after ``prefix``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids."""


class FillInTheMiddle:
    """Rearranges the documents of samples; a ``transform`` of :class:`~megatron.core.datasets.GPTDataset`.

    Args:
        config: rates, and the names of the tokens.
        tokenizer: the one that the data was made with.
        seed: what is chosen is a function of it and the number of a sample.

    Raises:
        ValueError: if the tokenizer has no token of one of the names, or if pieces of a text never give the
            text back, as with SentencePiece that puts a space before each.
    """

    def __init__(self, config: FimConfig, tokenizer: TextTokenizer, seed: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        flags = {
            "--fim-prefix-token": config.fim_prefix_token,
            "--fim-middle-token": config.fim_middle_token,
            "--fim-suffix-token": config.fim_suffix_token,
            "--fim-pad-token": config.fim_pad_token,
            "--fim-eod-token": config.fim_eod_token,
            "--fim-split-sample": config.fim_split_sample,
        }
        ids = token_ids(tokenizer, {flag: name for flag, name in flags.items() if name is not None})
        self._prefix, self._middle, self._suffix, self._pad = list(ids.values())[:4]
        eod = ids.get("--fim-eod-token", tokenizer.eos)
        if eod is None:
            raise ValueError(
                f"--fim-data: {tokenizer.name} ({tokenizer.source}) has no end-of-document token, at which "
                "documents are told apart; name one with --fim-eod-token"
            )
        self._eod = eod
        self._split = ids.get("--fim-split-sample")
        if self._loses_every_cut():
            raise ValueError(
                f"--fim-data: {tokenizer.name} ({tokenizer.source}) does not give back a text that was cut, "
                "since it adds or drops spaces where a text begins or ends; take a byte-level tokenizer "
                "without such a space, and data made with it"
            )

    def __call__(self, tokens: Ids, sample_key: int) -> Ids:
        """The same as :meth:`apply`."""
        return self.apply(tokens, sample_key)

    def apply(self, tokens: Ids, sample_key: int) -> Ids:
        """Rearrange the documents of a sample.

        Args:
            tokens: [s + 1] its text.
            sample_key: its number.

        Returns:
            [s + 1], cut off where it became longer. Where it became shorter, the rest is ``~pad``, a negative
            number: a place with nothing in it, at which the id ``pad`` is shown.
        """
        generator = np.random.default_rng((self._seed, sample_key))
        pieces = _apply_between(tokens, self._eod, lambda part: self._document(part, generator))
        if len(pieces) >= len(tokens):
            return pieces[: len(tokens)]
        rest = np.full(len(tokens) - len(pieces), ~self._pad, dtype=np.int64)
        return np.concatenate((pieces, rest))

    def _document(self, tokens: Ids, generator: np.random.Generator) -> Ids:
        config = self._config
        if self._split is None or not (tokens == self._split).any():
            return self._rearrange(tokens, config.fim_rate, generator)
        if generator.random() >= config.fim_rate:
            return tokens
        assert config.fim_fragment_rate is not None
        rate = config.fim_fragment_rate
        return _apply_between(tokens, self._split, lambda part: self._rearrange(part, rate, generator))

    def _rearrange(self, tokens: Ids, rate: float, generator: np.random.Generator) -> Ids:
        """With probability ``rate``, the text with its middle put last.

        Text that would not come back as it was is left alone: an end inside a character, say, or cuts where
        the tokenizer adds a space.
        """
        if generator.random() >= rate:
            return tokens
        text = self._tokenizer.decode(tokens.tolist())
        no_prefix = self._config.fim_no_prefix
        if _BROKEN in text or (no_prefix is not None and text.startswith(no_prefix)):
            return tokens
        first, second = sorted(generator.integers(0, len(text) + 1, size=2).tolist())
        pieces = [self._encode(part) for part in (text[:first], text[first:second], text[second:])]
        if not self._come_back(pieces, text):
            return tokens
        prefix, middle, suffix = pieces
        if generator.random() < self._config.fim_spm_rate:
            order = [self._prefix, self._suffix, *suffix, self._middle, *prefix, *middle]
        else:
            order = [self._prefix, *prefix, self._suffix, *suffix, self._middle, *middle]
        return np.array(order, dtype=np.int64)

    def _come_back(self, pieces: Sequence[list[int]], text: str) -> bool:
        """Whether pieces are the text again, both if each is read by itself and if all are read as one."""
        decode = self._tokenizer.decode
        return "".join(map(decode, pieces)) == text == decode(list(itertools.chain(*pieces)))

    def _loses_every_cut(self) -> bool:
        """Whether no three pieces of a text are the text again, although it is as a whole."""
        text = self._tokenizer.decode(self._encode(_PROBE))
        if not self._come_back([self._encode(text)], text):
            return False  # a vocabulary that has not these letters; its own texts will show
        for first, second in itertools.combinations(range(1, len(text)), 2):
            parts = text[:first], text[first:second], text[second:]
            if self._come_back([self._encode(part) for part in parts], text):
                return False
        return len(text) > 2

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        return self._tokenizer.encode(text)[len(self._tokenizer.prefix) :]


def _apply_between(tokens: Ids, separator: int, change: Callable[[Ids], Ids]) -> Ids:
    """Change each stretch between separators that is not empty; the separators stay."""
    pieces = []
    start = 0
    for stop in [*np.flatnonzero(tokens == separator).tolist(), len(tokens)]:
        if stop > start:
            pieces.append(change(tokens[start:stop]))
        pieces.append(tokens[stop : stop + 1])  # the separator; nothing at the end
        start = stop + 1
    return np.concatenate(pieces)


def token_ids(tokenizer: TextTokenizer, names: dict[str, str]) -> dict[str, int]:
    """The ids of tokens, by the flags that name them.

    A token is the one whose text is the name. Encoding the name does not find it, since the name of a special
    token that occurs in a text is spelled out.

    Raises:
        ValueError: naming the flags whose tokens the vocabulary has not.
    """
    wanted = set(names.values())
    found: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id])
        if text in wanted:
            found[text] = token_id
    missing = " ".join(f"{flag} {name}" for flag, name in names.items() if name not in found)
    if missing:
        raise ValueError(
            f"{missing}: {tokenizer.name} ({tokenizer.source}) has no such token; give the names that it "
            "uses, or a tokenizer that was made with such tokens"
        )
    return {flag: found[name] for flag, name in names.items()}
