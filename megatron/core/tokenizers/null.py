"""A tokenizer for data that is numbers already."""

from collections.abc import Sequence

from megatron.core.tokenizers.tokenizer import Tokenizer


class NullTokenizer(Tokenizer):
    """Text is token ids, written as decimal numbers with white space between; the last id ends a document.

    Args:
        vocab_size: v, the value of ``--vocab-size``; ids run from 0 to v - 1, and v - 1 ends a document.
        num_sentinels: the value of ``--vocab-extra-ids``: 0, since ids have no names.

    Raises:
        ValueError: if the size is missing or below 1, or sentinels are asked for.
    """

    def __init__(self, vocab_size: int | None, num_sentinels: int = 0) -> None:
        if num_sentinels:
            raise ValueError(
                f"--vocab-extra-ids {num_sentinels}: NullTokenizer has numbers, no named tokens such as "
                "<extra_id_0>; leave the flag out"
            )
        if vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size: how many ids there are")
        if vocab_size < 1:
            raise ValueError(f"--vocab-size {vocab_size}: must be at least 1")
        self.name, self.source = "NullTokenizer", f"--vocab-size {vocab_size}"
        self.vocab_size = vocab_size
        self.bos, self.eos, self.pad = None, vocab_size - 1, None
        self.identity = {"type": self.name, "vocab_size": vocab_size, "eod": self.eos}

    def encode(self, text: str) -> list[int]:
        """The numbers in a text.

        Raises:
            ValueError: for a word that is no number, or a number that is no id.
        """
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()):
                raise ValueError(f"NullTokenizer reads numbers with spaces between; {word[:40]!r} is none")
            if len(word) > 20 or int(word) >= self.vocab_size:
                raise ValueError(
                    f"id {word[:40]} is outside the vocabulary: --vocab-size {self.vocab_size} has ids 0 to "
                    f"{self.vocab_size - 1}"
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The numbers, with spaces between."""
        return " ".join(map(str, ids))
