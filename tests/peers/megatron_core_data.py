"""Megatron Core's datasets on one CPU: its files, index arrays, blends and GPT samples.

    python megatron_core_data.py FOLDER

A program of its own, run with Megatron Core's folder alone on PYTHONPATH and outside this repository, since
both packages are called ``megatron``. FOLDER holds ``cases.json`` and the datasets that it names; what comes
back is ``results.npz``, its arrays named by the case, and the datasets that it was asked to write.
"""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.utils import Split

from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

Arrays = dict[str, np.ndarray]


def write(case: dict) -> None:
    """Write documents, each a list of sequences."""
    dtype = getattr(np, case["dtype"])
    builder = IndexedDatasetBuilder(f"{case['prefix']}.bin", dtype=dtype)
    for document in case["documents"]:
        flat = [token for sequence in document for token in sequence]
        builder.add_document(np.array(flat, dtype), [len(sequence) for sequence in document])
    builder.finalize(f"{case['prefix']}.idx")


def read(case: dict) -> Arrays:
    """All that its reader says of a dataset."""
    dataset = IndexedDataset(case["prefix"], mmap=case["mmap"])
    sequences = [dataset[i] for i in range(len(dataset))]
    return {  # copies: its reader closes the mapped file, whoever still looks at it
        "lengths": dataset.sequence_lengths.copy(),
        "documents": dataset.document_indices.copy(),
        "tokens": np.concatenate(sequences),
        "parts": np.concatenate([dataset.get(i, len(s) // 3, len(s) // 2) for i, s in enumerate(sequences)]),
    }


def gpt_dataset(case: dict, source: object, kind: type = GPTDataset) -> GPTDataset:
    """Its GPT dataset on some sequences; without a blend it writes no index files."""
    tokenizer = SimpleNamespace(
        eod=case["eod"], pad=-1, vocab_size=case["vocab_size"], unique_identifiers={}, special_tokens_dict={}
    )
    config = GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        split="1,1,1",
        tokenizer=tokenizer,
        reset_position_ids=case["reset"],
        reset_attention_mask=case["reset"],
        eod_mask_loss=case["eod_mask_loss"],
        drop_last_partial_validation_sequence=not case["keep_partial"],
    )
    indices = np.arange(*case["sequences"], dtype=np.int32)
    return kind(source, "", indices, case["num_samples"], Split.valid, config)


def indices(case: dict) -> Arrays:
    """The three index arrays for sequences of which only the lengths are known."""
    lengths = np.array(case["lengths"], np.int32)
    built = gpt_dataset(case, SimpleNamespace(sequence_lengths=lengths, path_prefix=""))
    names = ("document_index", "sample_index", "shuffle_index")
    return {name: getattr(built, name) for name in names}


def samples(case: dict) -> Arrays:
    """All samples of a dataset, or the first of made-up data."""
    if case["prefix"] is None:
        tokenizer = SimpleNamespace(eod=case["eod"], vocab_size=case["vocab_size"])
        built = gpt_dataset(case, MockGPTLowLevelDataset(tokenizer), MockGPTDataset)
    else:
        built = gpt_dataset(case, IndexedDataset(case["prefix"]))
    found = [built[i] for i in range(case["count"] or len(built))]
    return {name: np.stack([sample[name].numpy() for sample in found]) for name in found[0]}


def blend(case: dict) -> Arrays:
    """The order of a blend by weights, or of one that takes every sample of every dataset once."""
    size, count = case["size"], len(case["weights"])
    dataset_index = np.zeros(size, np.int16)
    sample_index = np.zeros(size, np.int64)
    if case["exhaustive"]:
        helpers.build_exhaustive_blending_indices(
            dataset_index, sample_index, np.array(case["weights"], np.int64), count
        )
    else:
        weights = np.array(case["weights"], np.float64)
        weights = weights / np.sum(weights)
        helpers.build_blending_indices(dataset_index, sample_index, weights, count, size, False)
    return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}


def main() -> None:
    logging.disable(logging.WARNING)
    folder = Path(sys.argv[1])
    answers = {"write": write, "read": read, "indices": indices, "samples": samples, "blend": blend}
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        found = answers[case["do"]](case)
        results.update({f"{name}/{key}": array for key, array in (found or {}).items()})
    np.savez(folder / "results.npz", **results)


main()
