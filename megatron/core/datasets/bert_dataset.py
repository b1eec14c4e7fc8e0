"""BERT samples: two segments of a document, in order or swapped, with some of their words hidden."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from megatron.core.config.bert_data import BertDataConfig
from megatron.core.datasets.bert_mapping import (
    LONGEST_SENTENCE,
    MappingCounts,
    NoUsableDocumentError,
    build_bert_mapping,
)
from megatron.core.datasets.bert_masking import WordMasking
from megatron.core.datasets.gpt_dataset import Sample, SequenceSource
from megatron.core.datasets.gpt_indices import Allocate
from megatron.core.datasets.index_cache import IndexCache

BERT_ORDER_VERSION: Final = 1
"""Part of every cache key; to be raised with any change to the mapping."""
SPECIAL_TOKENS: Final = 3
"""Places that a sample keeps free: one at the beginning, one at the end of each segment."""
SWAPPED_SHARE: Final = 0.5
FRONT_SHARE: Final = 0.5
NOT_PREDICTED: Final = -1


class SentenceSource(SequenceSource, Protocol):
    """Sentences by number, and which documents they make."""

    document_indices: npt.NDArray[np.int64]


class WordPieceTokenizer(Protocol):
    """What BERT samples need of a tokenizer."""

    name: str
    vocab_size: int
    cls: int | None
    sep: int | None
    mask: int | None
    pad: int | None

    def continues_word(self) -> npt.NDArray[np.bool_]:
        """For each id, whether it goes on with the word before it: [v]."""


@dataclass(frozen=True)
class BertSampleFormat:
    """How sentences become a sample.

    Attributes:
        seq_length: s, places of a sample.
        masking: which words are hidden, and how.
        pad: id of padding.
        short_seq_prob: share of samples that aim at fewer tokens.
        binary_head: two segments, whose order is to be told; else one.
    """

    seq_length: int
    masking: WordMasking
    pad: int
    short_seq_prob: float = 0.1
    binary_head: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(
                f"--seq-length {self.seq_length}: a BERT sample takes {SPECIAL_TOKENS} special tokens and at "
                f"least two others; give {SPECIAL_TOKENS + 2} or more"
            )

    @classmethod
    def of(cls, config: BertDataConfig, tokenizer: WordPieceTokenizer, seq_length: int) -> Self:
        """The format that the flags and the tokenizer describe.

        Raises:
            ValueError: if the tokenizer has no word pieces, or lacks a special token.
        """
        special = {name: getattr(tokenizer, name) for name in ("cls", "sep", "mask", "pad")}
        missing = [name for name, token in special.items() if token is None]
        if missing:
            raise ValueError(
                f"{tokenizer.name} has no token for {', '.join(missing)}, which BERT samples need; "
                "--tokenizer-type BertWordPieceLowerCase has them"
            )
        pad = special.pop("pad")
        masking = WordMasking(
            vocab_size=tokenizer.vocab_size,
            continues_word=tokenizer.continues_word(),
            mask_prob=config.mask_prob,
            **special,
        )
        return cls(seq_length, masking, pad, config.short_seq_prob, config.bert_binary_head)

    @property
    def max_tokens(self) -> int:
        """Longest sample in tokens, special ones not counted."""
        return self.seq_length - SPECIAL_TOKENS

    @property
    def min_sentences(self) -> int:
        """Fewest sentences of a sample."""
        return 2 if self.binary_head else 1


class _Scratch(threading.local):
    """A generator for each thread, seeded anew for each sample: making one takes longer than the sample."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)

    def __reduce__(self) -> tuple[type["_Scratch"], tuple[()]]:
        return _Scratch, ()


class BertDataset(Dataset[Sample]):
    """The samples of one split of one dataset, in shuffled order.

    A sample is a dict of int64 arrays, [s] unless said otherwise:

    - ``text``: the beginning of a sample, segment A, the end of a segment, segment B, the end of a segment,
      zeros; with words hidden. Without the binary head all is A.
    - ``types``: 1 for B and its end, else 0.
    - ``labels``: what stood in the places to predict, elsewhere -1; ``loss_mask``: 1 in those places.
    - ``padding_mask``: 1 where there is a token.
    - ``is_random`` []: 1 if the segments have changed places; ``truncated`` []: 1 if tokens were cut off.

    All draws of a sample come from the seed and its number alone, so neither the order of access, nor workers
    or a resume change it.

    Args:
        source: the sentences.
        arrays: what ``build_bert_mapping`` gives.
        sample_format: how sentences become a sample.
        seed: of the draws.
    """

    def __init__(
        self,
        source: SentenceSource,
        arrays: Mapping[str, npt.NDArray[Any]],
        sample_format: BertSampleFormat,
        seed: int,
    ) -> None:
        self.source = source
        self.arrays = arrays
        self.sample_format = sample_format
        self.seed = seed
        self._scratch = _Scratch()

    def __len__(self) -> int:
        return len(self.arrays["sample_index"])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.source.prefix}: no sample {index}; there are {len(self)}")
        first, last, target = self.arrays["sample_index"][index].tolist()
        generator = self._scratch.generator
        generator.seed((self.seed + index) % 2**32)
        sentences = [self.source.get(sentence) for sentence in range(first, last)]
        segments, swapped = self._segments(sentences, generator)
        segments, truncated = _truncate(segments, target, generator)
        return {
            **self._filled(segments, target, generator),
            "is_random": np.array(swapped, np.int64),
            "truncated": np.array(truncated, np.int64),
        }

    def _segments(
        self, sentences: list[npt.NDArray[Any]], generator: np.random.RandomState
    ) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], bool]:
        """Segments A and B, and whether they have changed places."""
        text = np.concatenate(sentences).astype(np.int64)
        self._check(text)
        if not self.sample_format.binary_head:
            return (text, text[:0]), False
        pivot = int(generator.randint(1, len(sentences))) if len(sentences) > 2 else 1
        border = sum(map(len, sentences[:pivot]))
        swapped = generator.random_sample() < SWAPPED_SHARE
        first, second = text[:border], text[border:]
        return ((second, first) if swapped else (first, second)), swapped

    def _check(self, text: npt.NDArray[np.int64]) -> None:
        vocab_size = self.sample_format.masking.vocab_size
        if len(text) and not 0 <= (lowest := int(text.min())) <= (highest := int(text.max())) < vocab_size:
            raise ValueError(
                f"{self.source.prefix}: holds the token {lowest if lowest < 0 else highest}, but the "
                f"vocabulary has {vocab_size}; was the data made with this tokenizer?"
            )

    def _filled(
        self,
        segments: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        target: int,
        generator: np.random.RandomState,
    ) -> Sample:
        """The arrays [s] of a sample."""
        options = self.sample_format
        masking = options.masking
        first, second = segments
        tokens = np.concatenate(([masking.cls], first, [masking.sep], second, [masking.sep]))
        border = len(first) + 2
        if len(second) == 0:
            tokens = tokens[:border]
        masked, chosen = masking.apply(tokens, target, generator)

        text, types, labels, loss_mask, padding_mask = np.zeros((5, options.seq_length), np.int64)
        text[: len(tokens)] = masked
        types[border : len(tokens)] = 1
        labels[:] = NOT_PREDICTED
        labels[chosen] = tokens[chosen]
        loss_mask[chosen] = 1
        padding_mask[: len(tokens)] = 1
        # Padding is 0 whatever its id, and so is that id where it stands for a token.
        text[text == options.pad] = 0
        labels[labels == options.pad] = 0
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "padding_mask": padding_mask,
            "loss_mask": loss_mask,
        }


def _truncate(
    segments: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    target: int,
    generator: np.random.RandomState,
) -> tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], bool]:
    """Cut off single tokens until the target is met: of the longer segment (B if equal), front or back."""
    first, second = segments
    surplus = len(first) + len(second) - target
    if surplus <= 0:
        return segments, False
    in_front = generator.random_sample(surplus) < FRONT_SHARE
    # The longer is cut until it is no longer so; from then on they take turns.
    ahead = len(first) - len(second)
    turns = np.arange(surplus) - (ahead if ahead > 0 else 1 - ahead)
    from_first = (turns < 0) | (turns % 2 == 1) if ahead > 0 else (turns >= 0) & (turns % 2 == 0)

    def cut(segment: npt.NDArray[np.int64], of_segment: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        front = int(np.count_nonzero(in_front & of_segment))
        back = int(np.count_nonzero(of_segment)) - front
        return segment[front : len(segment) - back]

    return (cut(first, from_first), cut(second, ~from_first)), True


@dataclass(frozen=True)
class BertSplit:
    """The samples of one split of one dataset, and an account of them.

    Attributes:
        dataset: the samples.
        counts: what became of the documents.
        description: a line for the log: documents, usable and skipped ones, samples, epochs.
    """

    dataset: BertDataset
    counts: MappingCounts
    description: str


def build_bert_split(
    source: SentenceSource,
    documents: range,
    num_samples: int | None,
    *,
    name: str,
    sample_format: BertSampleFormat,
    seed: int,
    cache: IndexCache,
) -> BertSplit:
    """Build the BERT samples of some documents, or find them in the cache.

    Args:
        source: sentences, a sequence each.
        documents: those of the split, consecutive.
        num_samples: fewest samples; one epoch if None.
        name: of the split, for messages.
        sample_format: how sentences become a sample.
        seed: of the order of samples, and of all draws inside them.
        cache: where the mapping is kept.

    Raises:
        ValueError: if no document gives a sample, with the reason.
    """

    def build(allocate: Allocate) -> dict[str, npt.NDArray[Any]]:
        source.verify()
        return build_bert_mapping(
            source.document_indices[documents.start : documents.stop + 1],
            source.sequence_lengths,
            num_samples=num_samples,
            max_seq_length=sample_format.max_tokens,
            short_seq_prob=sample_format.short_seq_prob,
            seed=seed,
            min_sentences=sample_format.min_sentences,
            allocate=allocate,
        )

    key = {
        "class": "BertDataset",
        "version": BERT_ORDER_VERSION,
        "dataset": source.identity(),
        "num_samples": num_samples,
        "index_split": name,
        "random_seed": seed,
        "max_tokens": sample_format.max_tokens,
        "documents": [documents.start, documents.stop],
        "short_seq_prob": sample_format.short_seq_prob,
        "min_sentences": sample_format.min_sentences,
    }
    try:
        arrays = cache.get(f"BertDataset-{name}", key, build)
    except NoUsableDocumentError as error:
        raise ValueError(f"the {name} split of {source.prefix} can't be trained on: {error}") from None
    counts = MappingCounts(*arrays["counts"].tolist())
    return BertSplit(
        BertDataset(source, arrays, sample_format, seed),
        counts,
        f"{name}: {source.prefix}: {_account(counts, len(arrays['sample_index']))}",
    )


def _account(counts: MappingCounts, samples: int) -> str:
    reasons = (
        f"{counts.empty:,} without sentences, {counts.short:,} of one sentence, "
        f"{counts.long:,} with a sentence of more than {LONGEST_SENTENCE} tokens"
    )
    skipped = f"{counts.skipped:,} skipped" + (f" ({reasons})" if counts.skipped else "")
    return (
        f"{counts.documents:,} documents, {counts.usable:,} usable, {skipped}; "
        f"{samples:,} samples in {counts.epochs:,} epochs"
    )
