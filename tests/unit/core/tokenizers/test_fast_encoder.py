"""The fast encoder: equal to the tokenizer on everything tried, and not trusted where it is not."""

import json

import numpy as np
import pytest
import tokenizers

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer, fast_encoder
from megatron.core.tokenizers.fast_encoder import (
    NASTY_TEXTS,
    GigatokenEncoder,
    ReferenceEncoder,
    choose_encoder,
    first_difference,
)
from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from tests.unit.core.tokenizers.texts import CHAPTERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_byte_level_bpe(CHAPTERS[:20], 700), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)))


def test_ids_equal_the_librarys_on_real_and_nasty_texts(folder, tokenizer):
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode, why = choose_encoder(tokenizer, CHAPTERS[:3])
    assert why.startswith("encoding with gigatoken 0.10.0; its ids equal HuggingFaceTokenizer's on ")
    texts = [*CHAPTERS[20:40], *NASTY_TEXTS[:-1], *(chapter[:7] for chapter in CHAPTERS)]
    ids, lengths = encode(texts)
    expected = [library.encode(text).ids for text in texts]
    assert lengths.tolist() == list(map(len, expected))
    assert ids.tolist() == [token for one in expected for token in one]


def test_a_marker_in_a_text_is_spelled_out(tokenizer):
    encode, _ = choose_encoder(tokenizer, [])
    ids, _ = encode(["a<|endoftext|>b", "<|endoftext|>"])
    assert tokenizer.eod not in ids.tolist()
    assert tokenizer.decode(ids.tolist()) == "a<|endoftext|>b<|endoftext|>"


def test_a_text_cannot_spell_the_hidden_name_of_a_marker(tokenizer):
    texts = [
        "a\U0010ffff<|endoftext|>b",
        "plain",
        "\U0010ffff\U0010ffff<|endoftext|>\U0010ffff",
        "",
        "\U0010ffff",
    ]
    fast = GigatokenEncoder(tokenizer.encoder_json, ReferenceEncoder(tokenizer))
    ids, lengths = fast(texts)
    own = tokenizer.encode_batch(texts)
    assert ids.tolist() == [token for one in own for token in one]
    assert lengths.tolist() == list(map(len, own))
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids.tolist()) == "".join(texts)


def test_many_short_texts_take_another_way_to_the_same_ids(tokenizer, monkeypatch):
    monkeypatch.setattr(fast_encoder, "_MANY_SHORT_TEXTS", 50)
    encode = GigatokenEncoder(tokenizer.encoder_json, ReferenceEncoder(tokenizer))
    texts = [*CHAPTERS[0].split()[:100], "", " "]
    first, second = encode(texts[:40]), encode(texts[40:])
    again = encode(texts)
    assert np.array_equal(again[0], np.concatenate([first[0], second[0]]))
    assert np.array_equal(again[1], np.concatenate([first[1], second[1]]))
    assert again[1][-2] == 0


def test_a_tokenizer_that_it_does_not_run_keeps_its_own_library(tmp_path):
    spec = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": spec, "added_tokens": []}))
    words = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    encode, why = choose_encoder(words, ["a"])
    assert isinstance(encode, ReferenceEncoder)
    assert "not with gigatoken: " in why
    numbers = build_tokenizer(TokenizerConfig("NullTokenizer"), 100)
    encode, why = choose_encoder(numbers, ["no numbers"])
    assert encode(["1 2", "3"])[0].tolist() == [1, 2, 3]
    assert why == "encoding with NullTokenizer's own library"


def test_a_difference_is_seen_and_named(tokenizer):
    class Wrong(type(tokenizer)):
        """Its ids are its own, but the file that it gives is not quite."""

        def __init__(self):
            self.__dict__.update(tokenizer.__dict__)

        @property
        def encoder_json(self):
            spec = json.loads(tokenizer.encoder_json)
            spec["pre_tokenizer"]["add_prefix_space"] = True
            return json.dumps(spec)

    encode, why = choose_encoder(Wrong(), CHAPTERS[:1])
    assert isinstance(encode, ReferenceEncoder)
    assert "since gigatoken 0.10.0 gives other ids for " in why
    other = GigatokenEncoder(Wrong().encoder_json, ReferenceEncoder(tokenizer))
    message = first_difference(other, ReferenceEncoder(tokenizer), ["", "whale"])
    expected = tokenizer.encode("whale")
    assert message.startswith("gigatoken 0.10.0 gives other ids for 'whale': from id 0 on ")
    assert message.endswith(f", not {expected[:4]}")


def test_a_prefix_is_no_part_of_what_an_encoder_gives(tokenizer):
    class Prefixed(type(tokenizer)):
        prefix = (3,)

        def __init__(self):
            self.__dict__.update(tokenizer.__dict__)

        def encode_batch(self, texts):
            return [[3, *ids] for ids in tokenizer.encode_batch(texts)]

    ids, lengths = ReferenceEncoder(Prefixed())(["whale", ""])
    assert ids.tolist() == tokenizer.encode("whale")
    assert lengths.tolist() == [len(ids), 0]
