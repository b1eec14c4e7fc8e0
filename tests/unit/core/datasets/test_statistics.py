"""Statistics and comparisons of datasets against NumPy on the whole data, with chunks that cut everywhere."""

import math

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder, inspection, statistics
from megatron.core.datasets.inspection import DocumentEnds, check_tokens, first_difference, locate
from megatron.core.datasets.statistics import ValueCounts

EOD = 9


def nothing(_):
    pass


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 3)
    monkeypatch.setattr(statistics, "TOKEN_CHUNK", 4)
    monkeypatch.setattr(inspection, "CHUNK", 3)


def write(prefix, documents, dtype=np.int32):
    """A dataset of documents, each a list of sequences."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            builder.add_document(tokens, [len(sequence) for sequence in document])
    return IndexedDataset(prefix)


def random_documents(seed):
    draws = np.random.default_rng(seed)
    return [
        [draws.integers(0, 9, draws.integers(0, 5)).tolist() for _ in range(draws.integers(0, 4))]
        for _ in range(40)
    ]


def counted(batches):
    counts = ValueCounts()
    for batch in batches:
        counts.add(np.asarray(batch))
    return counts


def test_values_are_counted_as_numpy_counts_them_all_at_once():
    draws = np.random.default_rng(0)
    few, wide = draws.integers(0, 50, 1000), draws.integers(-(2**31), 2**31, 100)
    counts = counted([few[:1], few[1:700], [], wide, few[700:]])
    values, times = np.unique(np.concatenate((few, wide)), return_counts=True)
    assert counts.values.tolist() == values.tolist()
    assert counts.counts.tolist() == times.tolist()


@pytest.mark.parametrize("size", [1, 2, 99, 100])
def test_quantiles_are_those_of_numpy(size):
    lengths = np.random.default_rng(size).geometric(0.02, size)
    counts = counted([lengths])
    for share in (0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1):
        assert counts.quantile(share) == pytest.approx(np.quantile(lengths, share), rel=1e-14)
    assert counts.mean == pytest.approx(lengths.mean(), rel=1e-14)


def test_bins_hold_every_length_once_and_widen():
    lengths = np.concatenate(([0, 0, 1, 2, 3], np.random.default_rng(3).geometric(0.001, 500), [2**31 - 1]))
    edges, heights = statistics.log_histogram(counted([lengths]))
    # NumPy counts what equals the last edge into the last bin; no length does.
    assert heights.tolist() == np.histogram(lengths, edges)[0].tolist()
    assert heights.sum() == len(lengths) - 2
    assert edges[0] == 1
    assert edges[-1] > 2**31 - 1
    assert (edges[1:] / edges[:-1]).max() == 2
    assert len(edges) < 4 * 31 + 2


def test_no_lengths_make_no_figures():
    assert statistics.length_summary(ValueCounts()) == {}
    assert statistics.log_histogram(ValueCounts())[1].tolist() == [0]


def test_lengths_of_documents_sequences_and_frequencies(tmp_path):
    documents = random_documents(1)
    dataset = write(tmp_path / "data", documents)
    in_documents = [sum(map(len, document)) for document in documents]
    in_sequences = [len(sequence) for document in documents for sequence in document]
    for found, expected in (
        (statistics.document_lengths(dataset), in_documents),
        (statistics.sequence_lengths(dataset), in_sequences),
    ):
        assert found.total == len(expected)
        assert dict(zip(found.values.tolist(), found.counts.tolist(), strict=True)) == {
            length: expected.count(length) for length in set(expected)
        }
    read = []
    counts = statistics.token_counts(dataset, read.append)
    tokens = [token for document in documents for sequence in document for token in sequence]
    assert sum(read) == 4 * len(tokens)
    assert counts.counts.tolist() == [tokens.count(value) for value in range(9)]
    shares = [tokens.count(value) / len(tokens) for value in range(9)]
    expected = -sum(share * math.log(share) for share in shares)
    assert statistics.unigram_entropy(counts) == pytest.approx(expected, rel=1e-12)


def test_a_token_is_found_again_among_empty_documents_and_sequences(tmp_path):
    dataset = write(tmp_path / "data", [[], [[], [1, 2], []], [], [[], [3], [4]], []])
    assert locate(dataset, 1) == "token 1 (token 1 of sequence 1, in document 1)"
    assert locate(dataset, 2) == "token 2 (token 0 of sequence 4, in document 3)"
    assert locate(dataset, 3) == "token 3 (token 0 of sequence 5, in document 3)"


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "said"),
    [
        (
            np.int32,
            None,
            "token 5 (token 0 of sequence 2, in document 2) is -1, but a token is never negative",
        ),
        (np.int32, 9, "token 2 (token 0 of sequence 1, in document 0) is 9, but the vocabulary has 9"),
        (np.int8, 300, "token 5 (token 0 of sequence 2, in document 2) is -1, but the vocabulary has 300"),
    ],
)
def test_the_first_token_outside_the_vocabulary_is_named(tmp_path, dtype, vocab_size, said):
    dataset = write(tmp_path / "data", [[[1, 2], [9, 8, 7]], [], [[-1, 10]]], dtype)
    with pytest.raises(ValueError, match="was the data made with this tokenizer") as error:
        check_tokens(dataset, vocab_size, None, nothing)
    assert said in str(error.value)


def test_ends_of_documents_are_counted(tmp_path):
    dataset = write(tmp_path / "data", [[[1, EOD]], [], [[2], [EOD]], [[EOD, 3]], [[4, 5, 6, 7, 8]], [[EOD]]])
    assert check_tokens(dataset, 10, EOD, nothing) == DocumentEnds(documents=5, ended=3, inside=1)
    assert check_tokens(dataset, 10, None, nothing) is None


@pytest.mark.parametrize(
    ("changed", "dtype", "said"),
    [
        ([[[1, 2], [3]], [], [[4] * 9]], np.uint16, "token type: int32 in {0}, uint16 in {1}"),
        ([[[1, 2], [3]], [[4] * 9]], np.int32, "number of documents: 3 in {0}, 2 in {1}"),
        ([[[1, 2, 3]], [], [[4] * 9]], np.int32, "number of sequences: 3 in {0}, 2 in {1}"),
        ([[[1], [2, 3]], [], [[4] * 9]], np.int32, "length of sequence 0: 2 in {0}, 1 in {1}"),
        ([[[1, 2]], [[3]], [[4] * 9]], np.int32, "sequences before document 1: 2 in {0}, 1 in {1}"),
        (
            [[[1, 2], [3]], [], [[4] * 6 + [5, 4, 5]]],
            np.int32,
            "token 9 (token 6 of sequence 2, in document 2): 4 in {0}, 5 in {1}",
        ),
        ([[[1, 2], [3]], [], [[4] * 9]], np.int32, None),
    ],
)
def test_the_first_difference_is_named(tmp_path, changed, dtype, said):
    one = write(tmp_path / "one", [[[1, 2], [3]], [], [[4] * 9]])
    other = write(tmp_path / "other", changed, dtype)
    expected = said and said.format(one.prefix, other.prefix)
    assert first_difference(one, other, nothing) == expected
