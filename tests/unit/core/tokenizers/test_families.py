"""Every family against its own library, on real and on hard strings; what all families have in common."""

import numpy as np
import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from megatron.core.config import TokenizerConfig
from megatron.core.config.tokenizer import TOKENIZER_TYPES
from megatron.core.tokenizers import build_tokenizer
from tests.unit.core.tokenizers.families import families
from tests.unit.core.tokenizers.texts import CHAPTERS, MARKERS, NASTY, REAL, first_difference

NAMES = [
    "gpt2", "hugging_face", "tiktoken_cl100k", "tiktoken_v2", "tiktoken_v1", "BertWordPieceLowerCase",
    "BertWordPieceCase", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "bytes",
]  # fmt: skip
WITH_JSON = NAMES[:7]
"""Those that have a ``tokenizer.json`` whatever their settings."""


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    found = families(tmp_path_factory.mktemp("families"))
    assert list(found) == NAMES
    return found


def test_every_type_is_among_them(known):
    assert {family.config.tokenizer_type for family in known.values()} | {"NullTokenizer"} == {
        *TOKENIZER_TYPES
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("texts", [REAL, NASTY], ids=["real", "nasty"])
def test_ids_are_the_librarys(known, name, texts):
    family = known[name]
    expected = [family.reference(text) for text in texts]
    assert first_difference(texts, family.build().encode_batch(texts), expected) is None
    assert family.build().encode(texts[-1]) == expected[-1]


@pytest.mark.parametrize("name", WITH_JSON)
def test_special_text_is_parsed_as_the_library_parses_it(known, name):
    family = known[name]
    found = family.build(parse_special_tokens=True).encode_batch(NASTY)
    assert first_difference(NASTY, found, list(map(family.parsing, NASTY))) is None


@pytest.mark.parametrize("name", WITH_JSON)
@pytest.mark.parametrize("parse", [False, True])
def test_the_tokenizer_json_gives_the_same_ids(known, name, parse):
    check_tokenizer_json(known[name].build(parse_special_tokens=parse, vocab_extra_ids=2))


def check_tokenizer_json(tokenizer):
    library = LibraryTokenizer.from_str(tokenizer.encoder_json)
    texts = [*NASTY, *REAL[:200]]
    found = [one.ids for one in library.encode_batch_fast(texts, add_special_tokens=False)]
    expected = [ids[len(tokenizer.prefix) :] for ids in tokenizer.encode_batch(texts)]
    assert first_difference(texts, found, expected) is None


def test_models_like_llamas_have_a_tokenizer_json(known):
    check_tokenizer_json(known["Llama2Tokenizer"].build(vocab_extra_ids=2))
    assert known["Llama2Tokenizer"].build(parse_special_tokens=True).encoder_json is None
    for other in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "bytes"):
        assert known[other].build().encoder_json is None


@pytest.mark.parametrize("name", NAMES[:3] + NAMES[7:])
def test_decoding_is_the_inverse_where_nothing_is_normalized(known, name):
    tokenizer = known[name].build()
    exact = [text for text in NASTY + REAL if not {"\ufffd", "▁"} & set(text)]
    if name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        exact = ["the whale's a ship"]  # they normalize, and have no piece for strange characters
    prefix = len(tokenizer.prefix)
    found = [tokenizer.decode(tokenizer.encode(text)[prefix:]) for text in exact]
    assert first_difference(exact, found, exact) is None


@pytest.mark.parametrize("name", NAMES)
def test_no_text_yields_a_special_token_unless_asked(known, name):
    family = known[name]
    tokenizer = family.build(vocab_extra_ids=2)
    special = {tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask}
    special = {*special, *tokenizer.sentinels} - {None}
    start = len(tokenizer.prefix)
    hidden = "".join(f"a\U0010ffff{marker}" for marker in MARKERS)
    for text in [*NASTY, " ".join(MARKERS), "".join(MARKERS), hidden]:
        assert not special & set(tokenizer.encode(text)[start:]), ascii(text)
    parsing = family.build(vocab_extra_ids=2, parse_special_tokens=True)
    first = parsing.decode([parsing.sentinels[0]])
    assert first == "<extra_id_0>"
    assert parsing.encode(f"the{first}whale")[start:].count(parsing.sentinels[0]) == 1
    assert parsing.identity != tokenizer.identity


@pytest.mark.parametrize("name", NAMES)
def test_sentinels_follow_the_vocabulary(known, name):
    plain, more = known[name].build(), known[name].build(vocab_extra_ids=100)
    assert plain.sentinels == ()
    assert more.sentinels == tuple(range(plain.vocab_size, plain.vocab_size + 100))
    assert more.vocab_size == plain.vocab_size + 100
    assert more.decode([more.sentinels[99]]) == "<extra_id_99>"
    assert (more.eos, more.bos, more.pad, more.mask) == (plain.eos, plain.bos, plain.pad, plain.mask)
    assert more.encode(CHAPTERS[0]) == plain.encode(CHAPTERS[0])
    assert more.identity != plain.identity


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["a\ud800b", "\udc00", "ab" * 500 + "\ud83d"])
def test_half_of_a_surrogate_pair_is_refused(known, name, text):
    place = next(n for n, char in enumerate(text, start=1) if "\ud800" <= char <= "\udfff")
    for parse in (False, True):
        tokenizer = known[name].build(parse_special_tokens=parse)
        with pytest.raises(ValueError, match=f"'.ud...' at character {place} of the text is one half"):
            tokenizer.encode(text)
        with pytest.raises(ValueError, match=f"at character {place} of the text"):
            tokenizer.encode_batch(["ab", text])


@pytest.mark.parametrize("name", NAMES)
def test_pieces_that_continue_a_word(known, name):
    tokenizer = known[name].build(vocab_extra_ids=3)
    if not name.startswith("BertWordPiece"):
        with pytest.raises(ValueError, match="does not say which tokens go on with a word"):
            tokenizer.continues_word()
        return
    continues = tokenizer.continues_word()
    lines = open(known[name].config.vocab_file, encoding="utf-8").read().split("\n")[:-1]  # noqa: SIM115
    assert continues.dtype == np.bool_
    assert continues.tolist() == [line.startswith("##") for line in lines] + [False] * 3
    assert 50 < continues.sum() < len(lines) - 50


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_line_of_five_megabytes(known, name):
    text = ("\n".join(CHAPTERS) * 5)[:5_000_000]
    assert known[name].build().encode(text) == known[name].reference(text)


def test_sentinels_need_names():
    with pytest.raises(ValueError, match=r"--vocab-extra-ids 3: NullTokenizer has numbers"):
        build_tokenizer(TokenizerConfig("NullTokenizer", vocab_extra_ids=3), 10)
    with pytest.raises(ValueError, match=r"--vocab-extra-ids -1: must be at least 0"):
        TokenizerConfig("ByteLevelTokenizer", vocab_extra_ids=-1)
