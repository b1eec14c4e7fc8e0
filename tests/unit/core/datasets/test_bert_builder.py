"""BERT datasets from flags: splits of documents, blends, and what a run depends on."""

import dataclasses

import numpy as np
import pytest

from megatron.core.config import DataConfig
from megatron.core.config.bert_data import BertDataConfig
from megatron.core.datasets.bert_builder import BertSamples, build_bert_datasets
from megatron.core.datasets.bert_dataset import BertSampleFormat
from megatron.core.datasets.bert_mapping import build_bert_mapping
from tests.unit.core.datasets.test_bert_dataset import Pieces, write

PIECES = Pieces(1000, ())
FORMAT = BertSampleFormat.of(BertDataConfig(), PIECES, 24)


def corpus(prefix, documents, first=10):
    """Documents of three sentences of five equal tokens, a token for each document."""
    return write(prefix, [[[first + number] * 5] * 3 for number in range(documents)])


def build(*paths, sizes, **options):
    config = DataConfig(data_path=paths, **options)
    return build_bert_datasets(config, sample_format=FORMAT, seed=1234, sizes=sizes)


def documents_of(dataset):
    found = set()
    for number in range(len(dataset)):
        text = np.where(dataset[number]["loss_mask"] == 1, dataset[number]["labels"], dataset[number]["text"])
        found |= set(text.tolist()) - {PIECES.cls, PIECES.sep, PIECES.pad}
    return {token - 10 for token in found}


def test_splits_are_ranges_of_documents(tmp_path):
    prefix = corpus(tmp_path / "a", 40)
    splits = build(prefix, split="80,10,10", sizes=(100, None, 4))
    assert [documents_of(one) for one in (splits.train, splits.valid, splits.test)] == [
        set(range(32)),
        set(range(32, 36)),
        set(range(36, 40)),
    ]
    assert len(splits.train) >= 100
    (line,) = [line for line in splits.description if line.startswith("train")]
    assert line.startswith(f"train: {prefix}: 32 documents, 32 usable, 0 skipped; ")
    assert line.endswith("100 wanted")
    assert splits.fingerprint["dataset 1, share for training"] == "0 to 32 of 40"


def test_a_split_equals_its_mapping(tmp_path):
    prefix = corpus(tmp_path / "a", 40)
    train = build(prefix, split="1,1,0", sizes=(30, 0, 0)).train
    arrays = build_bert_mapping(
        3 * np.arange(21),
        np.full(120, 5, np.int32),
        num_samples=30,
        max_seq_length=21,
        short_seq_prob=0.1,
        seed=1234,
        min_sentences=2,
    )
    np.testing.assert_array_equal(train.arrays["sample_index"], arrays["sample_index"])


def test_blends_by_weight_and_of_every_sample(tmp_path):
    a, b = corpus(tmp_path / "a", 10), corpus(tmp_path / "b", 20, first=500)
    weighted = build("1", a, "3", b, split="1,0,0", sizes=(40, 0, 0))
    assert np.bincount(weighted.train.indices["dataset_index"]).tolist() == [10, 30]
    assert all(weighted.train[number] for number in range(40))
    splits = build(a, b, split="1,1,0", sizes=(8, None, 0))
    once = np.bincount(splits.valid.indices["dataset_index"]).tolist()
    assert once == [len(dataset) for dataset in splits.valid.datasets]


def test_made_up_data_is_refused():
    config = DataConfig(mock_data=True)
    with pytest.raises(ValueError, match="--mock-data has no sentences"):
        build_bert_datasets(config, sample_format=FORMAT, seed=1, sizes=(5, 0, 0))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"mask_prob": 0.2}, {"--mask-prob"}),
        ({"max_ngram": 1}, {"words masked in a run, at most"}),
        ({"mask": 9}, {"id of mask"}),
        ({"continues_word": np.arange(1000) > 990}, {"pieces that go on with a word"}),
        ({"continues_word": None}, {"pieces that go on with a word"}),
        ({"short_seq_prob": 0.2}, {"--short-seq-prob"}),
        ({"pad": 9}, {"id of pad"}),
        ({"binary_head": False}, {"sentences of a sample, at least"}),
        ({"seq_length": 25}, {"--seq-length"}),
    ],
)
def test_all_that_samples_depend_on_is_in_the_fingerprint(change, names):
    masks = {name: value for name, value in change.items() if hasattr(FORMAT.masking, name)}
    others = {name: value for name, value in change.items() if name not in masks}
    masking = dataclasses.replace(FORMAT.masking, **masks)
    changed = dataclasses.replace(FORMAT, masking=masking, **others)
    one, other = (BertSamples(DataConfig(mock_data=True), each, 1).order for each in (FORMAT, changed))
    assert {name for name in one if one[name] != other[name]} == names
    assert one.keys() == other.keys()
