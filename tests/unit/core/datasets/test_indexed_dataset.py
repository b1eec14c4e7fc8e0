"""The two files of a dataset: bytes computed by hand, damage told apart, mistakes in the prefix explained."""

import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from megatron.core.datasets import index_format
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, best_dtype

GOLDEN_INDEX = bytes.fromhex(
    "4d4d494449445800 00 0100000000000000 08 0300000000000000 0300000000000000"
    "03000000 05000000 02000000"
    "0000000000000000 0600000000000000 1000000000000000"
    "0000000000000000 0100000000000000 0300000000000000"
)


def write_golden(prefix):
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1, 2, 3])
        builder.add_document([4, 5, 6, 7, 8, 9, 10], [5, 2])
    return prefix


def index_bytes(lengths, documents, *, magic=b"MMIDIDX\0\0", version=1, code=8, itemsize=2, offsets=None):
    """An index packed field by field, independently of the builder."""
    if offsets is None:
        offsets = [itemsize * sum(lengths[:i]) for i in range(len(lengths))]
    return (
        magic
        + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *offsets)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def test_golden_file_byte_for_byte(tmp_path):
    write_golden(tmp_path / "golden")
    assert (tmp_path / "golden.idx").read_bytes() == GOLDEN_INDEX
    assert (tmp_path / "golden.bin").read_bytes() == struct.pack("<10H", *range(1, 11))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden.bin", "golden.idx"]


def test_many_documents_at_once_give_the_same_bytes(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "many", np.uint16) as builder:
        builder.add_many(np.arange(1, 11), [3, 5, 2], [1, 2])
    assert (tmp_path / "many.idx").read_bytes() == GOLDEN_INDEX


def test_reads_whole_sequences_and_slices(tmp_path):
    dataset = IndexedDataset(write_golden(tmp_path / "golden"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    assert dataset.get(1, 2).tolist() == [6, 7, 8]
    assert dataset.get(1, 1, 3).tolist() == [5, 6, 7]
    assert dataset.get(1, 5).tolist() == []
    assert dataset.dtype == np.uint16
    assert (dataset.num_documents, dataset.num_sequences, dataset.num_tokens) == (2, 3, 10)
    assert dataset.tokens(2, 4).tolist() == [3, 4, 5, 6]
    for arguments in ((3,), (-1,), (0, 4), (0, 0, 4), (0, 2, -1)):
        with pytest.raises(IndexError, match="golden"):
            dataset.get(*arguments)


def test_pickled_dataset_maps_its_files_anew(tmp_path):
    pickled = pickle.dumps(IndexedDataset(write_golden(tmp_path / "golden")))
    assert len(pickled) < 500
    assert pickle.loads(pickled)[2].tolist() == [9, 10]


def test_offsets_exclude_their_own_sequence(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", np.int32) as builder:
        for length in (2, 5, 1):
            builder.add_document(np.zeros(length, np.int32))
    raw = (tmp_path / "a.idx").read_bytes()
    assert struct.unpack_from("<3q", raw, 34 + 3 * 4) == (0, 2 * 4, 7 * 4)


def test_offsets_beyond_two_gibibytes(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "big", np.int32) as builder:
        builder._lengths.extend([2**30] * 3)  # as if 12 GiB of tokens had been written
        builder._documents.extend([1, 2, 3])
    raw = (tmp_path / "big.idx").read_bytes()
    assert struct.unpack_from("<3q", raw, 34 + 3 * 4) == (0, 4294967296, 8589934592)
    with (tmp_path / "big.bin").open("r+b") as tokens:
        tokens.truncate(3 * 2**32)  # sparse: takes no space
        tokens.seek(-32, 2)
        tokens.write(np.arange(8, dtype="<i4").tobytes())
    dataset = IndexedDataset(tmp_path / "big")
    assert dataset.get(2, 2**30 - 8).tolist() == list(range(8))
    assert dataset.get(1, 0, 3).tolist() == [0, 0, 0]


def test_empty_documents_have_an_entry_and_no_sequence(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for tokens in ([], [7], [], [8, 9]):
            builder.add_document(tokens)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.document_indices.tolist() == [0, 0, 1, 1, 2]
    assert dataset.sequence_lengths.tolist() == [1, 2]


def test_dataset_without_a_token_can_be_opened(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "none", np.uint16) as builder:
        builder.add_document([])
    dataset = IndexedDataset(tmp_path / "none")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 1, 0)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (6, "f8"), (7, "f4"), (8, "u2")],
)
def test_every_token_type(tmp_path, code, dtype):
    with IndexedDatasetBuilder(tmp_path / "a", dtype) as builder:
        builder.add_document([1, 2, 100])
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2, 100]


def test_token_type_by_vocabulary():
    assert best_dtype(65499) == np.uint16
    assert best_dtype(65500) == np.int32


@pytest.mark.parametrize("tokens", [[65536], [-1], [0.5], np.array([70000])])
def test_token_that_does_not_fit_is_refused(tmp_path, tokens):
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    with pytest.raises(ValueError, match="do not fit uint16"):
        builder.add_document(tokens)
    builder.discard()


def test_lengths_that_do_not_add_up_are_refused(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "a", np.uint16)
    with pytest.raises(ValueError, match="3 tokens and 2 sequences, but the lengths add up to 4"):
        builder.add_document([1, 2, 3], [2, 2])
    with pytest.raises(ValueError, match="the documents to 1 sequences"):
        builder.add_many([1, 2, 3], [2, 1], [1])
    builder.discard()


def test_failure_leaves_the_older_dataset_alone(tmp_path):
    write_golden(tmp_path / "a")
    with (
        pytest.raises(ValueError, match="do not fit"),
        IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder,
    ):
        builder.add_many([5, 70000], [1, 1], [1, 1])
    assert (tmp_path / "a.idx").read_bytes() == GOLDEN_INDEX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_rewriting_replaces_both_files(tmp_path):
    write_golden(tmp_path / "a")
    with IndexedDatasetBuilder(tmp_path / "a", np.int32) as builder:
        builder.add_document([5])
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [5]


def test_memory_of_two_million_small_documents(tmp_path):
    count, batch = 2_000_000, 100_000
    tracemalloc.start()
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        ones = np.ones(batch, np.int64)
        for _ in range(count // batch):
            builder.add_many(ones, ones, ones)
        before_finish, _ = tracemalloc.get_traced_memory()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert before_finish < 20 * count
    assert peak < 50 * count
    assert len(IndexedDataset(tmp_path / "a")) == count


DAMAGE = {
    "magic": (index_bytes([2], [0, 1], magic=b"TNTIDX\0\0\0"), "starts with b'TNTIDX.*index starts with"),
    "version": (index_bytes([2], [0, 1], version=2), "version 2 .*only version 1"),
    "type": (index_bytes([2], [0, 1], code=9), "type code 9 is none of 1 uint8"),
    "short header": (index_bytes([2], [0, 1])[:30], "30 bytes, but the header alone has 34"),
    "cut off": (index_bytes([2], [0, 1])[:-1], r"61 bytes, but its header .* makes 62"),
    "document end": (index_bytes([2], [0, 2]), "document index ends with 2; .* number of sequences, 1"),
    "document start": (index_bytes([2], [1, 1]), "document index starts with 1; it must start with 0"),
    "no documents": (index_bytes([2], []), "document index is empty"),
    "negative length": (index_bytes([3, -1], [0, 2]), "sequence 1 has the negative length -1"),
    "first offset": (
        index_bytes([1, 1], [0, 2], offsets=[2, 4]),
        "sequence 0 is said to lie at byte 2, .* byte 0",
    ),
    "last offset": (
        index_bytes([2, 0], [0, 2], offsets=[0, 2]),
        "sequence 1 is said to lie at byte 2, .* byte 4",
    ),
    "documents as modes": (
        index_bytes([1, 1, 0, 0, 0, 0, 0, 0], [0, 2]) + struct.pack("<q", 8),
        "document index ends with 2; .* number of sequences, 8",
    ),
    "one document too few": (
        index_bytes([1, 1, 0, 0, 0, 0, 0, 0], [0, 8]) + struct.pack("<q", 8),
        "counts 2 document-index entries, but 1 more, all 8, follow",
    ),
    "tokens": (index_bytes([3], [0, 1]), r"4 bytes, but .* describes 6 \(3 tokens of 2 bytes\)"),
}


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_apart_on_opening(tmp_path, name, mmap):
    content, message = DAMAGE[name]
    (tmp_path / "a.idx").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(ValueError, match=rf"{tmp_path}/a\..*{message}"):
        IndexedDataset(tmp_path / "a", mmap=mmap)


DEEP_DAMAGE = {
    "document order": (index_bytes([1, 1], [0, 2, 1, 2]), "falls from 2 to 1 at document 2"),
    "negative length": (index_bytes([3, -2, 1], [0, 3]), "sequence 1 has the negative length -2"),
    "offset": (
        index_bytes([1, 0, 1], [0, 3], offsets=[0, 4, 2]),
        "sequence 1 is said to lie at byte 4, .* byte 2",
    ),
    "offset back": (
        index_bytes([0, 2, 0], [0, 3], offsets=[0, 0, 4]),
        None,
    ),
}


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
@pytest.mark.parametrize("name", DEEP_DAMAGE)
def test_damage_inside_is_found_by_the_whole_walk(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(index_format, "CHUNK", chunk)
    content, message = DEEP_DAMAGE[name]
    (tmp_path / "a.idx").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0")
    dataset = IndexedDataset(tmp_path / "a")
    if message is None:  # an index that is right
        dataset.verify()
        return
    with pytest.raises(ValueError, match=rf"{tmp_path}/a\.idx: .*{message}"):
        dataset.verify()


def test_index_with_modes_is_read(tmp_path):
    (tmp_path / "a.idx").write_bytes(index_bytes([2], [0, 1]) + b"\0")
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0")
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]


def test_odd_number_of_bytes(tmp_path):
    write_golden(tmp_path / "a")
    with (tmp_path / "a.bin").open("ab") as tokens:
        tokens.write(b"\0")
    with pytest.raises(ValueError, match="21 bytes, which is no whole number of uint16 tokens"):
        IndexedDataset(tmp_path / "a")


PREFIX_HINTS = {
    "corpus_text_document.bin": r"without the suffix: \S*/corpus_text_document$",
    "corpus_text_document.idx": r"without the suffix: \S*/corpus_text_document$",
    "": r"That is a folder; give one of the prefixes in it: \S*/corpus_text_document$",
    "empty": "That is a folder without a dataset",
    "corpus": r"Did you mean \S*/corpus_text_document\?",
    "corpus_txt_document": r"Did you mean \S*/corpus_text_document\?",
    "corpus.jsonl": "itself a file: give the prefix that tools/preprocess_data.py made",
    "half": "Half of the pair is missing",
    "nowhere/corpus": r"There is no folder \S*/nowhere",
    "xyz": "A data path is a prefix as written by tools/preprocess_data.py",
}


@pytest.mark.parametrize("name", PREFIX_HINTS)
def test_wrong_prefix_names_both_files_and_a_way_out(tmp_path, name):
    write_golden(tmp_path / "corpus_text_document")
    (tmp_path / "corpus.jsonl").write_text("{}\n")
    (tmp_path / "half.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    prefix = f"{tmp_path}/{name}" if name else str(tmp_path)
    with pytest.raises(ValueError, match=PREFIX_HINTS[name]) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}.idx" in str(caught.value)
    assert f"{prefix}.bin" in str(caught.value)


def test_unreadable_file(tmp_path, monkeypatch):
    write_golden(tmp_path / "a")
    opened = type(tmp_path).open

    def refuse(path, *args, **kwargs):
        if path.suffix == ".bin":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(ValueError, match=r"a\.idx \(found\), \S*a\.bin \(may not be read\).*permissions"):
        IndexedDataset(tmp_path / "a")


def test_weight_without_its_prefix():
    with pytest.raises(ValueError, match="weights and prefixes must alternate"):
        IndexedDataset("0.3")
