"""Our BERT samples against Megatron Core's, token for token, for random data and options."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.bert_dataset import BertSampleFormat, build_bert_split
from megatron.core.datasets.bert_masking import WordMasking
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

PEER = Path(sys.prefix, "peers", "megatron_core")
PROGRAM = Path(__file__).with_name("megatron_core_bert.py")

pytestmark = pytest.mark.skipif(
    not (PEER / "megatron" / "core").is_dir(),
    reason=f"no Megatron Core in {PEER}: scripts/install_peers.sh fetches it",
)


def make_case(folder: Path, number: int) -> Path:
    """A random dataset and random options."""
    generator = np.random.default_rng(number)
    vocab_size = int(generator.choice([8, 60, 3000]))
    prefix = f"{folder}/data{number}"
    longest = int(generator.choice([4, 20, 80]))
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(25):
            lengths = generator.integers(0, longest, size=generator.integers(0, 12)).tolist()
            if lengths and generator.random() < 0.1:
                lengths[0] = 513
            # Special ids may occur in text too; padding's does not, see below.
            builder.add_document(generator.integers(1, vocab_size, size=sum(lengths)), lengths)
    case = {
        "prefix": prefix,
        "documents": [int(generator.integers(0, 5)), int(generator.integers(18, 26))],
        "num_samples": int(generator.integers(1, 150)),
        "given": 40,
        "seed": int(generator.integers(1, 2**31 - 1)),
        "seq_length": int(generator.choice([5, 16, 64, 200])),
        "vocab_size": vocab_size,
        "cls": 1,
        "sep": 2,
        "mask": 3,
        "pad": 0,
        "continuing": np.flatnonzero(generator.random(vocab_size) < 0.3).tolist(),
        "mask_prob": float(generator.choice([0.05, 0.15, 0.5, 0.9])),
        "short_seq_prob": float(generator.choice([0, 0.1, 0.4, 1])),
        "max_ngram": int(generator.integers(1, 6)),
        "whole_word": bool(generator.random() < 0.7),
        "binary_head": bool(generator.random() < 0.6),
    }
    path = folder / f"case{number}.json"
    path.write_text(json.dumps(case))
    return path


def our_dataset(case: dict):
    continues = np.isin(np.arange(case["vocab_size"]), case["continuing"])
    masking = WordMasking(
        vocab_size=case["vocab_size"],
        cls=case["cls"],
        sep=case["sep"],
        mask=case["mask"],
        continues_word=continues if case["whole_word"] else None,
        mask_prob=case["mask_prob"],
        max_ngram=case["max_ngram"],
    )
    return build_bert_split(
        IndexedDataset(case["prefix"]),
        range(*case["documents"]),
        case["num_samples"],
        name="train",
        sample_format=BertSampleFormat(
            case["seq_length"], masking, case["pad"], case["short_seq_prob"], case["binary_head"]
        ),
        seed=case["seed"],
        cache=IndexCache(None, required=False),
    ).dataset


def compare(folder: Path, cases: int) -> None:
    paths = [make_case(folder, number) for number in range(cases)]
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, paths)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PEER), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    for path in paths:
        case = json.loads(path.read_text())
        dataset = our_dataset(case)
        theirs = dict(np.load(path.with_suffix(".npz")))
        np.testing.assert_array_equal(dataset.arrays["sample_index"], theirs.pop("sample_index"))
        given = [dataset[i] for i in range(min(len(dataset), case["given"]))]
        # A random token may be that of padding. Theirs then says that there is no token; ours that there is.
        theirs["padding_mask"][(theirs["text"] == case["pad"]) & (theirs["loss_mask"] == 1)] = 1
        assert given[0].keys() == theirs.keys()
        for name, expected in theirs.items():
            np.testing.assert_array_equal(np.stack([sample[name] for sample in given]), expected, name)


def test_samples_are_those_of_megatron_core(tmp_path):
    compare(tmp_path, 20)


@pytest.mark.nightly
def test_samples_are_those_of_megatron_core_in_many_more_cases(tmp_path):
    compare(tmp_path, 400)
