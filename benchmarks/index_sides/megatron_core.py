"""Megatron Core's side of ``benchmarks/index.py``; run with its folder on PYTHONPATH, not this one's."""

import logging
import sys
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.utils import Split
from serve import serve

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexWriter


def main() -> None:
    """Serve the tasks for the dataset ``FOLDER/data``."""
    logging.disable(logging.WARNING)
    folder, seq_length, accesses, opens = sys.argv[1], *map(int, sys.argv[2:])
    data = IndexedDataset(f"{folder}/data")
    total = int(data.sequence_lengths.sum(dtype=np.int64))
    lengths = [1] * len(data)  # as its builder collects them
    documents = list(range(len(data) + 1))

    def write() -> None:
        with _IndexWriter(f"{folder}/theirs.idx", np.uint16) as writer:
            writer.write(lengths, None, documents)

    config = GPTDatasetConfig(  # without a blend it writes no index files
        random_seed=1,
        sequence_length=seq_length,
        split="1,0,0",
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=1000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sequences = np.arange(len(data), dtype=np.int32)

    def build(epochs: int) -> GPTDataset:
        wanted = (epochs * total - 1) // seq_length
        return GPTDataset(data, "", sequences, wanted, Split.train, config)

    samples = build(1)
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
