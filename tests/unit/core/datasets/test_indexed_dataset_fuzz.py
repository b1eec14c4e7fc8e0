"""Any documents come back as they were written; no cut and no changed bit of a header goes unnoticed."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.index_format import DTYPES
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

HEADER_BYTES = 34
KIND = st.sampled_from(sorted(DTYPES))


def numbers(dtype):
    """What a token of a type may be."""
    if dtype.kind == "f":
        return st.floats(width=8 * dtype.itemsize, allow_nan=False)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def corpora(draw, min_tokens=0):
    """A token type, and documents as lists of sequences of tokens; sequences may be empty."""
    dtype = DTYPES[draw(KIND)]
    sequence = st.lists(numbers(dtype), max_size=5)
    documents = draw(st.lists(st.lists(sequence, max_size=4), max_size=12))
    if sum(len(tokens) for document in documents for tokens in document) < min_tokens:
        documents.append([[1] * min_tokens])
    return dtype, documents


def write(prefix, dtype, documents):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            flat = np.array([token for tokens in document for token in tokens], dtype)
            builder.add_document(flat, [len(tokens) for tokens in document])


def check_reads_equal(dtype, documents, mmap):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "a")
        write(prefix, dtype, documents)
        dataset = IndexedDataset(prefix, mmap=mmap)
        dataset.verify()
        sequences = [tokens for document in documents for tokens in document]
        assert dataset.dtype == dtype
        assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
        counts = [0, *np.cumsum([len(document) for document in documents], dtype=int).tolist()]
        assert dataset.document_indices.tolist() == counts


@given(corpora(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_documents_of_any_type_are_read_as_written(corpus, mmap):
    check_reads_equal(*corpus, mmap)


@pytest.mark.nightly
@given(corpora(), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_many_documents_of_any_type_are_read_as_written(corpus, mmap):
    check_reads_equal(*corpus, mmap)


def refused(prefix, content):
    """Whether an index with this content is refused, and the message names a file of the pair."""
    Path(f"{prefix}.idx").write_bytes(content)
    message = None
    try:
        IndexedDataset(prefix)
    except ValueError as error:
        message = str(error)
    assert message is None or message.startswith((f"{prefix}.idx: ", f"{prefix}.bin: ")), message
    return message is not None


def check_damage_is_refused(dtype, documents, cuts, bits):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "a")
        write(prefix, dtype, documents)
        content = Path(f"{prefix}.idx").read_bytes()
        tokens = Path(f"{prefix}.bin").read_bytes()
        for cut in cuts(len(content)):
            assert refused(prefix, content[:cut]), cut
        for place in range(HEADER_BYTES):
            for bit in bits:
                changed = bytearray(content)
                changed[place] ^= bit
                assert refused(prefix, bytes(changed)), (place, bit)
        for cut in cuts(len(tokens)):
            Path(f"{prefix}.bin").write_bytes(tokens[:cut])
            assert refused(prefix, content), cut


@given(corpora(min_tokens=1), st.data())
@settings(max_examples=10, deadline=None)
def test_any_cut_and_any_changed_bit_of_a_header_is_refused(corpus, data):
    bit = data.draw(st.integers(0, 7))
    some = lambda size: {0, size - 1, data.draw(st.integers(0, size - 1))}  # noqa: E731
    check_damage_is_refused(*corpus, some, [1 << bit])


@pytest.mark.nightly
@given(corpora(min_tokens=1))
@settings(max_examples=25, deadline=None)
def test_every_cut_and_every_changed_bit_of_a_header_is_refused(corpus):
    check_damage_is_refused(*corpus, range, [*(1 << bit for bit in range(8)), 0xFF])


def test_every_changed_byte_of_a_header_is_refused_or_leaves_the_tokens_alone(tmp_path):
    """All other values of the bytes that matter most. Only the type's sign may change."""
    write(tmp_path / "a", np.dtype("<u2"), [[[1, 2, 3]], [], [[4, 5, 6, 7, 8], [9, 10]]])
    content = (tmp_path / "a.idx").read_bytes()
    kept = []
    for place in range(HEADER_BYTES):
        near = {content[place] ^ change for change in (1, 2, 4, 8, 16, 32, 64, 128, 255)}
        for value in (near if place not in (17, 18, 26) else set(range(256))) - {content[place]}:
            changed = content[:place] + bytes([value]) + content[place + 1 :]
            if not refused(tmp_path / "a", changed):
                kept.append((place, value))
    assert kept == [(17, 3)]  # int16 for uint16: the same bytes, the same ids below 32,768
    assert content[17] == 8


def test_a_count_that_fits_both_ends_is_refused(tmp_path):
    """26 sequences read as 24 with modes: a file made so that sizes, ends and the last sequence fit."""
    lengths = [*[0] * 23, 5, 0, 0]
    documents = [0, *range(1, 25), 25, 26, 26]
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        builder.add_many(np.arange(5), lengths, np.diff(documents))
    content = bytearray((tmp_path / "a.idx").read_bytes())
    assert not refused(tmp_path / "a", bytes(content))
    assert content[18] == 26
    content[18] = 24
    assert refused(tmp_path / "a", bytes(content))


@pytest.mark.parametrize("sequences", range(1, 40))
def test_counts_that_could_be_read_as_modes_are_refused(tmp_path, sequences):
    """12 S + 8 D bytes may also be 13 S' + 8 D, or 13 S + 8 D': where the sizes fit, the ends must not."""
    documents = [*range(sequences + 1), sequences, sequences]  # two empty ones last
    arrays = (
        struct.pack(f"<{sequences}i", *[1] * sequences)
        + struct.pack(f"<{sequences}q", *range(0, 2 * sequences, 2))
        + struct.pack(f"<{len(documents)}q", *documents)
    )
    (tmp_path / "a.bin").write_bytes(bytes(2 * sequences))
    for modes in (b"", bytes(sequences)):
        for counted in range(1, 60):
            for entries in range(1, 60):
                header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, counted, entries)
                right = (counted, entries) == (sequences, len(documents))
                if len(arrays + modes) in (12 * counted + 8 * entries, 13 * counted + 8 * entries):
                    assert refused(tmp_path / "a", header + arrays + modes) is not right
