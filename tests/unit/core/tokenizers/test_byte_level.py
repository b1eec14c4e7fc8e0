"""Bytes as tokens: no id stands for two things."""

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer

TOKENIZER = build_tokenizer(TokenizerConfig("ByteLevelTokenizer"))


def test_each_byte_is_its_own_id():
    assert TOKENIZER.encode("A\x00é") == [65, 0, 195, 169]
    assert TOKENIZER.decode([65, 0, 195, 169, 10]) == "A\x00é\n"
    assert TOKENIZER.decode([195, 256, 65, 257]) == "\ufffd<eod>A<bos>"
    assert TOKENIZER.encode("") == []


def test_special_ids_follow_the_bytes():
    assert (TOKENIZER.eod, TOKENIZER.eos, TOKENIZER.bos, TOKENIZER.pad) == (256, 256, 257, 258)
    assert (TOKENIZER.cls, TOKENIZER.sep, TOKENIZER.mask, TOKENIZER.vocab_size) == (259, 260, 261, 262)
    parsing = build_tokenizer(
        TokenizerConfig("ByteLevelTokenizer", vocab_extra_ids=2, parse_special_tokens=True)
    )
    assert parsing.encode("a<eod><extra_id_1>é") == [97, 256, 263, 195, 169]
