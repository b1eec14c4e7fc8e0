"""Tokenized text on disk, and the samples, splits, blends and batches made of it.

Nothing here talks to another rank: each reads what it needs itself, and all come to the same samples.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from megatron.core.datasets.builder import DatasetSplits
    from megatron.core.datasets.gpt_builder import build_datasets
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

_MODULES: Final = {
    "CyclicSampler": "samplers",
    "DatasetSplits": "builder",
    "IndexedDataset": "indexed_dataset",
    "IndexedDatasetBuilder": "indexed_dataset",
    "SequentialSampler": "samplers",
    "WholeSampler": "samplers",
    "best_dtype": "indexed_dataset",
    "build_datasets": "gpt_builder",
}


def __getattr__(name: str) -> Any:
    """Load a name's module when it is asked for: torch is slow, and tools that write files need none."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
