"""Tokenizers of SentencePiece ``.model`` files."""

import re
from collections.abc import Sequence
from typing import Final

from sentencepiece import SentencePieceProcessor

from megatron.core.tokenizers.tokenizer import Tokenizer, digest, named_file

KNOWN_ENDS: Final = ("<|endoftext|>", "</s>", "<EOD>")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Beginning, end and padding are the ids that the model file gives them (none where it gives -1). The end of
    a document is its end of sequence, or in a model without one the first of the pieces ``<|endoftext|>``,
    ``</s>`` and ``<EOD>`` that it has. No pieces are added to the model's own.

    Args:
        name: ``SentencePieceTokenizer`` and ``GPTSentencePieceTokenizer`` are the same here;
            ``Llama2Tokenizer`` puts the beginning of sequence before every text, as Llama's models expect.
        tokenizer_model: path of the ``.model`` file.
        parse_special_tokens: read the beginning, end and padding piece where they occur in a text; the text
            between them is then encoded part by part.

    Raises:
        ValueError: if the file is missing or is no SentencePiece model.
    """

    def __init__(self, name: str, tokenizer_model: str | None, parse_special_tokens: bool) -> None:
        self.name, self.source = name, f"--tokenizer-model {tokenizer_model}"
        path = named_file("--tokenizer-model", tokenizer_model, name, "a SentencePiece .model file")
        content = path.read_bytes()
        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError:
            raise ValueError(f"{self.source}: not a SentencePiece model") from None
        self.vocab_size = self._model.get_piece_size()
        self.bos = _id_or_none(self._model.bos_id())
        self.eos = _id_or_none(self._model.eos_id())
        self.pad = _id_or_none(self._model.pad_id())
        if self.eos is None:
            self.eos = next((found for name in KNOWN_ENDS if (found := self._marker(name)) is not None), None)
        if name == "Llama2Tokenizer":
            if self.bos is None:
                raise ValueError(
                    f"{self.source}: the model has no beginning-of-sequence piece, which Llama2Tokenizer "
                    "puts before each text; use --tokenizer-type SentencePieceTokenizer"
                )
            self.prefix = (self.bos,)
        control = [token_id for token_id in (self.bos, self.eos, self.pad) if token_id is not None]
        self._special = {self._model.id_to_piece(token_id): token_id for token_id in control}
        names = "|".join(re.escape(piece) for piece in sorted(self._special, key=len, reverse=True))
        self._split = re.compile(f"({names})") if parse_special_tokens and names else None
        self.identity = {
            "type": "Llama2Tokenizer" if self.prefix else "SentencePieceTokenizer",
            "vocab_size": self.vocab_size,
            "eod": self.eos,
            "parse_special_tokens": parse_special_tokens,
            "sha256": digest(content),
        }

    def _marker(self, piece: str) -> int | None:
        token_id = int(self._model.piece_to_id(piece))
        there = self._model.id_to_piece(token_id) == piece and not self._model.is_unknown(token_id)
        return token_id if there else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, after ``prefix``; the prefix is not doubled where the text has it already."""
        ids = self._encode(text)
        begun = tuple(ids[: len(self.prefix)]) == self.prefix
        return ids if begun else [*self.prefix, *ids]

    def _encode(self, text: str) -> list[int]:
        if self._split is None:
            return list(self._model.encode(text))
        ids: list[int] = []
        for part in self._split.split(text):
            ids += [self._special[part]] if part in self._special else self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; SentencePiece gives control pieces no text."""
        text: str = self._model.decode(list(ids))
        return text


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
