"""Files of ranks, the ids of special tokens before them, and texts that the library cannot split."""

import base64
import json

import pytest

from megatron.core.config import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from tests.unit.core.tokenizers.families import MEGATRON_V1, write_ranks

TOKENS = [bytes((byte,)) for byte in range(256)] + [b"th", b"the", b" t", b" the", b"  "]


def build(path, vocab_size=None, **options):
    options = {
        name if name.startswith("vocab") else f"tiktoken_{name}": value for name, value in options.items()
    }
    return build_tokenizer(TokenizerConfig("TikTokenizer", tokenizer_model=str(path), **options), vocab_size)


@pytest.fixture
def ranks(tmp_path):
    write_ranks(tmp_path / "ranks.json", TOKENS)
    return tmp_path / "ranks.json"


def tekken(path, tokens=TOKENS, **config):
    """A file as Mistral's, with more in it."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)
    ]
    whole = {"config": {"pattern": MEGATRON_V1, **config}, "vocab": entries, "image": {}}
    special = whole["config"].pop("special_tokens", None)
    path.write_text(json.dumps(whole | {"special_tokens": special}))
    return path


def test_special_tokens_come_first(ranks):
    tokenizer = build(ranks)
    assert tokenizer.vocab_size == 1000 + 261
    assert tokenizer.encode("the the") == [1257, 1259]  # "th" is merged on: its rank is lower
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eod) == (1, 2, 2)
    assert (tokenizer.mask, tokenizer.pad, tokenizer.cls, tokenizer.sep) == (3, 4, 5, 6)
    assert tokenizer.decode([0, 2, 7, 999, 1257]) == "<unk></s><SPECIAL_7><SPECIAL_999>the"
    few = build(ranks, num_special_tokens=5, special_tokens=("<s>", "</s>", "<unk>", "<sep>"))
    assert (few.bos, few.eos, few.sep, few.pad, few.vocab_size) == (0, 1, 3, None, 266)
    assert few.decode([4]) == "<SPECIAL_4>"
    none = build(ranks, num_special_tokens=0)
    assert (none.encode("the"), none.has_eod) == ([257], False)


def test_a_json_file_is_cut_to_the_vocabulary(ranks):
    cut = build(ranks, 1258)
    assert cut.vocab_size == 1258
    assert cut.encode("the the") == [1257, 1032, 1257]
    assert build(ranks, 5000).vocab_size == 1261
    assert cut.identity != build(ranks).identity == build(ranks, 5000).identity
    with pytest.raises(ValueError, match=r"does not hold all 256 bytes when it is cut to 1255 ids"):
        build(ranks, 1255)
    lines = ranks.with_suffix(".tiktoken")
    write_ranks(lines, TOKENS)
    with pytest.raises(
        ValueError, match=r"--vocab-size 1258: the vocabulary of TikTokenizer .* has 1261 ids"
    ):
        build(lines, 1258, pattern="v2")


def test_what_a_tekken_file_says_counts_where_flags_do_not(tmp_path):
    names = [{"rank": n, "token_str": name} for n, name in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    path = tekken(
        tmp_path / "tekken.json", default_num_special_tokens=10, default_vocab_size=268, special_tokens=names
    )
    tokenizer = build(path)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (268, 2, None)
    assert tokenizer.decode([3, 4]) == "[INST]<SPECIAL_4>"
    assert build(path, 300).vocab_size == 10 + 261
    assert build(path, 300, num_special_tokens=20, special_tokens=("<s>", "<pad>", "</s>", "<unk>")).pad == 1


def test_the_pattern_is_the_flags_then_the_files_then_v2(tmp_path):
    """An upper-case letter after a lower-case one begins a piece in v2 and none in v1."""
    tokens = [*TOKENS[:256], b"aB"]
    write_ranks(tmp_path / "ranks.json", tokens)
    file = tekken(tmp_path / "tekken.json", tokens)
    merged, apart = [266], [107, 76]
    for path, options, expected in [
        (tmp_path / "ranks.json", {}, apart),
        (tmp_path / "ranks.json", {"pattern": "v2"}, apart),
        (tmp_path / "ranks.json", {"pattern": "v1"}, merged),
        (file, {}, merged),
        (file, {"pattern": "v2"}, apart),
    ]:
        assert build(path, num_special_tokens=10, **options).encode("aB") == expected


@pytest.mark.parametrize("pattern", ["v1", "v2", "cl100k", "o200k"])
def test_a_million_spaces(ranks, pattern):
    """More than the library's regular expressions can go back over."""
    tokenizer = build(ranks, pattern=pattern, num_special_tokens=0)
    ids = tokenizer.encode("the" + " " * 1_200_001 + "the\n" + "\n" * 150_000 + "the")
    assert ids[:600_003] == [257] + [260] * 600_000 + [259, 10]
    assert ids[600_003:] == [10] * 150_000 + [257]


def test_short_runs_of_spaces_are_split_alike_by_both_ways(ranks, monkeypatch):
    texts = ["a" + " " * 30 + "b \n \n  c", "\n" * 40 + " the" + "\t" * 25, "x\u00a0" * 3 + " " * 20]
    for pattern in ("v1", "v2", "cl100k", "o200k"):
        tokenizer = build(ranks, pattern=pattern)
        expected = tokenizer.encode_batch(texts)
        with monkeypatch.context() as patch:
            patch.setattr("megatron.core.tokenizers.tiktoken._LONG_SPACE", 1)
            patch.setattr(
                "megatron.core.tokenizers.tiktoken._LONG_SPACES", __import__("re").compile(r"\s{2}")
            )
            assert tokenizer.encode_batch(texts) == expected


def test_files_and_flags_that_do_not_fit(tmp_path, ranks):
    def file(name, content):
        (tmp_path / name).write_text(content)
        return tmp_path / name

    entry = '{"rank": 0, "token_bytes": "AA=="}'
    lines = tmp_path / "lines.tiktoken"
    write_ranks(lines, TOKENS)
    for path, options, message in [
        (lines, {}, r"lines\.tiktoken: a \.tiktoken file does not say .* --tiktoken-pattern, one of v1, v2"),
        (file("a", "IQ== 0\nIQ== 1\n"), {}, r"a:2: not a \.tiktoken file.*b'!' has rank 0 already"),
        (file("b", "IQ== 0\n\nIg==\n"), {}, r"b:3: not a \.tiktoken file"),
        (file("c", "IQ== 0\nI!== 1\n"), {}, r"c:2: not a \.tiktoken file"),
        (file("d", "IQ== 0\nIg== 0\n"), {}, r"d: .*two tokens have the same rank"),
        (file("e", "IQ== 0\n"), {"pattern": "v1"}, r"e: the vocabulary does not hold all 256 bytes$"),
        (file("f", f"[{entry}, {entry}]"), {}, r"f: not a JSON file of ranks.*entry 1 has rank 0"),
        (file("g", "[1]"), {}, r"g: not a JSON file of ranks"),
        (file("h", '{"a": 1}'), {}, r"h: not a JSON file of ranks.*no 'vocab'"),
        (file("i", "[{"), {}, r"i: not a JSON file of ranks"),
        (tmp_path / "gone", {}, r"--tokenizer-model .*gone: no such file; TikTokenizer wants"),
        (
            ranks,
            {"special_tokens": ("<s>", "</s>")},
            r"--tiktoken-special-tokens <s> </s>: .*<unk>, <s>, </s>",
        ),
        (ranks, {"special_tokens": ("<s>",) * 2}, r"give each name once"),
        (
            ranks,
            {"special_tokens": ("<unk>", "<s>", "</s>"), "num_special_tokens": 2},
            r"--tiktoken-num-special-tokens 2: --tiktoken-special-tokens names 3; give at least that",
        ),
    ]:
        with pytest.raises(ValueError, match=message) as failure:
            build(path, **options)
        assert "\n" not in str(failure.value)
    with pytest.raises(ValueError, match=r"--tiktoken-num-special-tokens -1: must be at least 0"):
        TokenizerConfig("TikTokenizer", tiktoken_num_special_tokens=-1)
