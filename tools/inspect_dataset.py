#!/usr/bin/env python3
"""Say what a .bin/.idx dataset holds: documents, tokens, and how well the best context-free guess would do.

    python tools/inspect_dataset.py PREFIX [PREFIX ...]

The unigram entropy is the loss of a model that knows how frequent each token is and nothing else: a trained
model must do better.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.core.datasets import IndexedDataset
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser

_CHUNK = 1 << 24


def token_counts(dataset: IndexedDataset) -> np.ndarray:
    """How often each token id occurs, int64 [largest id + 1], read in chunks."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, dataset.num_tokens, _CHUNK):
        found = np.bincount(dataset.tokens(start, min(_CHUNK, dataset.num_tokens - start)))
        if len(found) < len(counts):
            found, counts = counts, found
        found[: len(counts)] += counts
        counts = found
    return counts


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy of the token frequencies in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def main() -> None:
    """Print a block of lines for each prefix."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("prefix", nargs="+", help="path of a dataset without .bin or .idx")
    for prefix in parser.parse_args().prefix:
        dataset = IndexedDataset(prefix)
        counts = token_counts(dataset)
        print(f"{prefix}:")
        print(f"  dtype: {dataset.dtype.name}")
        print(f"  documents: {dataset.num_documents}")
        print(f"  sequences: {dataset.num_sequences}")
        print(f"  tokens: {dataset.num_tokens}")
        print(f"  distinct tokens: {int((counts > 0).sum())}")
        print(f"  unigram entropy (nats): {unigram_entropy(counts):.4f}")


if __name__ == "__main__":
    run_as_program(main)
