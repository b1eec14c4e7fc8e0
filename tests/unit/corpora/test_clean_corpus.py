"""tools/clean_corpus.py and what it is made of, against texts whose right form is known."""

import gzip
import json
import random
import string
import sys

import ftfy
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.corpora.cleaning import Cleaning, sample
from megatron.corpora.json_lines import text_on_line, with_text
from megatron.corpora.output import complete_or_absent, output_names
from megatron.corpora.repair import repair
from tests.unit.corpora.tools import last_line, read_corpus, report_of, run, write_corpus

ENGLISH = "It was the best of times, it was the worst of times, it was the age of wisdom and of foolishness. "
GERMAN = "Es war die beste aller Zeiten, es war die schlimmste aller Zeiten, ein Zeitalter der Weisheit. "
CHINESE = "那是最美好的时代，那是最糟糕的时代；那是智慧的年头，那是愚昧的年头。"


def clean(folder, *flags):
    return run("clean_corpus", "--workers", 2, *flags, cwd=folder)


def test_each_filter_drops_what_it_should_and_the_rest_keeps_its_bytes(tmp_path):
    lines = [
        b'{"a" : 1.0e2, "text": "%s"  ,"big": 123456789012345678901234, "a": 2}' % (ENGLISH * 8).encode(),
        json.dumps({"text": GERMAN * 10}).encode(),
        b"  ",
        json.dumps({"text": ENGLISH}).encode(),
        b'{"x": {"text": "inner"}, "text": %s, "y": 1.50}' % json.dumps("cafÃ© " + ENGLISH * 8).encode(),
        json.dumps({"text": GERMAN}).encode(),
        json.dumps({"text": "naïve “" + ENGLISH * 8}, ensure_ascii=False).encode(),
        b'{"text": ""}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    result = clean(
        tmp_path, "--input", "in.jsonl", "--output", "out.jsonl", "--languages", "en", "--report", "r.json"
    )
    report = report_of(result)
    fixed = json.dumps("café " + ENGLISH * 8).encode()
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(
        line + b"\n"
        for line in (lines[0], b'{"x": {"text": "inner"}, "text": %s, "y": 1.50}' % fixed, lines[6])
    )
    assert {
        key: report[key] for key in ("documents", "kept", "repaired", "repaired_and_kept", "dropped")
    } == {
        "documents": 7,
        "kept": 3,
        "repaired": 1,
        "repaired_and_kept": 1,
        "dropped": {"length": 3, "language": 1},
    }
    assert report["settings"]["length_counted_in"] == "words"
    assert json.loads((tmp_path / "r.json").read_text()) == report


def test_documents_of_fewer_than_128_words_are_dropped(tmp_path):
    write_corpus(tmp_path / "in.jsonl", ["w " * 127, " w\n" * 128, "\tw" * 129])
    report_of(clean(tmp_path, "--input", "in.jsonl", "--output", "out.jsonl"))
    assert [line["id"] for line in read_corpus(tmp_path / "out.jsonl")] == [1, 2]


def test_a_tokenizer_counts_tokens_instead(tmp_path):
    write_corpus(tmp_path / "in.jsonl", ["7 " * 9, "7 " * 10, "7 " * 200])
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 9]
    flags = ["--input", "in.jsonl", "--output", "out.jsonl", "--min-tokens", 10]
    report = report_of(clean(tmp_path, *flags, *tokenizer))
    assert [line["id"] for line in read_corpus(tmp_path / "out.jsonl")] == [1, 2]
    assert report["settings"]["length_counted_in"] == "tokens"


def test_output_does_not_depend_on_workers_shards_or_compression(tmp_path):
    rng = random.Random(1)
    texts = [rng.choice([ENGLISH, "cafÃ© ", "x "]) * rng.randrange(1, 300) for _ in range(120)]
    whole = write_corpus(tmp_path / "whole.jsonl", texts).read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:50])))
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[50:]))
    one = report_of(clean(tmp_path, "--input", "whole.jsonl", "--output", "one.jsonl.zst", "--workers", 1))
    expected = zstandard.ZstdDecompressor().stream_reader((tmp_path / "one.jsonl.zst").read_bytes()).read()
    assert 0 < one["kept"] < 120
    parts = ["--input", "a.jsonl.gz", "b.jsonl", "--output-folder", "parts"]
    for index in (0, 1):
        report_of(clean(tmp_path, *parts, "--shard", f"{index}/2"))
    found = [tmp_path / "parts" / "a.jsonl.gz", tmp_path / "parts" / "b.jsonl"]
    assert gzip.decompress(found[0].read_bytes()) + found[1].read_bytes() == expected
    report_of(clean(tmp_path, *parts[:-2], "--output", "joined.jsonl"))
    assert (tmp_path / "joined.jsonl").read_bytes() == expected


def test_a_shard_without_files_says_so(tmp_path):
    write_corpus(tmp_path / "in.jsonl", ["w " * 128])
    flags = ["--input", "in.jsonl", "--output-folder", "out", "--shard"]
    result = clean(tmp_path, *flags, "1/4")
    assert "--shard 1/4: no file of 1 is for this shard, nothing to do\n" in result.stderr
    assert "kept" not in report_of(result)
    result = clean(tmp_path, *flags, "0/4")
    assert "nothing to do" not in result.stderr
    assert report_of(result)["kept"] == 1


def test_a_bad_line_is_named_and_leaves_no_output_or_is_skipped(tmp_path):
    write_corpus(tmp_path / "in.jsonl", ["w " * 128])
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"text": "cut\n')
    result = clean(tmp_path, "--input", "in.jsonl", "--output", "out.jsonl")
    assert result.returncode == 1
    assert last_line(result).startswith("error: in.jsonl:2: malformed JSON: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    report = report_of(clean(tmp_path, "--input", "in.jsonl", "--output", "out.jsonl", "--skip-bad-lines"))
    assert (report["kept"], report["skipped_bad_lines"]) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--languages", "english"], "--languages english: not known; known are ace af "),
        (["--min-tokens", -1], "--min-tokens -1: must not be negative"),
        (["--min-language-probability", 2], "must lie between 0 and 1"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "--vocab-file"),
        (["--engine", "ray"], "pip install -r requirements-cluster.txt brings it"),
        (["--engine-address", "auto"], "--engine-address has no meaning with --engine local"),
        (["--output", "out.parquet"], "--output out.parquet: not written in that form"),
        (["--shard", "1/4"], "--output out.jsonl --shard 1/4: shards are shares of the files"),
    ],
)
def test_wrong_flags_end_with_one_line(tmp_path, flags, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    write_corpus(tmp_path / "in.jsonl", ["a"])
    result = clean(tmp_path, "--input", "in.jsonl", "--output", "out.jsonl", *flags)
    assert result.returncode in (1, 2)
    assert reason in last_line(result)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "language", "kept"),
    [
        (ENGLISH, ("en",), True),
        (ENGLISH, ("de", "fr"), False),
        (GERMAN, ("de",), True),
        (GERMAN * 40 + ENGLISH, ("en",), False),  # its end is English, its middle is not
        (CHINESE, ("zh",), True),
        (CHINESE, ("en",), False),
    ],
)
def test_language_of_known_texts(text, language, kept):
    assert Cleaning("text", languages=language).is_in_language(text) is kept


def test_a_sample_is_spread_over_the_text():
    text = "".join(chr(ord("a") + place // 100) for place in range(2000))
    assert sample(text, 40) == "a" * 10 + "\n" + text[663:673] + "\n" + text[1326:1336] + "\n" + "t" * 10
    assert sample(text, 2000) == sample(text, 0) == text


SPOILED = [
    "schÃ¶n",
    "Ã ",
    "a Â ",
    "â€™",
    "вЂ",
    "Ð¿Ñ€",
    "√±",
    "ГўВЂВ.x",
    "œ ",
    "à²",
    "“",
    "é",
    "\x1b[0m",
    "\ufeff",
    "ﬁ",
]
PIECES = st.sampled_from([*SPOILED, " ", "\n", "a", "plain text ", "\x80", "\x00", "\r"])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | PIECES).map("".join))
@settings(max_examples=120, deadline=None)
def test_repair_of_encoding_is_ftfys_own(text):
    config = ftfy.TextFixerConfig(
        unescape_html=False, fix_latin_ligatures=False, fix_character_width=False, uncurl_quotes=False,
        fix_line_breaks=False, normalization=None,
    )  # fmt: skip
    assert repair(text, "encoding") == ftfy.fix_text(text, config)
    assert repair(text, "none") == text
    assert repair(text, "full") == ftfy.fix_text(text)


@given(st.text(string.printable + "\x7f\x1b\x00", max_size=40))
@settings(max_examples=100, deadline=None)
def test_plain_ascii_needs_no_repair_but_of_control_characters(text):
    kept = "".join(letter for letter in text if letter in string.printable and letter not in "\x0b\x0c")
    if "\x1b[" not in text:
        assert repair(text, "encoding").replace("\x0b", "").replace("\x0c", "") == kept


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), TEXT, TEXT, st.booleans(), st.booleans())
@settings(max_examples=70, deadline=None)
def test_a_line_with_another_text_differs_in_the_text_alone(record, text, other, ascii_only, spaced):
    record = {**record, "text": text}
    separators = (" , ", "\t: ") if spaced else (",", ":")
    try:
        line = json.dumps(record, ensure_ascii=ascii_only, separators=separators).encode() + b" \r\n"
    except UnicodeEncodeError:
        return  # half a surrogate pair has no UTF-8
    changed = with_text(line, "text", other)
    literal = json.dumps(text, ensure_ascii=ascii_only).encode()
    key = b'"text"' + separators[1].encode() + literal
    before, found, after = line.rpartition(key)
    assert found
    spelled = json.dumps(other, ensure_ascii=line.isascii()).encode()
    assert changed == before + key[: len(key) - len(literal)] + spelled + after
    assert text_on_line(line, "text") == text


def test_the_last_of_two_equal_keys_counts_as_for_every_reader():
    line = b'{"text": "one", "n": {"text": "two"}, "text": "three"}\n'
    assert text_on_line(line, "text") == json.loads(line)["text"]
    assert with_text(line, "text", "x") == b'{"text": "one", "n": {"text": "two"}, "text": "x"}\n'


def test_output_names_keep_compression_where_it_can_be_written(tmp_path):
    names = ["a.jsonl", "b.jsonl.gz", "c.zst", "d.jsonl.bz2", "e.parquet", "f.txt", "part-7"]
    found = output_names([tmp_path / name for name in names], tmp_path / "out")
    assert [path.name for path in found] == [
        "a.jsonl", "b.jsonl.gz", "c.zst", "d.jsonl.zst", "e.jsonl.zst", "f.txt", "part-7"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="would both become"):
        output_names([tmp_path / "x" / "a.jsonl", tmp_path / "y" / "a.jsonl"], tmp_path / "out")
    with pytest.raises(ValueError, match="would be written over"):
        output_names([tmp_path / "a.jsonl"], tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_interrupted_file_is_absent_and_the_old_one_stays(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"old")

    def write_half():
        with complete_or_absent(path) as file:
            file.write(b"new" * 1000)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    for _ in range(2):
        with complete_or_absent(path) as file:
            file.write(b"new\n")
    unpack = {
        ".gz": gzip.decompress,
        ".zst": lambda data: zstandard.ZstdDecompressor().stream_reader(data).read(),
    }
    assert unpack.get(path.suffix, bytes)(path.read_bytes()) == b"new\n"
