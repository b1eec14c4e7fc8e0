"""The fingerprint of training data: the same wherever it lies, another with whatever changes its order."""

import os
import shutil

import numpy as np
import pytest

from megatron.core.config import DataConfig, FimConfig
from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder, build_datasets
from megatron.core.datasets.fingerprint import BLOCK, BLOCKS, content_digest
from megatron.core.datasets.mock_dataset import MockIndexedDataset
from tests.unit.core.datasets.test_fim import Characters


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def fingerprint(*paths, seq_length=10, seed=7, samples=30, fim=None, **options):
    config = DataConfig(data_path=paths or None, **options)
    sizes = (samples, 0, 0)
    splits = build_datasets(
        config, seq_length=seq_length, seed=seed, sizes=sizes, eod=None, vocab_size=1000, fim=fim
    )
    return splits.fingerprint


def digest(prefix, **options):
    return content_digest(IndexedDataset(prefix, **options))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a", [range(50), range(60)] * 4)
    write(tmp_path / "data" / "b", [range(40)] * 8)
    return tmp_path / "data"


def paths(folder, first="1", second="3"):
    return first, str(folder / "a"), second, str(folder / "b")


def test_data_that_moved_or_was_read_otherwise_has_the_same(folder, tmp_path):
    before = fingerprint(*paths(folder), split="9,1,0")
    assert all(type(value) in (str, int, float) for value in before.values())
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved, ignore=shutil.ignore_patterns("cache"))
    os.utime(moved / "a.bin", (0, 0))
    assert fingerprint(*paths(moved, "0.5", "1.5"), split="90,10,0", mmap_bin_files=False) == before
    assert fingerprint(*paths(folder), split="9,1,0", samples=2000) == before  # the length of the run


def test_what_differs_is_named(folder):
    before = fingerprint(*paths(folder), split="9,1,0")

    def changed(now):
        return [name for name in {**before, **now} if before.get(name) != now.get(name)]

    assert changed(fingerprint(*paths(folder), split="9,1,0", seq_length=12)) == ["--seq-length"]
    assert changed(fingerprint(*paths(folder), split="9,1,0", seed=8)) == ["--seed"]
    assert changed(fingerprint(*paths(folder, "2"), split="9,1,0")) == [
        "dataset 1, weight",
        "dataset 2, weight",
    ]
    assert changed(fingerprint(*paths(folder), split="5,5,0")) == [
        "dataset 1, share for training",
        "dataset 2, share for training",
    ]
    assert changed(fingerprint(*paths(folder), split="9,1,0", mid_level_dataset_surplus=0.1)) == [
        "--mid-level-dataset-surplus"
    ]
    rearranged = fingerprint(*paths(folder), split="9,1,0", fim=(FimConfig(fim_data=True), Characters()))
    assert set(changed(rearranged)) >= {"--fim-rate", "--fim-spm-rate", "--fim-prefix-token"}
    other = Characters()
    other.identity = {"type": "Characters", "sha256": "another"}
    again = fingerprint(*paths(folder), split="9,1,0", fim=(FimConfig(fim_data=True), other))
    assert {name for name in rearranged if rearranged[name] != again[name]} == {"tokenizer of --fim-data"}
    content = np.fromfile(folder / "b.bin", np.uint16)
    content[123] += 1
    content.tofile(folder / "b.bin")
    assert changed(fingerprint(*paths(folder), split="9,1,0")) == ["dataset 2, content"]
    assert before["dataset 2, share for training"] == "0 to 7 of 8"


def test_other_lengths_types_and_tokens_give_another_digest(tmp_path):
    written = [
        write(tmp_path / "a", [[1, 2], [3]]),
        write(tmp_path / "b", [[1], [2, 3]]),
        write(tmp_path / "c", [[1, 2], [3]], np.int32),
        write(tmp_path / "d", [[1, 2], [4]]),
        write(tmp_path / "e", [[1, 2], [3, 4]]),
    ]
    assert len({digest(prefix) for prefix in written}) == len(written)
    again = write(tmp_path / "f", [[1, 2], [], [3]])
    assert digest(again) == digest(written[0])  # an empty document is no sequence
    assert content_digest(IndexedDataset(again), documents=True) != content_digest(
        IndexedDataset(written[0]), documents=True
    )


def test_of_a_long_file_the_first_and_last_token_and_blocks_between_are_seen(tmp_path):
    count = 40 * BLOCKS * BLOCK
    prefix = write(tmp_path / "a", [np.zeros(count, np.uint16)])
    before = digest(prefix)
    assert digest(prefix, mmap=False) == before
    tokens = np.memmap(tmp_path / "a.bin", np.uint16, "r+")
    seventh = 7 * (count - BLOCK) // (BLOCKS - 1)
    for place, seen in (
        (0, True),
        (count - 1, True),
        (seventh, True),
        (seventh + BLOCK - 1, True),
        (seventh + BLOCK, False),
    ):
        tokens[place] = 1
        assert (digest(prefix) != before) is seen
        tokens[place] = 0
    assert digest(prefix) == before


def test_made_up_data_has_one_too():
    found = fingerprint(mock_data=True)
    assert found["dataset 1, name"] == "mock data"
    assert found["dataset 1, content"] == content_digest(MockIndexedDataset(1000, None))
    assert found["dataset 1, content"] != content_digest(MockIndexedDataset(999, None))
