"""GPT-2's BPE against tiktoken; tokenizer.json files of several models; special tokens."""

import json

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from tests.unit.core.tokenizers.families import GPT2_PATTERN, gpt2_ranks
from tests.unit.core.tokenizers.texts import CHAPTERS

TRICKY = [
    "Hello 世界 🤖 1234567 don't WE'LL  x",
    "tabs\t\tand\r\nnew\n\n\nlines   and trailing   ",
    "no-break\u00a0space \u3000 e\u0301 é \u200b ffi",
    "a<|endoftext|>b<|endoftext|>",
    "",
    " ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    save_tokenizer(train_byte_level_bpe(CHAPTERS[:10], 700), folder)
    return folder


def gpt2(folder, **options):
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer(TokenizerConfig("GPT2BPETokenizer", **files, **options))


def hugging_face(path, **options):
    return build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(path), **options))


@pytest.fixture(scope="module")
def reference(folder):
    """tiktoken over the same vocabulary."""
    ranks, end = gpt2_ranks(folder / "vocab.json")
    return tiktoken.Encoding(
        "ours", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": end}
    )


@pytest.mark.parametrize("text", [*TRICKY, CHAPTERS[20]])
def test_gpt2_ids_are_tiktokens(folder, reference, text):
    expected = reference.encode(text, disallowed_special=())
    assert gpt2(folder).encode(text) == expected
    assert hugging_face(folder).encode(text) == expected


def test_gpt2_ids_are_tiktokens_on_any_text(folder, reference):
    tokenizer = gpt2(folder)

    @settings(max_examples=150, deadline=None)
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"]), max_size=60))
    def check(text):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == text

    check()


def test_special_text_is_parsed_only_on_request(folder, reference):
    end = reference.eot_token
    for build in (gpt2, lambda folder, **options: hugging_face(folder / "tokenizer.json", **options)):
        tokenizer = build(folder, parse_special_tokens=True)
        assert tokenizer.encode(TRICKY[3]) == reference.encode(TRICKY[3], allowed_special="all")
        assert tokenizer.encode(TRICKY[3]).count(end) == 2
        assert build(folder).encode(TRICKY[3]).count(end) == 0
        assert build(folder).eod == tokenizer.eod == end
        assert build(folder).identity != tokenizer.identity
        assert build(folder).identity == build(folder).identity


def test_sentinels_follow_a_vocabulary_with_a_gap(tmp_path):
    tokenizer = LibraryTokenizer(models.WordLevel({"a": 0, "b": 7, "<extra_id_1>": 3}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    built = hugging_face(tmp_path, vocab_extra_ids=3)
    assert (built.sentinels, built.vocab_size) == ((8, 3, 9), 10)
    assert built.encode("b <extra_id_0> <extra_id_1>") == [7, 0, 0]
    parsing = hugging_face(tmp_path, vocab_extra_ids=3, parse_special_tokens=True)
    assert parsing.encode("b <extra_id_0> <extra_id_1> <extra_id_2>") == [7, 8, 3, 9]


def small_tokenizer(model_kind):
    """A tokenizer with distinct control tokens, in a model that has their names in its own vocabulary."""
    pieces = ["<unk>", "</s>", "<s>", "<pad>", "a", "b", "s", "/", "<", ">"]
    if model_kind == "unigram":
        scores = [0.0] * 4 + [-2.0] * 6
        model = models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0)
    else:
        model = models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>")
    tokenizer = LibraryTokenizer(model)
    if model_kind == "word":
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>", "<s>", "<pad>"])
    return tokenizer


@pytest.mark.parametrize(("model_kind", "text", "expected"), [
    ("unigram", "a</s>b", [4, 8, 7, 6, 9, 5]),
    ("word", "a </s> b", [4, 0, 5]),  # a word that isn't in the vocabulary
])  # fmt: skip
def test_control_tokens_of_any_model_come_from_no_text(tmp_path, model_kind, text, expected):
    small_tokenizer(model_kind).save(str(tmp_path / "tokenizer.json"))
    plain, parsing = hugging_face(tmp_path), hugging_face(tmp_path, parse_special_tokens=True)
    assert (plain.bos, plain.eos, plain.eod, plain.pad, plain.vocab_size) == (2, 1, 1, 3, 10)
    assert plain.encode(text) == expected
    assert parsing.encode(text) == [4, 1, 5]
    assert plain.encode_batch(["a", text]) == [[4], expected]


def test_ordinary_added_tokens_keep_their_ids_and_are_still_found(tmp_path):
    tokenizer = small_tokenizer("unigram")
    tokenizer.add_special_tokens(["<extra>"])
    tokenizer.add_tokens([AddedToken("ab", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert hugging_face(tmp_path).encode("abb<s>") == [11, 5, 8, 6, 9]


@pytest.mark.parametrize(("config", "expected"), [
    ({"eos_token": "<pad>", "bos_token": {"content": "</s>"}, "pad_token": "<s>"}, (1, 3, 2)),
    ({"eos_token": None, "pad_token": "not there"}, (2, 1, None)),
    ({}, (2, 1, 3)),
])  # fmt: skip
def test_control_tokens_named_in_the_folder_win(tmp_path, config, expected):
    small_tokenizer("unigram").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = hugging_face(path)
        assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == expected


def folder_with_padding(folder, there, **config):
    (there / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (there / "tokenizer_config.json").write_text(json.dumps(config))
    return hugging_face(there)


@pytest.mark.parametrize("listed", [False, True])
def test_an_ordinary_token_named_as_padding_still_spells_text(tmp_path, folder, listed):
    plain = hugging_face(folder / "tokenizer.json")
    bang = plain.encode("!")[0]
    decoder = {str(bang): {"content": "!", "special": True}} if listed else {}
    tokenizer = folder_with_padding(folder, tmp_path, pad_token="!", added_tokens_decoder=decoder)
    text = "Hello! World!! <|endoftext|>"
    assert tokenizer.pad == bang
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.identity != plain.identity


def test_a_token_listed_as_special_beside_the_file_comes_from_no_text(tmp_path, folder):
    plain = hugging_face(folder / "tokenizer.json")
    (the,) = plain.encode(" the")
    decoder = {str(the): {"content": "\u0120the", "special": True}}
    tokenizer = folder_with_padding(folder, tmp_path, pad_token="\u0120the", added_tokens_decoder=decoder)
    assert tokenizer.pad == the
    assert the not in tokenizer.encode("by the sea")
    assert tokenizer.decode(tokenizer.encode("by the sea")) == "by the sea"


def test_a_file_without_an_end_token_says_so_when_asked(tmp_path):
    tokenizer = LibraryTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    built = hugging_face(tmp_path)
    assert not built.has_eod
    assert built.vocab_size == 8  # ids with a gap: one more than the largest
    with pytest.raises(ValueError, match=r"HuggingFaceTokenizer \(--tokenizer-model .*--append-eod"):
        _ = built.eod


def test_errors_are_one_line_and_name_the_flag(tmp_path, folder):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "no_model.json").write_text('{"a": 1}')
    (tmp_path / "strange.json").write_text('{"model": {"type": "Strange"}}')
    (tmp_path / "cut.json").write_text((folder / "tokenizer.json").read_text()[:1000])
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "tokenizer.model").touch()
    for name, message in {
        "gone.json": "no such file",
        "list.json": "holds a JSON list",
        "no_model.json": "no key 'model'",
        "strange.json": "cannot read it",
        "cut.json": "cannot be read as JSON",
        "llama": "--tokenizer-type SentencePieceTokenizer --tokenizer-model",
        ".": "holds no tokenizer.json",
    }.items():
        with pytest.raises(ValueError, match=message) as failure:
            hugging_face(tmp_path / name)
        assert str(tmp_path) in str(failure.value)
        assert "\n" not in str(failure.value)
    with pytest.raises(
        ValueError, match=r"--tokenizer-model meta-llama/x: no such file.*nothing is downloaded"
    ):
        hugging_face("meta-llama/x")
    with pytest.raises(ValueError, match="GPT2BPETokenizer needs --merge-file"):
        build_tokenizer(TokenizerConfig("GPT2BPETokenizer", vocab_file=str(folder / "vocab.json")))
    with pytest.raises(
        ValueError, match=r"--vocab-size 100: the vocabulary of HuggingFaceTokenizer .* 700 ids"
    ):
        build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder)), 100)
    with pytest.raises(ValueError, match="--tokenizer-type is missing"):
        build_tokenizer(TokenizerConfig())
