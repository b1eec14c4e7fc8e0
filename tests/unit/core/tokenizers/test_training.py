"""Training a BPE: what comes out, and that it is the same each time."""

import json

import pytest

from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from tests.unit.core.tokenizers.texts import CHAPTERS


def test_first_merges_are_the_most_frequent_pairs():
    # By hand: "ab" four times, then "ab" + "c" three times.
    spec = json.loads(train_byte_level_bpe(["abc abc abc ab"], 259).to_str())
    assert spec["model"]["merges"][0] == ["a", "b"]
    assert spec["model"]["vocab"]["<|endoftext|>"] == 0
    assert len(spec["model"]["vocab"]) == 259


def test_every_byte_can_be_encoded_whatever_the_training_text():
    tokenizer = train_byte_level_bpe(["aaa"], 300)
    text = "".join(map(chr, range(256))) + "\U0001f433"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() < 300  # no more pairs occur twice


def test_training_twice_gives_the_same_files(tmp_path):
    written = []
    for name in ("first", "second"):
        files = save_tokenizer(train_byte_level_bpe(iter(CHAPTERS[:20]), 600), tmp_path / name)
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == sorted(written[0])


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"--vocab-size 256: .* at least 257"):
        train_byte_level_bpe(["a"], 256)
