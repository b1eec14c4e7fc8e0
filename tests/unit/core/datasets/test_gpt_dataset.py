"""One sample: masks, positions and segments against plain loops; padding goes by position, never by id."""

import itertools
import pickle

import numpy as np
import pytest

from megatron.core.datasets.gpt_dataset import GPTDataset, SampleFormat
from megatron.core.datasets.gpt_indices import build_gpt_indices, plan_epochs
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.mock_dataset import MockIndexedDataset

EOD = 9
VOCAB = 50
NO_OPTIONS = {"eod_mask_loss": False, "reset_position_ids": False, "reset_attention_mask": False}


def dataset(folder, documents, seq_length, num_samples=None, *, keep_partial=False, mmap=True, **options):
    with IndexedDatasetBuilder(folder / "a", np.uint16) as builder:
        for tokens in documents:
            builder.add_document(tokens)
    source = IndexedDataset(folder / "a", mmap=mmap)
    plan = plan_epochs(source.num_tokens, seq_length, num_samples, keep_partial=keep_partial)
    indices = build_gpt_indices(
        source.sequence_lengths, plan, first_sequence=0, seq_length=seq_length, seed=1
    )
    return GPTDataset(source, indices, SampleFormat(seq_length, VOCAB, EOD, **options))


def by_loops(tokens):
    """Positions and segments of a text, and whether each token is end-of-document."""
    positions, segments, position, segment = [], [], 0, 0
    for token in tokens:
        positions.append(position)
        segments.append(segment)
        position += 1
        if token == EOD:
            position, segment = 0, segment + 1
    return positions, segments


@pytest.mark.parametrize("options", [*itertools.product([False, True], repeat=3)])
def test_masks_positions_and_segments_are_those_of_plain_loops(tmp_path, options):
    chosen = dict(zip(NO_OPTIONS, options, strict=True))
    generator = np.random.default_rng(1)
    documents = [[*generator.integers(0, 9, size=n), EOD] for n in (0, 5, 1, 30, 0, 0, 7, 12)]
    data = dataset(tmp_path, documents, 16, 40, **chosen)
    for sample in map(data.__getitem__, range(len(data))):
        tokens = sample["tokens"].tolist()
        positions, segments = by_loops(tokens)
        assert sample["labels"][:-1].tolist() == tokens[1:]
        masked = [0.0 if chosen["eod_mask_loss"] and token == EOD else 1.0 for token in tokens]
        assert sample["loss_mask"].tolist() == masked
        assert ("position_ids" in sample, "segment_ids" in sample) == (options[1], options[2])
        if chosen["reset_position_ids"]:
            assert sample["position_ids"].tolist() == positions
        if chosen["reset_attention_mask"]:
            assert sample["segment_ids"].tolist() == segments


def test_samples_of_documents_that_are_read_equal_those_that_are_mapped(tmp_path):
    documents = [np.random.default_rng(n).integers(0, 9, size=n) for n in range(1, 40)]
    mapped, read = dataset(tmp_path, documents, 25), dataset(tmp_path, documents, 25, mmap=False)
    assert len(mapped) == (sum(range(1, 40)) - 1) // 25
    for i in range(len(mapped)):
        assert mapped[i]["tokens"].tolist() == read[i]["tokens"].tolist()


def test_partial_sample_is_padded_at_its_end_and_counts_no_loss_there(tmp_path):
    # 23 tokens predict 22: samples of 8, 8 and 6. End-of-document at the very end is text, whatever pads.
    data = dataset(tmp_path, [[*range(1, 8), EOD, *range(10, 24), EOD]], 8, keep_partial=True)
    samples = sorted((data[i] for i in range(3)), key=lambda sample: sample["tokens"][0])
    assert [sample["tokens"].tolist() for sample in samples] == [
        [1, 2, 3, 4, 5, 6, 7, EOD],
        [10, 11, 12, 13, 14, 15, 16, 17],
        [18, 19, 20, 21, 22, 23, EOD, 0],
    ]
    assert samples[2]["labels"].tolist() == [19, 20, 21, 22, 23, EOD, 0, 0]
    assert [sample["loss_mask"].tolist() for sample in samples] == [[1] * 8, [1] * 8, [1] * 6 + [0] * 2]


class Reversed:
    """Text back to front, with ``shorter`` places left over that show the id of end-of-document."""

    def __init__(self, shorter):
        self.shorter = shorter
        self.numbers = []

    def __call__(self, tokens, number):
        self.numbers.append(number)
        kept = len(tokens) - self.shorter
        return np.append(tokens[::-1][:kept], np.full(self.shorter, ~EOD))


@pytest.mark.parametrize("shorter", [0, 3])
def test_transform_gets_the_number_of_the_sample_and_its_padding_counts_no_loss(tmp_path, shorter):
    plain = dataset(tmp_path, [range(10, 45)], 8)
    change = Reversed(shorter)
    changed = dataset(tmp_path, [range(10, 45)], 8, transform=change, eod_mask_loss=True)
    for i in range(len(plain)):
        text = [*plain[i]["tokens"].tolist(), int(plain[i]["labels"][-1])]
        shown = text[::-1][: 9 - shorter] + [EOD] * shorter
        sample = changed[i]
        assert sample["tokens"].tolist() == shown[:-1]
        assert sample["labels"].tolist() == shown[1:]
        counted = [1.0] * (8 - shorter) + [0.0] * shorter
        assert sample["loss_mask"].tolist() == counted
    assert change.numbers == plain.indices["shuffle_index"].tolist()


def test_partial_sample_is_transformed_without_its_padding(tmp_path):
    data = dataset(tmp_path, [range(10, 16)], 8, keep_partial=True, transform=Reversed(1))
    assert data[0]["tokens"].tolist() == [15, 14, 13, 12, 11, EOD, 0, 0]
    assert data[0]["loss_mask"].tolist() == [1] * 4 + [0] * 4


@pytest.mark.parametrize(("token", "dtype"), [(VOCAB, np.int32), (-1, np.int32), (-2, np.int64)])
def test_a_token_outside_the_vocabulary_is_named(tmp_path, token, dtype):
    with IndexedDatasetBuilder(tmp_path / "a", dtype) as builder:
        builder.add_document([1, 2, token, 3, 4])
    source = IndexedDataset(tmp_path / "a")
    indices = build_gpt_indices(
        source.sequence_lengths, plan_epochs(5, 4, None), first_sequence=0, seq_length=4, seed=1
    )
    with pytest.raises(ValueError, match=f"holds the token {token}, but the vocabulary has {VOCAB}"):
        GPTDataset(source, indices, SampleFormat(4, VOCAB))[0]


def test_pickled_dataset_gives_the_same_samples(tmp_path):
    data = dataset(tmp_path, [range(10, 45)], 8)
    again = pickle.loads(pickle.dumps(data))
    assert [again[i]["tokens"].tolist() for i in range(4)] == [data[i]["tokens"].tolist() for i in range(4)]


def test_mock_sequences_count_upwards_and_end():
    mock = MockIndexedDataset(vocab_size=100, eod=99)
    lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    np.testing.assert_array_equal(mock.sequence_lengths, lengths)
    for index in (0, 1, 99_999):
        length = int(lengths[index])
        whole = [(place + 1) % 100 for place in range(length - 1)] + [99]
        assert mock.get(index).tolist() == whole
        assert mock.get(index, length // 2).tolist() == whole[length // 2 :]
        assert mock.get(index, 1, max(0, length - 2)).tolist() == whole[1 : length - 1]
    assert mock.count_tokens(10, 20) == lengths[10:20].sum()
