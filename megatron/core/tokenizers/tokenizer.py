"""What every tokenizer offers, whatever library or file is behind it."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back.

    A document's text gives the tokens of that text and nothing else: a marker that occurs literally in it
    (``<|endoftext|>``, ``</s>``) is spelled out in ordinary tokens, unless the tokenizer was built with
    ``parse_special_tokens``. So a corpus has as many end-of-document ids as were asked for.
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
    prefix: tuple[int, ...] = ()
    """Ids that ``encode`` puts before any text; only Llama2Tokenizer has one, its beginning of sequence."""
    encoder_json: str | None = None
    """Content of a ``tokenizer.json`` that gives the ids of ``encode``, with nothing put before or after: for
    libraries that encode faster. None where there is no such file."""
    identity: dict[str, Any]
    """JSON values that are equal for two tokenizers only if they give equal ids."""

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
            ValueError: if the text has no ids (NullTokenizer only, which reads numbers).
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, each as ``encode`` gives them."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens spelled out."""
        ...


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
