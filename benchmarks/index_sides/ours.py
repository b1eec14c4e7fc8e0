"""This repository's side of ``benchmarks/index.py``."""

import sys

import numpy as np
from serve import serve

from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat
from megatron.core.datasets.gpt_indices import build_gpt_indices, plan_epochs
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

BATCH = 100_000


def main() -> None:
    """Serve the tasks for the dataset ``FOLDER/data``."""
    folder, seq_length, accesses, opens = sys.argv[1], *map(int, sys.argv[2:])
    data = IndexedDataset(f"{folder}/data")
    ones = np.ones(BATCH, np.int64)

    def write() -> None:
        with IndexedDatasetBuilder(f"{folder}/ours", np.uint16) as builder:
            for _ in range(len(data) // BATCH):
                builder.add_many(ones, ones, ones)

    def build(epochs: int) -> dict[str, np.ndarray]:
        total = data.count_tokens(0, len(data))
        plan = plan_epochs(total, seq_length, (epochs * total - 1) // seq_length)
        assert plan.epochs == epochs
        return build_gpt_indices(data.sequence_lengths, plan, first_sequence=0, seq_length=seq_length, seed=1)

    samples = GPTDataset(data, build(1), SampleFormat(seq_length, 1000))
    places = np.random.default_rng(0).integers(0, len(samples), size=accesses).tolist()

    def access() -> None:
        for place in places:
            samples[place]

    def reopen() -> None:
        for _ in range(opens):
            IndexedDataset(f"{folder}/data")

    serve(
        {
            "write": write,
            "indices 1": lambda: build(1),
            "indices 10": lambda: build(10),
            "access": access,
            "open": reopen,
        }
    )


main()
