"""Megatron Core's BERT samples: all samples of given datasets.

    python megatron_core_bert.py CASE.json...

A program of its own, run with Megatron Core's folder alone on PYTHONPATH and outside this repository, since
both packages are called ``megatron``. Each case names a dataset's prefix, documents, and options; beside it a
file CASE.npz comes to lie with ``sample_index`` and, stacked over the samples, every array of a sample.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.utils import Split

from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset


class Tokenizer:
    """Ids 0 to v - 1; the vocabulary's words are numbers, some of which continue the word before."""

    def __init__(self, case: dict) -> None:
        self.cls, self.sep, self.mask, self.pad = case["cls"], case["sep"], case["mask"], case["pad"]
        self.eod = self.eos = self.sep
        continuing = set(case["continuing"])
        self.inv_vocab = {i: f"##{i}" if i in continuing else str(i) for i in range(case["vocab_size"])}
        self.unique_identifiers = {"class": "Tokenizer"}


def samples(path: Path, cache: str) -> None:
    case = json.loads(path.read_text())
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=([case["prefix"]], None),
        split="1,0,0",
        path_to_cache=f"{cache}/{path.stem}",
        tokenizer=Tokenizer(case),
        masking_probability=case["mask_prob"],
        short_sequence_probability=case["short_seq_prob"],
        masking_max_ngram=case["max_ngram"],
        masking_do_full_word=case["whole_word"],
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=case["binary_head"],
    )
    dataset = BERTMaskedWordPieceDataset(
        IndexedDataset(case["prefix"]),
        case["prefix"],
        np.arange(*case["documents"], dtype=np.int32),
        case["num_samples"],
        Split.train,
        config,
    )
    given = [dataset[i] for i in range(min(len(dataset), case["given"]))]
    arrays = {name: np.stack([sample[name] for sample in given]) for name in given[0]}
    np.savez(path.with_suffix(".npz"), sample_index=dataset.sample_index, **arrays)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        store = dist.FileStore(f"{scratch}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for path in map(Path, sys.argv[1:]):
            samples(path, scratch)
        dist.destroy_process_group()


main()
