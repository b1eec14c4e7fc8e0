"""Tokenized text on disk, and the samples, splits, blends and batches made of it.

Nothing here talks to another rank: each reads what it needs itself, and all come to the same samples.
"""

from megatron.core.datasets.builder import DatasetSplits, build_datasets
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, best_dtype
from megatron.core.datasets.samplers import CyclicSampler, SequentialSampler, WholeSampler

__all__ = [
    "CyclicSampler",
    "DatasetSplits",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "SequentialSampler",
    "WholeSampler",
    "best_dtype",
    "build_datasets",
]
