"""The datasets of BERT training: runs of sentences, some of their words hidden."""

from collections.abc import Mapping, Sequence

from megatron.core.config import DataConfig
from megatron.core.datasets.bert_dataset import (
    BERT_ORDER_VERSION,
    BertSampleFormat,
    BertSplit,
    build_bert_split,
)
from megatron.core.datasets.builder import (
    Component,
    DatasetSplits,
    Part,
    build_splits,
    dataset_cache,
)
from megatron.core.datasets.fingerprint import array_digest, content_digest
from megatron.core.datasets.gpt_dataset import SequenceSource
from megatron.core.datasets.indexed_dataset import IndexedDataset


def build_bert_datasets(
    config: DataConfig,
    *,
    sample_format: BertSampleFormat,
    seed: int,
    sizes: Sequence[int | None],
    validation_sets: bool = False,
) -> DatasetSplits:
    """Build the datasets that the flags describe. Any rank may call it, at any time; none waits for another.

    Args:
        config: the data flags.
        sample_format: how sentences become a sample.
        seed: of the order of samples, and of all draws inside them.
        sizes: samples asked of training, validation and test; None for one epoch. A split of which none are
            asked is not built.
        validation_sets: keep the validation datasets apart, each of so many samples.

    Raises:
        ValueError: if the files or the flags can't give the samples, naming flag, split and numbers.
    """
    kind = BertSamples(config, sample_format, seed)
    return build_splits(config, kind, sizes, validation_sets=validation_sets)


class BertSamples:
    """Samples of sentences; a split consists of documents.

    Args:
        config: the data flags.
        sample_format: how sentences become a sample.
        seed: of the order of samples, and of all draws inside them.
    """

    def __init__(self, config: DataConfig, sample_format: BertSampleFormat, seed: int) -> None:
        self._config = config
        self._format = sample_format
        self._seed = seed

    @property
    def order(self) -> Mapping[str, str | int | float]:
        """What samples and their order depend on besides the data and how it is mixed, by name."""
        masking = self._format.masking
        special = {name: getattr(masking, name) for name in ("cls", "sep", "mask")} | {
            "pad": self._format.pad
        }
        continues = masking.continues_word
        return {
            "order version": BERT_ORDER_VERSION,
            "--seq-length": self._format.seq_length,
            "--seed": self._seed,
            "--short-seq-prob": self._format.short_seq_prob,
            "sentences of a sample, at least": self._format.min_sentences,
            "--mask-prob": masking.mask_prob,
            "words masked in a run, at most": masking.max_ngram,
            "vocabulary": masking.vocab_size,
            **{f"id of {name}": token for name, token in special.items()},
            "pieces that go on with a word": "none" if continues is None else array_digest(continues),
        }

    def made_up(self) -> SequenceSource:
        """Nothing: made-up data has no sentences.

        Raises:
            ValueError: always.
        """
        raise ValueError("--mock-data has no sentences for BERT samples: give --data-path")

    def num_elements(self, source: SequenceSource) -> int:
        """Number of documents, those without sentences too."""
        return _with_documents(source).num_documents

    def digest(self, source: SequenceSource) -> str:
        """Hash of sentences, tokens and documents."""
        return content_digest(source, documents=True)

    def epoch_samples(self, part: Part, split: str) -> int:
        """Samples of a part that is gone through once; it takes building them, or the cache."""
        return len(self._split(part, split, None).dataset)

    def build(self, part: Part, split: str, num_samples: int | None) -> Component:
        """The samples of a part: at least so many, or those of one epoch if None."""
        built = self._split(part, split, num_samples)
        held = built.description.removeprefix(f"{split}: ")
        samples = len(built.dataset)
        return Component(
            built.dataset, samples, lambda used: f"{held}, {used:,} wanted", f"{samples} samples"
        )

    def _split(self, part: Part, split: str, num_samples: int | None) -> BertSplit:
        source = _with_documents(part.source)
        return build_bert_split(
            source,
            part.elements,
            num_samples,
            name=split,
            sample_format=self._format,
            seed=self._seed,
            cache=dataset_cache(self._config, source),
        )


def _with_documents(source: SequenceSource) -> IndexedDataset:
    assert isinstance(source, IndexedDataset), "made-up data is refused before"
    return source
