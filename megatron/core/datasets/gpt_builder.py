"""The datasets of GPT training: documents packed one after another and cut into samples."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt

from megatron.core.config import DataConfig, FimConfig
from megatron.core.datasets.builder import (
    Component,
    DatasetSplits,
    Part,
    build_splits,
    dataset_cache,
)
from megatron.core.datasets.fim import FillInTheMiddle, TextTokenizer
from megatron.core.datasets.fingerprint import content_digest, value_digest
from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat, SequenceSource
from megatron.core.datasets.gpt_indices import (
    Allocate,
    EpochPlan,
    build_gpt_indices,
    plan_epochs,
    samples_per_epoch,
)
from megatron.core.datasets.mock_dataset import MockIndexedDataset

ORDER_VERSION: Final = 1
"""Part of every cache key; to be raised with any change to the order of samples."""


def build_datasets(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    sizes: Sequence[int | None],
    eod: int | None,
    vocab_size: int,
    validation_sets: bool = False,
    fim: tuple[FimConfig, TextTokenizer] | None = None,
) -> DatasetSplits:
    """Build the datasets that the flags describe. Any rank may call it, at any time; none waits for another.

    Args:
        config: the data flags.
        seq_length: tokens that a sample predicts.
        seed: of the order of samples.
        sizes: samples asked of training, validation and test; None for each sample once. A split of which
            none are asked is not built.
        eod: id of end-of-document, if the tokenizer has one.
        vocab_size: true size of the vocabulary.
        validation_sets: keep the validation datasets apart, each of so many samples.
        fim: how the text of all splits is rearranged, and what the data was made with; None if it is not.

    Raises:
        ValueError: if the files or the flags can't give the samples, naming flag, split and numbers.
    """
    sample_format = SampleFormat(
        seq_length=seq_length,
        vocab_size=vocab_size,
        eod=eod,
        eod_mask_loss=config.eod_mask_loss,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        transform=FillInTheMiddle(*fim, seed) if fim is not None else None,
    )
    kind = GPTSamples(config, sample_format, seed, fim)
    return build_splits(config, kind, sizes, validation_sets=validation_sets)


class GPTSamples:
    """Samples of tokens; a split consists of sequences.

    Args:
        config: the data flags.
        sample_format: how tokens become a sample.
        seed: of the order of samples.
        fim: how the transform of the format rearranges text, and with what tokenizer, if it does.
    """

    def __init__(
        self,
        config: DataConfig,
        sample_format: SampleFormat,
        seed: int,
        fim: tuple[FimConfig, TextTokenizer] | None,
    ) -> None:
        self._config = config
        self._fim = fim
        self._format = sample_format
        self._seed = seed

    @property
    def order(self) -> Mapping[str, str | int | float]:
        """What the order of samples depends on besides the data and how it is mixed, by name."""
        return {
            "order version": ORDER_VERSION,
            "--seq-length": self._format.seq_length,
            "--seed": self._seed,
            **self._rearranged,
        }

    @property
    def _rearranged(self) -> dict[str, str | int | float]:
        if self._fim is None:
            return {}
        config, tokenizer = self._fim
        return {
            **{
                f"--{name.replace('_', '-')}": "none" if value is None else value
                for name, value in dataclasses.asdict(config).items()
            },
            "tokenizer of --fim-data": value_digest(tokenizer.identity),
        }

    def made_up(self) -> SequenceSource:
        """Sequences that count upwards."""
        return MockIndexedDataset(self._format.vocab_size, self._format.eod)

    def num_elements(self, source: SequenceSource) -> int:
        """Number of sequences."""
        return len(source)

    def digest(self, source: SequenceSource) -> str:
        """Hash of lengths and tokens: which sequences make a document does not matter."""
        return content_digest(source)

    def epoch_samples(self, part: Part, split: str) -> int:
        """Samples of a part that is gone through once."""
        return self._plan(part, split, None).samples

    def build(self, part: Part, split: str, num_samples: int | None) -> Component:
        """The samples of a part: at least so many, or those of one epoch if None."""
        plan = self._plan(part, split, num_samples)
        source, sequences = part.source, part.elements

        def build(allocate: Allocate) -> Mapping[str, npt.NDArray[Any]]:
            source.verify()
            return build_gpt_indices(
                source.sequence_lengths[sequences.start : sequences.stop],
                plan,
                first_sequence=sequences.start,
                seq_length=self._format.seq_length,
                seed=self._seed,
                allocate=allocate,
            )

        key = {
            "class": "GPTDataset",
            "version": ORDER_VERSION,
            "dataset": source.identity(),
            "num_samples": num_samples,
            "index_split": split,
            "random_seed": self._seed,
            "sequence_length": self._format.seq_length,
            "sequences": [sequences.start, sequences.stop],
            "plan": dataclasses.asdict(plan),
        }
        arrays = dataset_cache(self._config, source).get(f"GPTDataset-{split}", key, build)
        dataset = GPTDataset(source, arrays, self._format)
        laid_out = f"{plan.epochs} epochs" + (", the last apart" if plan.separate_last else "")
        return Component(dataset, plan.samples, lambda used: self._account(part, plan, used), laid_out)

    def _plan(self, part: Part, split: str, num_samples: int | None) -> EpochPlan:
        try:
            tokens = part.source.count_tokens(part.elements.start, part.elements.stop)
            return plan_epochs(tokens, self._format.seq_length, num_samples)
        except ValueError as error:
            raise ValueError(
                f"the {split} split of {part.source.prefix} is too small: {len(part.elements)} "
                f"documents with {error}; give it more data, a larger share of --split, or a share of 0"
                + ("" if split == "train" else ", or set --eval-iters 0")
            ) from None

    def _account(self, part: Part, plan: EpochPlan, used: int) -> str:
        seq_length = self._format.seq_length
        each = samples_per_epoch(plan.tokens, seq_length)
        epochs = used * seq_length / plan.tokens
        return (
            f"{part.source.prefix}: {len(part.elements):,} documents, {plan.tokens:,} tokens, "
            f"{each:,} samples an epoch; {used:,} samples wanted, {epochs:.2f} epochs "
            f"({plan.epochs:,} laid out, {plan.samples:,} samples)"
        )
