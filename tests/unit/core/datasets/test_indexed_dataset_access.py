"""Reading a dataset: mapped or by reads, beyond 2^31, after failures; and copying a dataset into another."""

import logging
import os
import pickle
import struct
import threading

import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset, token_reader
from megatron.core.datasets.index_format import DTYPES
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

DOCUMENTS = [[1, 2, 3], [], [4, 5, 6, 7, 8], [9, 10], []]


def write(prefix, dtype=np.uint16, documents=DOCUMENTS):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for tokens in documents:
            builder.add_document(tokens)
    return prefix


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_reads_of_the_file_give_what_the_mapped_file_gives(tmp_path, dtype):
    prefix = write(tmp_path / "a", dtype)
    mapped, read = IndexedDataset(prefix), IndexedDataset(prefix, mmap=False)
    assert read.num_tokens == mapped.num_tokens == 10
    for dataset in (mapped, read):
        assert dataset.dtype == dtype
        assert dataset.get(1).dtype == dtype
        assert [dataset[i].tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
        assert dataset.get(1, 2, 2).tolist() == [6, 7]
        assert dataset.get(1, 5).tolist() == []
        assert dataset.tokens(8, 100).tolist() == [9, 10]


def test_tokens_of_a_range_come_from_two_offsets(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a"))
    sums = [0, 3, 8, 10]
    for start in range(4):
        for stop in range(start, 4):
            assert dataset.count_tokens(start, stop) == sums[stop] - sums[start]
    with pytest.raises(IndexError, match="no sequences 0 to 4; there are 3"):
        dataset.count_tokens(0, 4)


def test_empty_file_can_be_read(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", documents=[[]]), mmap=False)
    assert (dataset.num_tokens, dataset.tokens(0, 5).tolist()) == (0, [])


@pytest.mark.parametrize("mmap", [True, False])
def test_unpickled_dataset_reads_as_it_did(tmp_path, mmap):
    dataset = pickle.loads(pickle.dumps(IndexedDataset(write(tmp_path / "a"), mmap=mmap)))
    assert dataset.mmap is mmap
    assert dataset[2].tolist() == [9, 10]


def test_threads_share_one_open_file(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", documents=[[n] * 50 for n in range(200)]), mmap=False)
    wrong = []

    def read(step):
        wrong.extend(n for i in range(400) if dataset[n := i * step % 200].tolist() != [n] * 50)

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_failed_read_is_tried_again_and_said(tmp_path, monkeypatch, caplog):
    dataset = IndexedDataset(write(tmp_path / "a"), mmap=False)
    waits, failures = [], [OSError(5, "Input/output error"), OSError(116, "Stale file handle")]
    plain = os.preadv

    def flaky(*args):
        if failures:
            raise failures.pop(0)
        return plain(*args)

    monkeypatch.setattr(token_reader.os, "preadv", flaky)
    monkeypatch.setattr(token_reader.time, "sleep", waits.append)
    with caplog.at_level(logging.WARNING):
        assert dataset[1].tolist() == [4, 5, 6, 7, 8]
    assert waits == [10, 20]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/a.bin: try 1 of 4 to read failed ([Errno 5] Input/output error); the next in 10 s",
        f"{tmp_path}/a.bin: try 2 of 4 to read failed ([Errno 116] Stale file handle); the next in 20 s",
    ]


def test_a_read_that_goes_on_failing_ends(tmp_path, monkeypatch):
    dataset = IndexedDataset(write(tmp_path / "a"), mmap=False)
    waits = []
    monkeypatch.setattr(token_reader.time, "sleep", waits.append)
    os.truncate(tmp_path / "a.bin", 10)
    assert dataset[0].tolist() == [1, 2, 3]
    with pytest.raises(OSError, match="ends at byte 10, but bytes up to 16 were there"):
        dataset.get(1)
    assert waits == [10, 20, 40]


def test_a_file_is_closed_with_its_dataset(tmp_path):
    prefix = write(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        IndexedDataset(prefix, mmap=False).get(0)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mmap", [True, False])
def test_more_than_two_to_the_31_sequences_and_documents(tmp_path, mmap):
    sequences, documents = 2**31 + 5, 2**31 + 9
    index = tmp_path / "a.idx"
    with index.open("wb") as file:  # sparse: 51 GB of zeros that take no space
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, documents + 1))
        file.seek(34 + 4 * (sequences - 1))
        file.write(struct.pack("<i", 3))
        file.seek(34 + 12 * sequences + 8 * documents)
        file.write(struct.pack("<q", sequences))
    (tmp_path / "a.bin").write_bytes(struct.pack("<3H", 7, 8, 9))
    dataset = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (sequences, documents, 3)
    assert dataset[sequences - 1].tolist() == [7, 8, 9]
    assert dataset[2**31 + 1].tolist() == []
    assert dataset.count_tokens(2**31, sequences) == 3
    assert dataset.document_indices[-1] == sequences


@pytest.mark.parametrize("block", [1, 7, 1 << 24])
@pytest.mark.parametrize(("own", "other"), [("u2", "u2"), ("i4", "u2"), ("u2", "i4")])
def test_a_whole_dataset_is_added_as_its_documents_would_be(tmp_path, monkeypatch, block, own, other):
    monkeypatch.setattr(indexed_dataset, "COPY_BYTES", max(block, 4))
    monkeypatch.setattr(indexed_dataset, "CHUNK", 2)
    source = write(tmp_path / "source", other)
    with IndexedDatasetBuilder(tmp_path / "whole", own) as whole:
        whole.add_document([100, 200])
        whole.add_dataset(IndexedDataset(source))
        whole.add_dataset(IndexedDataset(source, mmap=False))
        whole.add_document([300])
    write(tmp_path / "single", own, [[100, 200], *DOCUMENTS, *DOCUMENTS, [300]])
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"whole{suffix}").read_bytes() == (tmp_path / f"single{suffix}").read_bytes()


def test_a_dataset_whose_tokens_do_not_fit_is_not_added(tmp_path):
    source = IndexedDataset(write(tmp_path / "source", np.int32, [[1, 70000]]))
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    with pytest.raises(ValueError, match="tokens from 1 to 70000 do not fit uint16"):
        builder.add_dataset(source)
    builder.discard()
