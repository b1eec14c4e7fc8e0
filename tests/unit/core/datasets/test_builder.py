"""From files to samples: what every split holds, how data repeats and blends, what is refused."""

import os
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron.core.config import DataConfig, FimConfig
from megatron.core.datasets import SequentialSampler, build_datasets
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.unit.core.datasets import test_fim as fim

EOD = 999


def write(prefix, documents):
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def build(*paths, seq_length=10, seed=1234, sizes=(5, 0, 0), eod=EOD, vocab_size=1000, **options):
    more = {name: options.pop(name) for name in ("validation_sets", "fim") if name in options}
    config = DataConfig(data_path=paths or None, **options)
    return build_datasets(
        config, seq_length=seq_length, seed=seed, sizes=sizes, eod=eod, vocab_size=vocab_size, **more
    )


def all_samples(dataset):
    return [dataset[i] for i in range(len(dataset))]


def test_every_adjacent_pair_is_predicted_once(tmp_path):
    prefix = write(tmp_path / "a", [range(1000)])
    dataset = build(prefix, split="1,0,0", sizes=(99, 0, 0)).train
    assert len(dataset) == 99  # 999 pairs make 99 samples of 10; the last 9 pairs are dropped
    samples = all_samples(dataset)
    for sample in samples:
        assert sample["tokens"].shape == sample["labels"].shape == (10,)
        assert (sample["tokens"].dtype, sample["loss_mask"].dtype) == (np.int64, np.float32)
        np.testing.assert_array_equal(sample["labels"], sample["tokens"] + 1)
        assert "position_ids" not in sample  # they are 0..s-1 unless documents restart them
        assert "segment_ids" not in sample
    assert sorted(t for sample in samples for t in sample["tokens"].tolist()) == list(range(990))


def test_samples_join_documents_in_shuffled_order(tmp_path):
    documents = [[d * 20 + t for t in range(length)] for d, length in enumerate([10, 4, 7, 12, 3, 9])]
    dataset = build(write(tmp_path / "a", documents), seq_length=8, split="1,0,0").train
    # FORMATS: document order 2 1 5 0 4 3, samples in the order 2 0 4 3 1
    text = [token for document in (2, 1, 5, 0, 4, 3) for token in documents[document]]
    for i, place in enumerate([2, 0, 4, 3, 1]):
        assert dataset[i]["tokens"].tolist() == text[8 * place : 8 * place + 8]
        assert dataset[i]["labels"].tolist() == text[8 * place + 1 : 8 * place + 9]


@pytest.mark.parametrize("index", [-1, 5])
def test_samples_that_are_not_there(tmp_path, index):
    dataset = build(write(tmp_path / "a", [range(51)]), split="1,0,0").train
    with pytest.raises(IndexError, match=f"no sample {index}; there are 5"):
        dataset[index]


@pytest.mark.parametrize("seed", [1, 2])
def test_splits_are_disjoint_and_the_same_for_every_seed(tmp_path, seed):
    prefix = write(tmp_path / "a", [[d] * 11 for d in range(100)])
    splits = build(prefix, split="80,10,10", sizes=(87, 10, 10), seed=seed)
    found = [
        {t for sample in all_samples(dataset) for t in np.append(sample["tokens"], sample["labels"]).tolist()}
        for dataset in (splits.train, splits.valid, splits.test)
    ]
    assert found == [set(range(80)), set(range(80, 90)), set(range(90, 100))]


def test_small_splits_repeat_where_they_hold_a_sample(tmp_path):
    prefix = write(tmp_path / "a", [range(50)] * 20)
    splits = build(prefix, seq_length=40, split="90,5,5", sizes=(100, 30, 30))
    assert len(splits.train) >= 100
    assert len(splits.valid) >= 30
    assert any("900 tokens" in line and "4.44 epochs" in line for line in splits.description)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("90,5,5", "the valid split of .*/a is too small: 1 documents with 50 tokens, but one sample takes"),
        (None, "the valid split of .*/a is too small: 1 documents with 50 tokens.*--eval-iters 0"),
        ("90,10,0", None),
        ("95.1,4.9,0.001", "the valid split"),
    ],
)
def test_split_too_small_for_a_sample_is_named(tmp_path, split, message):
    prefix = write(tmp_path / "a", [range(50)] * 20)
    if message is None:
        splits = build(prefix, seq_length=64, split=split, sizes=(10, 10, 10))
        assert len(splits.valid) >= 10
        assert splits.test is None
    else:
        with pytest.raises(ValueError, match=message):
            build(prefix, seq_length=64, split=split, sizes=(10, 10, 10))


def test_split_rounded_to_nothing_is_named_only_where_it_is_wanted(tmp_path):
    prefix = write(tmp_path / "a", [range(100)] * 20)
    with pytest.raises(ValueError, match=r"the test split of .* 0 documents with 0 tokens"):
        build(prefix, split="90,9.9,0.1", sizes=(10, 10, 10))
    assert build(prefix, split="90,9.9,0.1", sizes=(10, 10, 0)).test is None


def test_account_of_documents_tokens_and_epochs(tmp_path):
    prefix = write(tmp_path / "a", [range(20)] * 100)
    splits = build(prefix, seq_length=1024, split="1,0,0", sizes=(100, 0, 0))
    (line,) = [line for line in splits.description if line.startswith("train")]
    # 100 x 1024 tokens of 2,000: 51.2 epochs; one holds (2000 - 1) // 1024 = 1 sample
    assert line == (
        f"train: {prefix}: 100 documents, 2,000 tokens, 1 samples an epoch; 100 samples wanted, 51.20 epochs "
        "(52 laid out, 101 samples)"
    )


def components(dataset):
    return np.bincount(dataset.indices["dataset_index"]).tolist()


@pytest.fixture
def ten_and_twenty(tmp_path):
    return write(tmp_path / "a", [[1] * 101]), write(tmp_path / "b", [[2] * 201])


def test_weights_are_shares_of_the_samples_not_of_the_datasets(ten_and_twenty):
    a, b = ten_and_twenty
    even = build("1", a, "1", b, split="1,0,0", sizes=(30, 0, 0))
    assert components(even.train) == [15, 15]
    assert components(build("10", a, "20", b, split="1,0,0", sizes=(30, 0, 0)).train) == [10, 20]
    account = "\n".join(even.description)
    assert (
        f"50.0000% of the samples from {a}: 1 documents, 101 tokens, 10 samples an epoch; 15 samples"
        in account
    )
    assert "1.49 epochs" in account


def test_unweighted_blend_counts_by_length_and_repeats_only_beyond_one_epoch(ten_and_twenty):
    within = build(*ten_and_twenty, split="1,0,0", sizes=(12, 0, 0)).train
    assert (len(within), components(within)) == (12, [4, 8])
    whole = build(*ten_and_twenty, split="1,0,0", sizes=(30, 0, 0)).train
    assert (len(whole), components(whole)) == (30, [10, 20])
    assert [len(dataset) for dataset in whole.datasets] == [10, 20]
    beyond = build(*ten_and_twenty, split="1,0,0", sizes=(90, 0, 0)).train
    assert (len(beyond), components(beyond)) == (90, [30, 60])
    assert {int(sample["tokens"][0]) for sample in all_samples(beyond)} == {1, 2}


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
@pytest.mark.parametrize("weights", [[0.001, 0.999], [1e-4] * 20 + [1.0], [0, 1, 1]])
def test_no_component_is_asked_for_more_than_it_holds(tmp_path, weights, size):
    prefix = write(tmp_path / "a", [range(30)] * 10)
    paths = [word for weight in weights for word in (str(weight), prefix)]
    splits = build(*paths, split="80,10,10", sizes=(size, size, size), seq_length=8)
    for dataset in (splits.train, splits.valid, splits.test):
        assert len(dataset) >= size
        assert len(all_samples(dataset)) == len(dataset)
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_components_are_sized_with_the_surplus(ten_and_twenty):
    a, b = ten_and_twenty
    dataset = build("3", a, "7", b, split="1,0,0", sizes=(1000, 0, 0)).train
    # ceil(300 x 1.005) = 302 and ceil(700 x 1.005) = 704 samples asked for
    epochs = [len(part.indices["document_index"]) for part in dataset.datasets]
    assert epochs == [-(-(302 * 10 + 1) // 101), -(-(704 * 10 + 1) // 201)]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_blend_of_no_size_gives_every_sample_once(ten_and_twenty, weighted):
    words = [word for prefix in ten_and_twenty for word in (("5", prefix) if weighted else (prefix,))]
    splits = build(train_data_path=tuple(words), valid_data_path=tuple(words), sizes=(8, None, 0), eod=None)
    assert components(splits.valid) == [10, 20]
    index = splits.valid.indices
    drawn = zip(index["dataset_index"].tolist(), index["dataset_sample_index"].tolist(), strict=True)
    assert sorted(drawn) == [(0, i) for i in range(10)] + [(1, i) for i in range(20)]
    text = "\n".join(splits.description)
    assert "valid: 30 samples of a blend of 2 datasets, every sample once" in text
    assert ("once; weights have no effect" in text) is weighted
    assert "10 samples wanted, 0.99 epochs" in text  # 10 x 10 of 101 tokens


def test_validation_sets_are_kept_apart(ten_and_twenty, tmp_path):
    a, b = ten_and_twenty
    (tmp_path / "other").mkdir()
    namesake = write(tmp_path / "other" / "a", [[3] * 60])

    def sets(*words, size=15):
        splits = build(train_data_path=(a,), valid_data_path=words, sizes=(5, size, 0), validation_sets=True)
        assert splits.valid is None
        return splits

    asked = sets("9", a, "1", b)
    assert [(name, len(dataset)) for name, dataset in asked.valid_sets] == [("a", 20), ("b", 20)]
    assert [{int(sample["tokens"][0]) for sample in all_samples(one)} for _, one in asked.valid_sets] == [
        {1},
        {2},
    ]
    assert "valid: each dataset by itself; weights have no effect" in asked.description
    whole = sets(a, b, size=None)
    assert [len(dataset) for _, dataset in whole.valid_sets] == [10, 20]
    assert [name for name, _ in sets(a, namesake).valid_sets] == [a, namesake]
    assert sets(a, b, size=0).valid_sets == ()


def test_files_read_without_mapping_give_the_same_samples(tmp_path):
    prefix = write(tmp_path / "a", [range(100), range(200)])
    mapped = build(prefix, split="1,0,0", sizes=(60, 0, 0)).train
    read = build(prefix, split="1,0,0", sizes=(60, 0, 0), mmap_bin_files=False).train
    assert (mapped.source.mmap, read.source.mmap) == (True, False)
    for i in range(len(mapped)):
        np.testing.assert_array_equal(mapped[i]["tokens"], read[i]["tokens"])


def test_text_of_all_splits_is_rearranged(tmp_path):
    text = "the middle comes last"
    prefix = write(tmp_path / "a", [[*map(ord, text), fim.EOD]] * 40)
    more = {"split": "1,1,0", "sizes": (5, 5, 0), "vocab_size": 137, "eod": fim.EOD, "seq_length": 44}
    config = FimConfig(fim_data=True, fim_rate=1.0, fim_spm_rate=0.0)
    splits = build(prefix, fim=(config, fim.Characters()), **more)
    for dataset in (splits.train, splits.valid):
        for sample in all_samples(dataset):
            assert fim.PREFIX in sample["tokens"]
    assert fim.PREFIX not in build(prefix, **more).train[0]["tokens"]


def test_separate_paths_for_each_split(ten_and_twenty):
    a, b = ten_and_twenty
    splits = build(train_data_path=(a,), valid_data_path=(b,), sizes=(5, 5, 5))
    assert {sample["tokens"][0] for sample in all_samples(splits.train)} == {1}
    assert {sample["tokens"][0] for sample in all_samples(splits.valid)} == {2}
    assert splits.test is None
    with pytest.raises(ValueError, match=r"--split 1,0,0 divides --data-path"):
        build(train_data_path=(a,), split="1,0,0")


def test_no_data_at_all():
    with pytest.raises(ValueError, match="give --data-path, --train-data-path and its like, or --mock-data"):
        build()


def test_masks_and_positions_at_the_end_of_a_document(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, EOD, 3, EOD, EOD, 4, 5, 6]])
    flags = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    expected = {
        "eod_mask_loss": ("loss_mask", [1, 1, 0, 1, 0, 0, 1, 1]),
        "reset_position_ids": ("position_ids", [0, 1, 2, 0, 1, 0, 0, 1]),
        "reset_attention_mask": ("segment_ids", [0, 0, 0, 1, 1, 2, 3, 3]),
    }
    plain = build(prefix, seq_length=8, split="1,0,0", sizes=(1, 0, 0)).train[0]
    for flag in flags:
        sample = build(prefix, seq_length=8, split="1,0,0", sizes=(1, 0, 0), **{flag: True}).train[0]
        name, values = expected[flag]
        assert sample[name].tolist() == values
        for other in sample.keys() - {name}:
            np.testing.assert_array_equal(sample[other], plain[other])
        with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: .* no end-of-document token"):
            build(prefix, seq_length=8, split="1,0,0", eod=None, **{flag: True})


def test_token_beyond_the_vocabulary_is_named(tmp_path):
    dataset = build(write(tmp_path / "a", [range(51)]), split="1,0,0", vocab_size=50).train
    with pytest.raises(ValueError, match="/a: holds the token 50, but the vocabulary has 50"):
        all_samples(dataset)


def test_numbers_that_are_no_tokens(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", np.float32) as builder:
        builder.add_document([0.5] * 50)
    with pytest.raises(ValueError, match="holds float32 numbers"):
        build(str(tmp_path / "a"))


def test_rewritten_data_is_indexed_anew(tmp_path):
    prefix = write(tmp_path / "a", [[1] * 51])
    build(prefix, split="1,0,0")
    write(tmp_path / "a", [[2] * 26, [2] * 25])  # as many bytes
    os.utime(tmp_path / "a.idx", (0, 0))
    assert {sample["tokens"][0] for sample in all_samples(build(prefix, split="1,0,0").train)} == {2}
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_mock_data():
    splits = build(sizes=(8, 4, 0), mock_data=True, seq_length=64, vocab_size=101, eod=100)
    lengths = np.random.default_rng(0).integers(1, 4096, size=100_000, dtype=np.int32)
    source = splits.train.source
    np.testing.assert_array_equal(source.sequence_lengths, lengths)
    assert source.get(0).tolist() == [t % 101 for t in range(1, int(lengths[0]))] + [100]
    assert source.get(0, 5, 3).tolist() == [6, 7, 8]
    assert splits.train[0]["tokens"].shape == (64,)
    assert len(splits.valid) >= 4
    assert splits.train.source is splits.valid.source


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_this_ranks_batches(tmp_path, workers):
    prefix = write(tmp_path / "a", [range(1000)])
    dataset = build(prefix, split="1,0,0", sizes=(24, 0, 0)).train
    sampler = SequentialSampler(
        len(dataset), 8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2
    )
    batches = iter(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    for first in (10, 14, 18):
        batch = next(batches)
        assert batch["tokens"].tolist() == [dataset[i]["tokens"].tolist() for i in (first, first + 1)]


def test_datasets_are_pickled_by_their_files(tmp_path):
    dataset = build(write(tmp_path / "a", [range(1000)]), split="1,0,0", sizes=(90, 0, 0)).train
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    np.testing.assert_array_equal(pickle.loads(pickled)[3]["tokens"], dataset[3]["tokens"])
