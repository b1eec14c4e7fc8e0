"""What every tokenizer offers, whatever library or file is behind it."""

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

NO_TEXT_HOLDS: Final = "\U0010ffff"
"""A code point that Unicode keeps free of characters for good.

Names of special tokens that must not be found in a text begin with it. A text that holds it all the same is
encoded piece by piece (:func:`split_apart`).
"""


class Tokenizer(Protocol):
    r"""Text to token ids and back.

    A document's text gives the tokens of that text and nothing else: a marker that occurs literally in it
    (``<|endoftext|>``, ``</s>``) is spelled out in ordinary tokens, unless the tokenizer was built with
    ``parse_special_tokens``. So a corpus has as many end-of-document ids as were asked for.

    Text is Unicode characters. A Python string can also hold half of a surrogate pair by itself, as from the
    JSON text ``"\ud800"``; every tokenizer refuses it.
    """

    name: str
    """The ``--tokenizer-type`` that made it."""
    source: str
    """The flags and files it came from, for messages."""
    vocab_size: int
    """v: one more than the largest id; never padded."""
    bos: int | None
    """Beginning-of-sequence id, if the tokenizer has one."""
    eos: int | None
    """End-of-sequence id, if the tokenizer has one."""
    pad: int | None
    """Padding id, if the tokenizer has one."""
    cls: int | None = None
    """Id that stands before a sequence to be classified, if the tokenizer has one."""
    sep: int | None = None
    """Id between two sequences, if the tokenizer has one."""
    mask: int | None = None
    """Id that hides a token, if the tokenizer has one."""
    sentinels: tuple[int, ...] = ()
    """Ids of ``<extra_id_0>``, ``<extra_id_1>`` and so on, as many as ``--vocab-extra-ids`` says."""
    prefix: tuple[int, ...] = ()
    """Ids that ``encode`` puts before any text; only Llama2Tokenizer has one, its beginning of sequence."""
    identity: dict[str, Any]
    """JSON values that are equal for two tokenizers only if they give equal ids."""

    @property
    def encoder_json(self) -> str | None:
        """Content of a ``tokenizer.json`` that gives the ids of ``encode`` after ``prefix``.

        For libraries that encode faster. None where there is no such file.
        """
        return None

    @property
    def has_eod(self) -> bool:
        """Whether documents can be ended by an id."""
        return self.eos is not None

    @property
    def eod(self) -> int:
        """The end-of-document id: what ``--append-eod`` writes; the end-of-sequence id of the file.

        Raises:
            ValueError: if the tokenizer has none.
        """
        if self.eos is None:
            raise ValueError(
                f"{self.name} ({self.source}) has no end-of-document token, which --append-eod, "
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need: leave the flag out, "
                "or give a tokenizer with such a token (a tokenizer.json may have it named as eos_token in a "
                "tokenizer_config.json beside it)"
            )
        return self.eos

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after ``prefix``.

        Raises:
            ValueError: if the text has no ids: half of a surrogate pair is in it, or for NullTokenizer
                something other than numbers.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, each as ``encode`` gives them."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens spelled out."""
        ...

    def continues_word(self) -> npt.NDArray[np.bool_]:
        """[v] for a vocabulary of word pieces: whether a piece goes on with the word of the piece before it.

        Raises:
            ValueError: if the vocabulary is not of word pieces.
        """
        raise ValueError(
            f"{self.name} ({self.source}) does not say which tokens go on with a word: whole words can be "
            "masked with --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase, or with a "
            "tokenizer.json of WordPiece"
        )


def named_file(flag: str, value: str | None, tokenizer_type: str, what: str) -> Path:
    """The file that a flag names.

    Raises:
        ValueError: if the flag was not given, or there is no such file.
    """
    if value is None:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {flag}: {what}")
    path = Path(value)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "no such file"
        raise ValueError(
            f"{flag} {value}: {problem}; {tokenizer_type} wants {what}, and nothing is downloaded"
        )
    return path


def digest(*contents: bytes) -> str:
    """SHA-256 over the contents of a tokenizer's files, in order: the same tokenizer wherever it lies."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(len(content).to_bytes(8, "little"))
        whole.update(content)
    return whole.hexdigest()


def utf8(text: str) -> bytes:
    """A text in UTF-8.

    Raises:
        ValueError: if half of a surrogate pair is in it, which is no character.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ValueError(
            f"{half} at character {error.start + 1} of the text is one half of a surrogate pair, no character"
        ) from None


def split_apart(text: str) -> list[str]:
    """A text in pieces, laid end to end: each :data:`NO_TEXT_HOLDS` by itself, and what is between them."""
    return [piece for piece in re.split(f"({NO_TEXT_HOLDS})", text) if piece]


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of all special tokens by what they are for, for ``identity``."""
    roles = ("bos", "eos", "pad", "cls", "sep", "mask")
    return {**{role: getattr(tokenizer, role) for role in roles}, "sentinels": list(tokenizer.sentinels)}


def sentinel_names(count: int) -> list[str]:
    """Names of the first ``count`` sentinels."""
    return [f"<extra_id_{number}>" for number in range(count)]


def extend_vocabulary(names: Iterable[str], known: dict[str, int], size: int) -> dict[str, int]:
    """Ids of some names: their own where they are in the vocabulary, the next free ones for the others.

    Args:
        names: the names.
        known: ids of tokens that are there.
        size: one more than the largest id that is in use.
    """
    ids: dict[str, int] = {}
    for name in names:
        ids[name] = known.get(name, size)
        size = max(size, ids[name] + 1)
    return ids


def splitter(names: Collection[str]) -> re.Pattern[str]:
    """What splits a text at some names and keeps them; the longest where several begin at one place."""
    return re.compile("(" + "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) + ")")
