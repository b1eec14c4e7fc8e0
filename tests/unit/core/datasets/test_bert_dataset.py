"""BERT samples: golden values, what masking must and must not do, documents that give no sample."""

import itertools
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megatron.core.config.bert_data import BertDataConfig
from megatron.core.datasets.bert_dataset import BertSampleFormat, build_bert_split
from megatron.core.datasets.bert_mapping import MappingCounts
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class Pieces:
    """A word-piece tokenizer of made-up ids."""

    name = "BertWordPieceLowerCase"
    cls, sep, mask, pad = CLS, SEP, MASK, PAD

    def __init__(self, vocab_size, continuing):
        self.vocab_size = vocab_size
        self.continuing = continuing

    def continues_word(self):
        return np.isin(np.arange(self.vocab_size), list(self.continuing))


GOLDEN_PIECES = Pieces(60, range(4, 60, 4))
GOLDEN_DOCUMENTS = [
    [[9, 12, 15, 18, 21], [18, 21, 24, 27, 30, 33, 36], [24, 27, 30, 33, 36, 39]],
    [[29, 32, 35, 38], [41, 44, 47, 50, 53, 56, 59, 6, 9]],
    [[42, 45, 48], [49, 52, 55], [56, 59, 6], [7, 10, 13], [14, 17, 20]],
]
# English: words of one to four pieces, ids from 500 on continue a word. Chinese: each character is a word.
ENGLISH, CHINESE = Pieces(1000, range(500, 1000)), Pieces(1000, ())


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def write(prefix, documents):
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for sentences in documents:
            builder.add_document(joined(sentences), list(map(len, sentences)))
    return str(prefix)


def split(prefix, pieces, num_samples, *, seq_length=24, seed=1234, cache=None, documents=None, **flags):
    source = IndexedDataset(prefix)
    return build_bert_split(
        source,
        range(source.num_documents) if documents is None else documents,
        num_samples,
        name="train",
        sample_format=BertSampleFormat.of(BertDataConfig(**flags), pieces, seq_length),
        seed=seed,
        cache=IndexCache(cache, required=False),
    )


def corpus(prefix, pieces, documents=120):
    """Documents of 4 to 11 sentences of 3 to 30 words."""
    generator = np.random.default_rng(1)
    beginnings = np.flatnonzero(~pieces.continues_word())[4:]
    tails = np.array(pieces.continuing)

    def word():
        tail = tails[generator.integers(0, len(tails), generator.integers(0, 4))] if pieces.continuing else ()
        return [int(beginnings[generator.integers(0, len(beginnings))]), *map(int, tail)]

    def sentence():
        return joined(word() for _ in range(generator.integers(3, 31)))

    return write(prefix, [[sentence() for _ in range(generator.integers(4, 12))] for _ in range(documents)])


@pytest.fixture(scope="module", params=["English", "Chinese"])
def many(request, tmp_path_factory):
    """1,000 samples of 128 tokens: their tokenizer, the dataset, and each of their arrays [1000, 128]."""
    pieces = ENGLISH if request.param == "English" else CHINESE
    prefix = corpus(tmp_path_factory.mktemp("corpus") / "text", pieces)
    dataset = split(prefix, pieces, 1000, seq_length=128).dataset
    given = [dataset[i] for i in range(1000)]
    return pieces, dataset, {name: np.stack([sample[name] for sample in given]) for name in given[0]}


def test_golden_samples(tmp_path):
    prefix = write(tmp_path / "a", GOLDEN_DOCUMENTS)
    dataset = split(prefix, GOLDEN_PIECES, 8).dataset
    assert "".join("({},{},{})".format(*row) for row in dataset.arrays["sample_index"]) == (
        "(5,10,21)(3,5,21)(3,5,21)(0,3,21)(5,10,21)(0,3,21)(3,5,21)(5,10,21)(0,3,21)"
    )
    first, second = dataset[0], dataset[1]
    text = [1, 3, 17, 20, 2, 42, 45, 48, 49, 52, 55, 56, 59, 6, 7, 3, 3, 2]
    assert first["text"].tolist() == text + [0] * 6
    assert first["types"].tolist() == [0] * 5 + [1] * 13 + [0] * 6
    assert first["padding_mask"].tolist() == [1] * 18 + [0] * 6
    assert first["labels"].tolist() == [-1, 14] + [-1] * 13 + [10, 13] + [-1] * 7
    assert first["loss_mask"].tolist() == [0, 1] + [0] * 13 + [1, 1] + [0] * 7
    assert (int(first["is_random"]), int(first["truncated"])) == (1, 0)

    text = [1, 29, 32, 35, 38, 2, 41, 44, 47, 3, 53, 56, 59, 6, 9, 2]
    assert second["text"].tolist() == text + [0] * 8
    assert {i: label for i, label in enumerate(second["labels"].tolist()) if label != -1} == {9: 50, 14: 9}
    assert (int(second["is_random"]), int(second["truncated"])) == (0, 0)
    assert all(array.dtype == np.int64 for array in second.values())


def test_golden_sample_without_the_binary_head(tmp_path):
    prefix = write(tmp_path / "a", GOLDEN_DOCUMENTS)
    sample = split(prefix, GOLDEN_PIECES, 8, bert_binary_head=False).dataset[0]
    text = [1, 42, 45, 48, 3, 3, 55, 56, 59, 6, 7, 10, 3, 14, 17, 20, 2]
    assert sample["text"].tolist() == text + [0] * 7
    assert {i: label for i, label in enumerate(sample["labels"].tolist()) if label != -1} == {
        4: 49,
        5: 52,
        12: 13,
    }
    assert not sample["types"].any()
    assert not sample["is_random"]


def test_only_words_are_masked_and_labels_stand_there_alone(many):
    _, _, arrays = many
    masked = arrays["loss_mask"] == 1
    original = np.where(masked, arrays["labels"], arrays["text"])
    assert not (masked & np.isin(original, [CLS, SEP])).any()
    assert not (masked & (arrays["padding_mask"] == 0)).any()
    assert (arrays["labels"][~masked] == -1).all()
    assert (arrays["labels"][masked] >= 0).all()
    assert (arrays["padding_mask"] == (np.cumsum(original[:, ::-1], axis=1)[:, ::-1] > 0)).all()
    assert not arrays["text"][arrays["padding_mask"] == 0].any()


def test_the_share_of_masked_tokens_and_what_stands_in_their_place(many):
    _, _, arrays = many
    masked = arrays["loss_mask"] == 1
    words = (arrays["padding_mask"] == 1) & ((arrays["text"] > SEP) | masked)
    assert masked.sum() / words.sum() == pytest.approx(0.15, abs=0.01)
    text, labels = arrays["text"][masked], arrays["labels"][masked]
    assert np.mean(text == MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(text == labels) == pytest.approx(0.1, abs=0.02)
    assert np.mean((text != MASK) & (text != labels)) == pytest.approx(0.1, abs=0.02)
    assert np.mean(arrays["is_random"]) == pytest.approx(0.5, abs=0.05)


def test_a_word_is_masked_whole(many):
    pieces, _, arrays = many
    masked = arrays["loss_mask"] == 1
    original = np.where(masked, arrays["labels"], arrays["text"])
    follows = pieces.continues_word()[original] & (arrays["padding_mask"] == 1)
    follows[:, 0] = False
    rows, places = np.nonzero(follows)
    # The piece right before is of the same word, unless the word's beginning was cut off with its segment.
    inside = ~np.isin(original[rows, places - 1], [CLS, SEP])
    rows, places = rows[inside], places[inside]
    assert (len(rows) > 10_000) == (pieces is ENGLISH)
    np.testing.assert_array_equal(masked[rows, places], masked[rows, places - 1])


def test_some_samples_are_short_and_segments_come_from_one_document_in_order_or_swapped(many):
    _, dataset, arrays = many
    lengths = arrays["padding_mask"].sum(axis=1)
    assert lengths.max() == 128
    targets = dataset.arrays["sample_index"][:1000, 2]
    assert np.mean(targets < 125) == pytest.approx(0.1, abs=0.03)
    assert (lengths <= targets + 3).all()
    untouched = np.flatnonzero(arrays["truncated"] == 0)[:50]
    assert len(untouched) > 10
    for i in untouched.tolist():
        first, last, _ = dataset.arrays["sample_index"][i].tolist()
        text = np.concatenate([dataset.source.get(s) for s in range(first, last)]).tolist()
        masked = arrays["loss_mask"][i] == 1
        original = np.where(masked, arrays["labels"][i], arrays["text"][i])[: lengths[i]].tolist()
        middle = original.index(SEP)
        first_segment, second_segment = original[1:middle], original[middle + 1 : -1]
        pair = [first_segment, second_segment]
        assert joined(reversed(pair) if arrays["is_random"][i] else pair) == text


def test_a_resume_other_workers_and_unpickling_change_nothing(many):
    _, dataset, arrays = many
    sampler = list(range(990, 1000))
    copy = pickle.loads(pickle.dumps(dataset))
    for workers in (0, 2):
        loader = DataLoader(copy, batch_size=5, sampler=sampler, num_workers=workers)
        batches = list(loader)
        for name in arrays:
            found = np.concatenate([batch[name].numpy() for batch in batches])
            np.testing.assert_array_equal(found, arrays[name][990:1000])


@pytest.mark.parametrize("index", [-1, 1000])
def test_a_sample_that_is_not_there(tmp_path, index):
    dataset = split(write(tmp_path / "a", GOLDEN_DOCUMENTS), GOLDEN_PIECES, 8).dataset
    with pytest.raises(IndexError, match=f"no sample {index}; there are 9"):
        dataset[index]


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    dataset = split(write(tmp_path / "a", [[[5, 60], [7, 8]]]), GOLDEN_PIECES, 1).dataset
    with pytest.raises(ValueError, match=r"a: holds the token 60, but the vocabulary has 60; was the data"):
        dataset[0]


def test_documents_of_one_sentence_need_the_option_without_pairs(tmp_path):
    prefix = write(tmp_path / "a", [[[10, 11, 13, 14, 15]]] * 100)
    with pytest.raises(ValueError, match=r"train split of .*/a can't .* --bert-no-binary-head") as raised:
        split(prefix, GOLDEN_PIECES, 10**6, cache=tmp_path / "cache")
    assert "100 documents" in str(raised.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    built = split(prefix, GOLDEN_PIECES, 250, bert_binary_head=False)
    assert built.counts == MappingCounts(100, 0, 0, 0, epochs=3)
    assert len(built.dataset) == 300
    sample = built.dataset[7]
    assert sample["padding_mask"].sum() == 7
    assert sample["loss_mask"].sum() == 1


def test_a_mix_uses_the_usable_documents_and_says_how_many_it_skips(tmp_path):
    pair = [[20, 21, 22], [23, 25, 26]]
    documents = [[[10, 11, 13]]] * 99 + [pair, [], [[5] * 513, [6]]]
    built = split(write(tmp_path / "a", documents), GOLDEN_PIECES, 3)
    assert built.counts == MappingCounts(102, empty=1, short=99, long=1, epochs=3)
    assert built.description == (
        f"train: {tmp_path}/a: 102 documents, 1 usable, 101 skipped (1 without sentences, 99 of one "
        "sentence, 1 with a sentence of more than 512 tokens); 3 samples in 3 epochs"
    )
    for sample in (built.dataset[i] for i in range(3)):
        original = np.where(sample["loss_mask"], sample["labels"], sample["text"])
        assert sorted(original[original > SEP].tolist()) == [20, 21, 22, 23, 25, 26]


def test_a_split_is_of_documents_and_comes_from_the_cache_the_second_time(tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", GOLDEN_DOCUMENTS)
    built = split(prefix, GOLDEN_PIECES, None, cache=tmp_path / "cache", documents=range(1, 3))
    assert sorted(built.dataset.arrays["sample_index"][:, :2].tolist()) == [[3, 5], [5, 10]]

    def rebuilt(*_, **__):
        pytest.fail("built again")

    monkeypatch.setattr("megatron.core.datasets.bert_dataset.build_bert_mapping", rebuilt)
    again = split(prefix, GOLDEN_PIECES, None, cache=tmp_path / "cache", documents=range(1, 3))
    assert again.description == built.description
    np.testing.assert_array_equal(again.dataset[1]["text"], built.dataset[1]["text"])
    # Masking is no part of the mapping; what else differs is built anew.
    split(prefix, GOLDEN_PIECES, None, cache=tmp_path / "cache", documents=range(1, 3), mask_prob=0.5)
    for other in ({"seed": 1}, {"short_seq_prob": 0.2}, {"bert_binary_head": False}, {"seq_length": 30}):
        with pytest.raises(pytest.fail.Exception):
            split(prefix, GOLDEN_PIECES, None, cache=tmp_path / "cache", documents=range(1, 3), **other)


def test_a_random_token_may_be_that_of_padding_and_still_is_a_token(tmp_path):
    tiny = Pieces(5, ())
    prefix = write(tmp_path / "a", [[[4] * 400, [4] * 400]])
    sample = split(prefix, tiny, 1, seq_length=500, mask_prob=0.9).dataset[0]
    text, masked = sample["text"], sample["loss_mask"] == 1
    # A tenth is replaced by one of five ids, of which 0 is padding.
    assert (text[masked] == PAD).mean() == pytest.approx(0.1 / 5, abs=0.015)
    assert sample["padding_mask"].all()
    assert (text[~masked] != PAD).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mask_prob": 0.0}, "--mask-prob 0.0: must lie between 0 and 1"),
        ({"mask_prob": 1.0}, "--mask-prob 1.0: must lie between 0 and 1"),
        ({"short_seq_prob": 1.5}, "--short-seq-prob 1.5: must be 0 to 1"),
    ],
)
def test_probabilities_that_are_none(flags, message):
    with pytest.raises(ValueError, match=message):
        BertDataConfig(**flags)


def test_tokenizers_and_lengths_that_do_not_fit_are_refused():
    class Bytes(Pieces):
        name, sep, mask = "ByteTokenizer", None, None

    with pytest.raises(ValueError, match=r"ByteTokenizer has no token for sep, mask.*BertWordPieceLowerCase"):
        BertSampleFormat.of(BertDataConfig(), Bytes(60, ()), 24)
    with pytest.raises(ValueError, match=r"--seq-length 4: .* give 5 or more"):
        BertSampleFormat.of(BertDataConfig(), GOLDEN_PIECES, 4)
    with pytest.raises(ValueError, match="mask id 3 is not in 0 to 2"):
        BertSampleFormat.of(BertDataConfig(), Pieces(3, ()), 24)
