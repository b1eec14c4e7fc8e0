"""Numbers as text."""

import pytest

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer


def test_numbers_are_ids_and_the_last_id_ends_documents():
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer"), 100)
    assert tokenizer.encode(" 3 1\n4\t98 ") == [3, 1, 4, 98]
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (100, 99, None, None)
    assert tokenizer.decode([3, 99]) == "3 99"
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(("text", "message"), [
    ("1 100", "id 100 is outside the vocabulary: --vocab-size 100 has ids 0 to 99"),
    ("1 -1", "'-1' is none"),
    ("1 whale", "'whale' is none"),
    ("1 ²", "'²' is none"),
    ("1" * 50, "outside the vocabulary"),
])  # fmt: skip
def test_what_is_no_id_is_refused(text, message):
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer"), 100)
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(text)


def test_it_needs_a_size():
    with pytest.raises(ValueError, match="NullTokenizer needs --vocab-size"):
        build_tokenizer(TokenizerConfig("NullTokenizer"))
    with pytest.raises(ValueError, match="--vocab-size 0: must be at least 1"):
        build_tokenizer(TokenizerConfig("NullTokenizer"), 0)
