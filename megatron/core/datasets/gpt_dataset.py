"""GPT samples: a stretch of tokens, the same stretch one token on as labels, and what masking needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

Sample = dict[str, npt.NDArray[Any]]


class SequenceSource(Protocol):
    """Sequences of tokens by number: an indexed dataset, or one made up."""

    prefix: str
    sequence_lengths: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence, or of a part of it: [length]."""

    def identity(self) -> dict[str, Any]:
        """What tells this state of the data from any other; fit for JSON."""


@dataclass(frozen=True)
class SampleFormat:
    """How tokens become a sample.

    Attributes:
        seq_length: tokens that a sample predicts.
        vocab_size: true size of the vocabulary; ids beyond it are refused.
        eod: id of end-of-document, needed by the three options below.
        eod_mask_loss: count no loss where the input is end-of-document.
        reset_position_ids: positions start anew after each end-of-document.
        reset_attention_mask: give the segments that attention may not leave.
    """

    seq_length: int
    vocab_size: int
    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    def __post_init__(self) -> None:
        names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
        wanted = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        if wanted and self.eod is None:
            raise ValueError(
                f"{' '.join(wanted)}: needs to know documents by their end, but the tokenizer has no "
                "end-of-document token; leave the flag out or take another tokenizer"
            )


class GPTDataset(Dataset[Sample]):
    """The samples of one split of one dataset, in shuffled order.

    A sample is a dict of arrays: ``tokens`` and ``labels`` [s] int64 (each label is the token after its
    input) and ``loss_mask`` [s] float32. With ``reset_position_ids`` also ``position_ids`` [s] int64
    (without, positions are 0..s-1). With ``reset_attention_mask`` also ``segment_ids`` [s] int64: 0 for the
    first document that the sample touches, 1 for the next, and so on; an end-of-document token belongs to
    the document that it ends. There is no padding.

    Args:
        source: the tokens.
        indices: what ``build_gpt_indices`` gives.
        sample_format: how tokens become a sample.
    """

    def __init__(
        self, source: SequenceSource, indices: Mapping[str, npt.NDArray[Any]], sample_format: SampleFormat
    ) -> None:
        self.source = source
        self.indices = indices
        self.sample_format = sample_format

    def __len__(self) -> int:
        return len(self.indices["shuffle_index"])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source.prefix}: no sample {index}; there are {len(self)}")
        text = self._text(int(self.indices["shuffle_index"][index]))
        tokens, labels = text[:-1], text[1:]  # [s]
        options = self.sample_format
        sample: Sample = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": np.ones(len(tokens), dtype=np.float32),
        }
        if options.eod_mask_loss:
            sample["loss_mask"][tokens == options.eod] = 0
        if options.reset_position_ids or options.reset_attention_mask:
            starts_document = np.zeros(len(tokens), dtype=bool)
            starts_document[1:] = tokens[:-1] == options.eod
            if options.reset_position_ids:
                positions = np.arange(len(tokens), dtype=np.int64)
                sample["position_ids"] = positions - np.maximum.accumulate(positions * starts_document)
            if options.reset_attention_mask:
                sample["segment_ids"] = np.cumsum(starts_document, dtype=np.int64)
        return sample

    def _text(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample in unshuffled order: [s + 1], the extra one last."""
        documents = self.indices["document_index"]
        (first, start), (last, end) = self.indices["sample_index"][number : number + 2].tolist()
        pieces = []
        for position in range(first, last + 1):
            offset = start if position == first else 0
            length = end + 1 - offset if position == last else None
            pieces.append(self.source.get(int(documents[position]), offset, length))
        text = np.concatenate(pieces).astype(np.int64)
        assert len(text) == self.sample_format.seq_length + 1
        lowest, highest = int(text.min()), int(text.max())
        if lowest < 0 or highest >= self.sample_format.vocab_size:
            raise ValueError(
                f"{self.source.prefix}: holds the token {lowest if lowest < 0 else highest}, but the "
                f"vocabulary has {self.sample_format.vocab_size}; was the data made with this tokenizer?"
            )
        return text
