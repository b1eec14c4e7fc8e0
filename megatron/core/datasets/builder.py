"""From the data flags to the datasets of training, validation and test, whatever kind of samples they hold.

What all kinds share is here: which files, which part of them is whose, how they are mixed, and the account of
it all. A :class:`SampleKind` knows the rest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from torch.utils.data import Dataset

from megatron.core.config import DataConfig
from megatron.core.datasets.blend import (
    Blend,
    BlendedDataset,
    blend_indices,
    exhaustive_indices,
    normalize,
)
from megatron.core.datasets.data_paths import read_path_files, split_blends
from megatron.core.datasets.gpt_dataset import Sample, SequenceSource
from megatron.core.datasets.index_cache import Build, IndexArrays, IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.split import (
    DEFAULT_MOCK_SPLIT,
    DEFAULT_SPLIT,
    SPLIT_NAMES,
    parse_split,
    split_ranges,
)

BLEND_VERSION: Final = 1
"""Part of every cache key of a blend; to be raised with any change to its order."""


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
        fingerprint: what the order of training samples depends on but the length of the run, by name: plain
            values that are the same wherever the files lie. See :func:`content_digest` for what it can't see.
        laid_out: what of each training dataset is shuffled together, which the length of the run decides.
    """

    train: Dataset[Sample] | None
    valid: Dataset[Sample] | None
    test: Dataset[Sample] | None
    description: tuple[str, ...]
    valid_sets: tuple[tuple[str, Dataset[Sample]], ...] = ()
    fingerprint: Mapping[str, str | int | float] = field(default_factory=dict)
    laid_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What of one dataset belongs to one split."""

    source: SequenceSource
    elements: range
    """Consecutive numbers of what a split consists of: sequences or documents."""


@dataclass(frozen=True)
class Component:
    """The samples of one part."""

    dataset: Dataset[Sample]
    samples: int
    account: Callable[[int], str]
    """What the part holds and what becomes of it if so many samples are drawn, in words."""
    laid_out: str
    """What is shuffled together, in words: with other words the order is another."""


class SampleKind(Protocol):
    """One way to make samples of sequences."""

    @property
    def order(self) -> Mapping[str, str | int | float]:
        """What the order of samples depends on besides the data and how it is mixed, by name."""

    def made_up(self) -> SequenceSource:
        """What --mock-data stands for."""

    def num_elements(self, source: SequenceSource) -> int:
        """Into how many elements a dataset can be divided."""

    def digest(self, source: SequenceSource) -> str:
        """Hash of what the samples of a dataset are made of."""

    def epoch_samples(self, part: Part, split: str) -> int:
        """Samples of a part that is gone through once.

        Raises:
            ValueError: if there are none, naming split and numbers.
        """

    def build(self, part: Part, split: str, num_samples: int | None) -> Component:
        """The samples of a part: at least so many, or those of one epoch if None."""


def build_splits(
    config: DataConfig, kind: SampleKind, sizes: Sequence[int | None], *, validation_sets: bool = False
) -> DatasetSplits:
    """Build the datasets that the flags describe. Any rank may call it, at any time; none waits for another.

    Args:
        config: the data flags.
        kind: what the samples are.
        sizes: samples asked of training, validation and test; None for each sample once. A split of which
            none are asked is not built.
        validation_sets: keep the validation datasets apart, each of so many samples.

    Raises:
        ValueError: if the files or the flags can't give the samples, naming flag, split and numbers.
    """
    config = read_path_files(config)
    blends = split_blends(config, validation_sets=validation_sets)
    sources = _open_sources(config, blends, kind)
    built: dict[str, Dataset[Sample]] = {}
    sets: tuple[tuple[str, Dataset[Sample]], ...] = ()
    fingerprint: dict[str, str | int | float] = {}
    laid_out: dict[str, str] = {}
    description: list[str] = []
    for position, (name, size) in enumerate(zip(SPLIT_NAMES, sizes, strict=True)):
        blend = blends[name]
        if blend is None or size == 0:
            description.append(f"{name}: not built, {'no data' if blend is None else 'no samples asked for'}")
            continue
        parts = _split_parts(config, kind, position, [sources[prefix] for prefix in blend.prefixes])
        if parts is None:
            description.append(f"{name}: not built, its share of --split is zero")
            continue
        builder = _SplitBuilder(name, config, kind)
        if name == "valid" and validation_sets:
            sets = builder.build_apart(parts, blend.weights, size)
        else:
            built[name] = builder.build(parts, blend.weights, size)
        description.extend(builder.description)
        if name == "train":
            fingerprint = _fingerprint(config, kind, parts, blend.weights)
            laid_out = {f"dataset {place}": text for place, text in enumerate(builder.laid_out, start=1)}
    return DatasetSplits(
        built.get("train"),
        built.get("valid"),
        built.get("test"),
        tuple(description),
        sets,
        fingerprint,
        laid_out,
    )


def dataset_cache(config: DataConfig, source: SequenceSource) -> IndexCache:
    """Where the index of a dataset is kept: in the folder that was chosen, or beside the dataset."""
    if config.data_cache_path is not None or config.mock_data:
        return _chosen_cache(config)
    return IndexCache(Path(source.prefix).parent / "cache", required=False)


def _chosen_cache(config: DataConfig) -> IndexCache:
    path = config.data_cache_path
    return IndexCache(None if path is None else Path(path), required=True)


def _open_sources(
    config: DataConfig, blends: Mapping[str, Blend | None], kind: SampleKind
) -> dict[str, SequenceSource]:
    if config.mock_data:
        mock = kind.made_up()
        return {mock.prefix: mock}
    sources: dict[str, SequenceSource] = {}
    for prefix in dict.fromkeys(prefix for blend in blends.values() if blend for prefix in blend.prefixes):
        dataset = IndexedDataset(prefix, mmap=config.mmap_bin_files)
        if dataset.dtype.kind == "f":
            raise ValueError(f"{prefix}: holds {dataset.dtype.name} numbers, which are no tokens")
        sources[prefix] = dataset
    return sources


def _split_parts(
    config: DataConfig, kind: SampleKind, position: int, sources: list[SequenceSource]
) -> list[Part] | None:
    """What belongs to a split of each of its datasets; None if its share is zero."""
    if not (config.data_path or config.mock_data):
        return [Part(source, range(kind.num_elements(source))) for source in sources]
    shares = parse_split(config.split or (DEFAULT_MOCK_SPLIT if config.mock_data else DEFAULT_SPLIT))
    parts = []
    for source in sources:
        elements = split_ranges(kind.num_elements(source), shares)[position]
        if elements is None:
            return None
        parts.append(Part(source, elements))
    return parts


def _fingerprint(
    config: DataConfig, kind: SampleKind, parts: Sequence[Part], weights: Sequence[float] | None
) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {**kind.order, "datasets": len(parts)}
    if len(parts) > 1:
        found["blend order version"] = BLEND_VERSION
        found["--mid-level-dataset-surplus"] = config.mid_level_dataset_surplus
    digests: dict[str, str] = {}
    for number, part in enumerate(parts):
        source, elements = part.source, part.elements
        if source.prefix not in digests:
            digests[source.prefix] = kind.digest(source)
        whole = kind.num_elements(source)
        facts: dict[str, str | int | float] = {"name": Path(source.prefix).name}
        if len(parts) > 1:
            facts["weight"] = weights[number] if weights is not None else "by length"
        facts["share for training"] = f"{elements.start} to {elements.stop} of {whole}"
        facts["content"] = digests[source.prefix]
        found |= {f"dataset {number + 1}, {name}": value for name, value in facts.items()}
    return found


class _SplitBuilder:
    """Builds the datasets of one split, and keeps account."""

    def __init__(self, name: str, config: DataConfig, kind: SampleKind) -> None:
        self.name = name
        self.config = config
        self.kind = kind
        self.description: list[str] = []
        self.laid_out: list[str] = []

    def build(
        self, parts: Sequence[Part], weights: tuple[float, ...] | None, size: int | None
    ) -> Dataset[Sample]:
        """The split as one dataset of at least ``size`` samples; None: of every sample once."""
        if len(parts) == 1:
            return self._alone(parts[0], size)
        if weights is None or size is None:
            return self._blended_by_length(parts, weights, size)
        # Each dataset is asked for its share, rounded up, and the blend is as long as these together.
        asked = [math.ceil(size * share) for share in weights]
        return self._blended(parts, weights, self._by_share(weights, sum(asked)), asked, "by weight")

    def build_apart(
        self, parts: Sequence[Part], weights: tuple[float, ...] | None, size: int | None
    ) -> tuple[tuple[str, Dataset[Sample]], ...]:
        """Each part by itself, named by the end of its path, or by all of it where two share that."""
        if weights is not None:
            self.description.append(f"{self.name}: each dataset by itself; weights have no effect")
        prefixes = [part.source.prefix for part in parts]
        names = [Path(prefix).name for prefix in prefixes]
        if len(set(names)) < len(names):
            names = prefixes
        return tuple((name, self._alone(part, size)) for name, part in zip(names, parts, strict=True))

    def _alone(self, part: Part, size: int | None) -> Dataset[Sample]:
        component = self.kind.build(part, self.name, size)
        self.laid_out.append(component.laid_out)
        wanted = component.samples if size is None else size
        self.description.append(f"{self.name}: {component.account(wanted)}")
        return component.dataset

    def _blended_by_length(
        self, parts: Sequence[Part], weights: tuple[float, ...] | None, size: int | None
    ) -> Dataset[Sample]:
        """Each dataset counts by its length, and gives one epoch.

        Where one epoch of all is too little, those lengths serve as the weights, so that the data repeats
        evenly.
        """
        held = [self.kind.epoch_samples(part, self.name) for part in parts]
        shares = normalize([float(samples) for samples in held])
        if size is None:
            how = "every sample once" + ("; weights have no effect" if weights is not None else "")
            return self._blended(parts, shares, self._every_sample(held), None, how)
        asked = [math.ceil(size * share) for share in shares] if size > sum(held) else None
        return self._blended(parts, shares, self._by_share(shares, size), asked, "by length")

    def _by_share(self, shares: tuple[float, ...], size: int) -> IndexArrays:
        key = {"class": "BlendedDataset", "version": BLEND_VERSION, "weights": shares, "size": size}
        return self._blend_index(key, lambda allocate: blend_indices(shares, size))

    def _every_sample(self, held: list[int]) -> IndexArrays:
        key = {"class": "BlendedDataset", "version": BLEND_VERSION, "sizes": held}
        return self._blend_index(key, lambda allocate: exhaustive_indices(held))

    def _blend_index(self, key: Mapping[str, Any], build: Build) -> IndexArrays:
        return _chosen_cache(self.config).get(f"BlendedDataset-{self.name}", key, build)

    def _blended(
        self,
        parts: Sequence[Part],
        shares: tuple[float, ...],
        indices: IndexArrays,
        asked: list[int] | None,
        how: str,
    ) -> Dataset[Sample]:
        """A blend in a given order, of datasets of so many samples; of one epoch of each if None."""
        places = indices["dataset_index"]
        drawn = np.bincount(places, minlength=len(parts)).tolist()
        self.description.append(
            f"{self.name}: {len(places):,} samples of a blend of {len(parts)} datasets, {how}"
        )
        surplus = 1 + self.config.mid_level_dataset_surplus
        datasets = []
        for number, (part, share, draws) in enumerate(zip(parts, shares, drawn, strict=True)):
            wanted = None if asked is None else max(math.ceil(asked[number] * surplus), draws)
            component = self.kind.build(part, self.name, wanted)
            datasets.append(component.dataset)
            self.laid_out.append(component.laid_out)
            self.description.append(
                f"{self.name}: {share:.4%} of the samples from {component.account(draws)}"
            )
        return BlendedDataset(datasets, indices)
