"""Many texts to token ids at once, by the fastest library that gives the tokenizer's own ids.

`gigatoken <https://pypi.org/project/gigatoken/>`_ encodes byte-level BPE and SentencePiece-like BPE some
hundred times as fast as other libraries. It is a reimplementation, so it is never taken at its word: its ids
are compared with the tokenizer's on strings that are hard to get right, on texts of the corpus before the
first is encoded, and on short pieces all along.
"""

import itertools
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import orjson
from gigatoken.gigatoken_rs import load_hf_json

from megatron.core.tokenizers.tokenizer import NO_TEXT_HOLDS, Tokenizer

Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""[t] ids of some texts, one after another, and [n] how many belong to each."""

_MANY_SHORT_TEXTS: Final = 300_000
_SHORT: Final = 256

NASTY_TEXTS: Final = (
    "", " ", "  ", "\n", "\r\n", "\t \n  x", "a ", " a", "  a  b   ", "a\n\n\nb \n c", "\x00",
    "a\x00b\x1f\x7f", "don't we'll I'VE they'Re it's'd 'tis ''", "a_b-c/d\\e@f#g", "\\u0041 \\n \\ud800",
    "x1y22z333 1234567890 3.14 1,000,000 \u00bd \u00b2 \u0663 \u2167", "e" + "\u0301" * 40, "ab" * 200,
    "caf\u00e9 cafe\u0301 \u00c5 A\u030a \ufb01 \uff21\uff22\uff23 \uff76\uff9e", "!" * 70 + "?!" * 40,
    "\u00df \u1e9e \u0130 \u0131 \u01c5 \u0391\u03a3 \u03b1\u03c2", "\u00dcn\u00efc\u00f6d\u00e9" * 30,
    "\u00a0\u2003\u3000\u2028\u2029\u200b\u200d\u00ad x\u0085", "\u0120a \u010a \u0109 \u00e2 \u0122",
    "\u65e5\u672c\u8a9e\u3068\u4e2d\u6587\u3001\ud55c\uad6d\uc5b4\u3002 \u0e44\u0e17\u0e22", "=" * 129,
    "\u0939\u093f\u0928 \u05e2\u05d1\u05e8\u05d9\u05ea \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001d518\U0001d52b \U00010348 \ud7ff\ue000\ufeffa\ufffdb\ufffe\uffff", " " * 131 + "x", "\n" * 67,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "\u2603\ufe0f \U0001f1e9\U0001f1ea\U0001f1e9 \U0001f9b0 \U000e0001 \U0010fffe", "a" * 150,
    "ABCabcDEFdef" * 20,
    "def f(x):\n    return {'a': [1, 2]}\n\n\tif x != 0 && y<=1: /* c */ // d\r\n",
    '<p class="a">&amp;&#39;</p> https://example.org/a?b=c&d=%20#e me@example.org',
    "\u2581 \u2581a <unk> <s> </s> <pad> <0x0A> [CLS] [MASK] ##ing",
    "<|endoftext|> <|endoftext|><|im_start|>a<|im_end|> <|fim_prefix|>",
)  # fmt: skip
"""Strings on which tokenizers tend to differ, for any tokenizer to be compared on."""


class BatchEncoder(Protocol):
    """Encodes many texts at once."""

    name: str
    """The library that does it, and its version."""

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts, without the tokenizer's ``prefix``.

        Raises:
            ValueError: if a text has no ids.
        """
        ...


class ReferenceEncoder(BatchEncoder):
    """The tokenizer itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name = tokenizer.name

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts, as the tokenizer's library gives them."""
        start = len(self._tokenizer.prefix)
        lists = self._tokenizer.encode_batch(texts)
        if start:
            lists = [ids[start:] for ids in lists]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        ids = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(lengths.sum()))
        return ids, lengths


class GigatokenEncoder(BatchEncoder):
    """gigatoken, on the calling thread alone.

    Args:
        encoder_json: content of a ``tokenizer.json``.
        reference: what encodes texts with :data:`NO_TEXT_HOLDS`, by which special tokens are kept from texts.

    Raises:
        ValueError: if it is of a kind that gigatoken does not encode.
    """

    def __init__(self, encoder_json: str, reference: BatchEncoder) -> None:
        try:
            self._library = load_hf_json(encoder_json)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise ValueError(str(error).partition("\n")[0]) from None
        self.name = f"gigatoken {version('gigatoken')}"
        self._reference = reference
        self._short_texts = 0

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts."""
        apart = [NO_TEXT_HOLDS in text for text in texts]
        if not any(apart):
            return self._encode(texts)
        pairs = zip(texts, apart, strict=True)
        found = [(self._reference if by_itself else self._encode)([text]) for text, by_itself in pairs]
        return np.concatenate([ids for ids, _ in found]), np.concatenate([lengths for _, lengths in found])

    def _encode(self, texts: Sequence[str]) -> Encoded:
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        if sum(map(len, texts)) < _SHORT * len(texts):
            self._short_texts += len(texts)
        if self._short_texts > _MANY_SHORT_TEXTS:
            # One call for all costs a fifth for each text, once the half second to load a package is paid.
            layout = self._library.encode_batch(list(texts), parallel=False).layout
            starts = np.asarray(layout.offsets.data)
            return np.asarray(layout.content.data)[starts[0] : starts[-1]], np.diff(starts)
        encode = self._library.encode
        arrays = [encode(text) for text in texts]
        return np.concatenate(arrays), np.fromiter(map(len, arrays), np.int64, len(arrays))


def choose_encoder(tokenizer: Tokenizer, sample: Iterable[str]) -> tuple[BatchEncoder, str]:
    """The fastest encoder that gives the tokenizer's ids on hard strings and on a sample of the corpus.

    Returns:
        It, and a line that says which it is and why.
    """
    reference = ReferenceEncoder(tokenizer)
    spec = tokenizer.encoder_json
    if spec is None:
        return reference, f"encoding with {reference.name}'s own library"
    try:
        fast = GigatokenEncoder(spec, reference)
    except ValueError as error:
        return reference, f"encoding with {reference.name}'s own library (not with gigatoken: {error})"
    texts = [*NASTY_TEXTS, *_spelled_out(spec), *sample]
    difference = first_difference(fast, reference, texts)
    if difference is not None:
        return reference, f"encoding with {reference.name}'s own library, since {difference}"
    return fast, f"encoding with {fast.name}; its ids equal {reference.name}'s on {len(texts)} texts tried"


def first_difference(fast: BatchEncoder, reference: BatchEncoder, texts: Sequence[str]) -> str | None:
    """A line on the first text for which two encoders' ids differ; None if there is none."""
    found, expected = fast(texts), reference(texts)
    if np.array_equal(found[1], expected[1]) and np.array_equal(found[0], expected[0]):
        return None
    for text in texts:
        mine, theirs = fast([text])[0].tolist(), reference([text])[0].tolist()
        if mine != theirs:
            place = next(
                (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), 0
            )
            return (
                f"{fast.name} gives other ids for {text[:60]!a}: from id {place} on "
                f"{mine[place : place + 4]}, not {theirs[place : place + 4]}"
            )
    return f"{fast.name} gives other ids for texts together than for each by itself"


def _spelled_out(encoder_json: str) -> list[str]:
    """Texts that hold the names of special tokens, which are ordinary text unless asked otherwise."""
    names = [str(token["content"]) for token in orjson.loads(encoder_json).get("added_tokens") or ()]
    plain = [name.removeprefix(NO_TEXT_HOLDS) for name in names[:1000]]
    return [f"a{name}b {name} {name}{name}{NO_TEXT_HOLDS}{name}" for name in plain]
