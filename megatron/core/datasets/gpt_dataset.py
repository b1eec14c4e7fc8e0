"""GPT samples: a stretch of tokens, the same stretch one token on as labels, and what masking needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

Sample = dict[str, npt.NDArray[Any]]

PADDING: Final = -1
"""Stands in a text for a place beyond its end; shown to the model as id 0."""

Transform = Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.int64]]
"""Makes another text of the same length from a text and the number of its sample.

A place that it has nothing for is ``~p`` (negative), where ``p`` is the id to show there.
"""


class SequenceSource(Protocol):
    """Sequences of tokens by number: an indexed dataset, or one made up."""

    prefix: str
    sequence_lengths: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def count_tokens(self, start: int, stop: int) -> int:
        """Number of tokens in sequences ``start`` to ``stop``."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence, or of a part of it: [length]."""

    def identity(self) -> dict[str, Any]:
        """What tells this state of the data from any other; fit for JSON."""

    def verify(self) -> None:
        """Check all that says where sequences lie; to be called before an index is built on it."""


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
        transform: changes the text of each sample, fill-in-the-middle say; depends on its arguments alone.
    """

    seq_length: int
    vocab_size: int
    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    transform: Transform | None = None

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
    the document that it ends.

    Where a text ends early (a partial last sample that was kept, or a transform that left places over) the
    rest is padding: at the end, without loss. Which places those are goes by position, never by id.

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
        shuffle = self.indices["shuffle_index"]
        if not 0 <= index < len(shuffle):
            raise IndexError(f"{self.source.prefix}: no sample {index}; there are {len(self)}")
        text, padded = self._text(shuffle.item(index))
        options = self.sample_format
        loss_mask = np.ones(options.seq_length, dtype=np.float32)
        if padded:
            padding = text < 0
            loss_mask[padding[1:]] = 0
            text[padding] = ~text[padding]
        tokens = text[:-1]  # [s]
        sample: Sample = {"tokens": tokens, "labels": text[1:], "loss_mask": loss_mask}
        if options.eod_mask_loss:
            loss_mask[tokens == options.eod] = 0
        if options.reset_position_ids or options.reset_attention_mask:
            starts_document = np.zeros(len(tokens), dtype=bool)
            starts_document[1:] = tokens[:-1] == options.eod
            if options.reset_position_ids:
                positions = np.arange(len(tokens), dtype=np.int64)
                sample["position_ids"] = positions - np.maximum.accumulate(positions * starts_document)
            if options.reset_attention_mask:
                sample["segment_ids"] = np.cumsum(starts_document, dtype=np.int64)
        return sample

    def _text(self, number: int) -> tuple[npt.NDArray[np.int64], bool]:
        """The text of a sample in unshuffled order, [s + 1], and whether it may have padding."""
        options = self.sample_format
        text = self._stored(number)
        # Seen as unsigned numbers, negative ones are the largest: one look for both ends.
        if text.view(np.uint64).max() >= options.vocab_size:
            lowest, highest = int(text.min()), int(text.max())
            raise ValueError(
                f"{self.source.prefix}: holds the token {lowest if lowest < 0 else highest}, but the "
                f"vocabulary has {options.vocab_size}; was the data made with this tokenizer?"
            )
        whole = len(text) == options.seq_length + 1
        if options.transform is not None:
            changed = options.transform(text, number)
            assert changed.shape == text.shape, (changed.shape, text.shape)
            text = changed
        if whole:
            return text, options.transform is not None
        rest = np.full(options.seq_length + 1 - len(text), PADDING, dtype=np.int64)
        return np.concatenate((text, rest)), True

    def _stored(self, number: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample in unshuffled order: [s + 1], or fewer of a partial one."""
        documents, get = self.indices["document_index"], self.source.get
        (first, start), (last, end) = self.indices["sample_index"][number : number + 2].tolist()
        if first == last:
            return get(documents.item(first), start, end + 1 - start).astype(np.int64)
        sequences = documents[first : last + 1].tolist()
        pieces = [get(sequences[0], start)]
        pieces += [get(sequence) for sequence in sequences[1:-1]]
        pieces.append(get(sequences[-1], 0, end + 1))
        return np.concatenate(pieces, dtype=np.int64)
