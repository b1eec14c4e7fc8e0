"""From the data flags to the datasets of training, validation and test."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from megatron.core.config import DataConfig
from megatron.core.datasets.blend import Blend, BlendedDataset, blend_indices, normalize, parse_blend
from megatron.core.datasets.gpt_dataset import GPTDataset, Sample, SampleFormat, SequenceSource
from megatron.core.datasets.gpt_indices import (
    Allocate,
    EpochPlan,
    build_gpt_indices,
    plan_epochs,
    samples_per_epoch,
)
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.mock_dataset import MockIndexedDataset
from megatron.core.datasets.split import (
    DEFAULT_MOCK_SPLIT,
    DEFAULT_SPLIT,
    SPLIT_NAMES,
    parse_split,
    split_ranges,
)

ORDER_VERSION: Final = 1
"""Part of every cache key; to be raised with any change to the order of samples."""


@dataclass(frozen=True)
class DatasetSplits:
    """The datasets of a run, and an account of them.

    Attributes:
        train: None if nothing was asked of it, or its share of the data is zero; so are the others.
        valid: for evaluation while training.
        test: for evaluation at the end.
        description: lines for the log: documents, tokens, samples an epoch and epochs of each split, and what
            is drawn from each component of a blend.
        valid_sets: in place of ``valid``, where validation datasets are not to be mixed: each with its name.
        fingerprint: what the order of training samples depends on, by name: plain values, wherever the files
            lie, that are equal only if the order is.
    """

    train: Dataset[Sample] | None
    valid: Dataset[Sample] | None
    test: Dataset[Sample] | None
    description: tuple[str, ...]
    valid_sets: tuple[tuple[str, Dataset[Sample]], ...] = ()
    fingerprint: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The sequences of one dataset that belong to one split."""

    source: SequenceSource
    sequences: range
    tokens: int


@dataclass(frozen=True)
class _Component:
    """A part, and how many samples are asked of it."""

    part: _Part
    num_samples: int | None
    plan: EpochPlan


def build_datasets(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    sizes: Sequence[int | None],
    eod: int | None,
    vocab_size: int,
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
    )
    blends = _split_blends(config)
    sources = _open_sources(config, blends, sample_format)
    built: dict[str, Dataset[Sample] | None] = dict.fromkeys(SPLIT_NAMES)
    description: list[str] = []
    for position, (name, size) in enumerate(zip(SPLIT_NAMES, sizes, strict=True)):
        blend = blends[position]
        if blend is None or size == 0:
            description.append(f"{name}: not built, {'no data' if blend is None else 'no samples asked for'}")
            continue
        parts = _split_parts(config, position, [sources[prefix] for prefix in blend.prefixes])
        if parts is None:
            description.append(f"{name}: not built, its share of --split is zero")
            continue
        builder = _SplitBuilder(name, config, sample_format, seed)
        built[name] = builder.build(parts, blend.weights, size)
        description.extend(builder.description)
    return DatasetSplits(built["train"], built["valid"], built["test"], tuple(description))


def _split_blends(config: DataConfig) -> list[Blend | None]:
    """The blend that each split draws on."""
    if config.mock_data:
        return [Blend((MockIndexedDataset.prefix,), None)] * len(SPLIT_NAMES)
    if config.data_path:
        return [parse_blend(config.data_path, "--data-path")] * len(SPLIT_NAMES)
    paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if not any(paths):
        raise ValueError("no data: give --data-path, --train-data-path and its like, or --mock-data")
    if config.split is not None:
        raise ValueError(
            f"--split {config.split} divides --data-path; with --train-data-path and its like, leave it out"
        )
    return [
        parse_blend(path, f"--{name}-data-path") if path else None
        for name, path in zip(SPLIT_NAMES, paths, strict=True)
    ]


def _open_sources(
    config: DataConfig, blends: Sequence[Blend | None], sample_format: SampleFormat
) -> dict[str, SequenceSource]:
    if config.mock_data:
        mock = MockIndexedDataset(sample_format.vocab_size, sample_format.eod)
        return {mock.prefix: mock}
    sources: dict[str, SequenceSource] = {}
    for prefix in dict.fromkeys(prefix for blend in blends if blend for prefix in blend.prefixes):
        dataset = IndexedDataset(prefix)
        if dataset.dtype.kind == "f":
            raise ValueError(f"{prefix}: holds {dataset.dtype.name} numbers, which are no tokens")
        sources[prefix] = dataset
    return sources


def _split_parts(config: DataConfig, position: int, sources: list[SequenceSource]) -> list[_Part] | None:
    """What belongs to a split of each of its datasets; None if its share is zero."""
    if not (config.data_path or config.mock_data):
        return [_part(source, range(len(source))) for source in sources]
    shares = parse_split(config.split or (DEFAULT_MOCK_SPLIT if config.mock_data else DEFAULT_SPLIT))
    parts = []
    for source in sources:
        sequences = split_ranges(len(source), shares)[position]
        if sequences is None:
            return None
        parts.append(_part(source, sequences))
    return parts


def _part(source: SequenceSource, sequences: range) -> _Part:
    lengths = source.sequence_lengths[sequences.start : sequences.stop]
    return _Part(source, sequences, int(lengths.sum(dtype=np.int64)))


class _SplitBuilder:
    """Builds the dataset of one split, and keeps account."""

    def __init__(self, name: str, config: DataConfig, sample_format: SampleFormat, seed: int) -> None:
        self.name = name
        self.config = config
        self.sample_format = sample_format
        self.seed = seed
        self.description: list[str] = []

    def build(
        self, parts: list[_Part], weights: tuple[float, ...] | None, size: int | None
    ) -> Dataset[Sample]:
        """The split as one dataset of at least ``size`` samples; None: of every sample once."""
        if len(parts) == 1:
            component = self._component(parts[0], size)
            wanted = component.plan.samples if size is None else size
            self.description.append(f"{self.name}: {self._account(component, wanted)}")
            return self._dataset(component)
        return self._blended(parts, weights, size)

    def _blended(
        self, parts: list[_Part], weights: tuple[float, ...] | None, size: int | None
    ) -> Dataset[Sample]:
        if weights is None or size is None:
            # Without weights each dataset counts by its length, and gives one epoch. Where one epoch of all
            # is too little, those lengths serve as the weights, so that the data repeats evenly.
            held = [self._component(part, None).plan.samples for part in parts]
            shares = normalize([float(samples) for samples in held])
            asked: list[int | None] = [None] * len(parts)
            size = sum(held) if size is None else size
            if size > sum(held):
                asked = [math.ceil(size * share) for share in shares]
        else:
            shares = weights
            asked = [math.ceil(size * share) for share in shares]
            size = sum(math.ceil(size * share) for share in shares)
        indices = self._chosen_cache().get(
            f"BlendedDataset-{self.name}",
            {"class": "BlendedDataset", "version": ORDER_VERSION, "weights": shares, "size": size},
            lambda allocate: blend_indices(shares, size),
        )
        drawn = np.bincount(indices["dataset_index"], minlength=len(parts)).tolist()
        surplus = 1 + self.config.mid_level_dataset_surplus
        components = []
        kind = "by length" if weights is None else "by weight"
        self.description.append(f"{self.name}: {size:,} samples of a blend of {len(parts)} datasets, {kind}")
        for part, share, samples, draws in zip(parts, shares, asked, drawn, strict=True):
            wanted = None if samples is None else max(math.ceil(samples * surplus), draws)
            components.append(self._component(part, wanted))
            self.description.append(
                f"{self.name}: {share:.4%} of the samples from {self._account(components[-1], draws)}"
            )
        return BlendedDataset([self._dataset(component) for component in components], indices)

    def _component(self, part: _Part, num_samples: int | None) -> _Component:
        try:
            plan = plan_epochs(part.tokens, self.sample_format.seq_length, num_samples)
        except ValueError as error:
            raise ValueError(
                f"the {self.name} split of {part.source.prefix} is too small: {len(part.sequences)} "
                f"documents with {error}; give it more data, a larger share of --split, or a share of 0"
                + ("" if self.name == "train" else ", or set --eval-iters 0")
            ) from None
        return _Component(part, num_samples, plan)

    def _account(self, component: _Component, used: int) -> str:
        part, plan = component.part, component.plan
        seq_length = self.sample_format.seq_length
        each = samples_per_epoch(part.tokens, seq_length)
        epochs = used * seq_length / part.tokens
        return (
            f"{part.source.prefix}: {len(part.sequences):,} documents, {part.tokens:,} tokens, "
            f"{each:,} samples an epoch; {used:,} samples wanted, {epochs:.2f} epochs "
            f"({plan.epochs:,} laid out, {plan.samples:,} samples)"
        )

    def _dataset(self, component: _Component) -> GPTDataset:
        part, seq_length = component.part, self.sample_format.seq_length
        source, sequences = part.source, part.sequences

        def build(allocate: Allocate) -> Mapping[str, npt.NDArray[Any]]:
            return build_gpt_indices(
                source.sequence_lengths[sequences.start : sequences.stop],
                component.plan,
                first_sequence=sequences.start,
                seq_length=seq_length,
                seed=self.seed,
                allocate=allocate,
            )

        key = {
            "class": "GPTDataset",
            "version": ORDER_VERSION,
            "dataset": source.identity(),
            "num_samples": component.num_samples,
            "index_split": self.name,
            "random_seed": self.seed,
            "sequence_length": seq_length,
            "sequences": [sequences.start, sequences.stop],
            "plan": dataclasses.asdict(component.plan),
        }
        arrays = self._dataset_cache(source).get(f"GPTDataset-{self.name}", key, build)
        return GPTDataset(source, arrays, self.sample_format)

    def _dataset_cache(self, source: SequenceSource) -> IndexCache:
        if self.config.data_cache_path is not None or self.config.mock_data:
            return self._chosen_cache()
        return IndexCache(Path(source.prefix).parent / "cache", required=False)

    def _chosen_cache(self) -> IndexCache:
        path = self.config.data_cache_path
        return IndexCache(None if path is None else Path(path), required=True)
