"""Corpora of every shape through tools/preprocess_data.py: formats, parts, crashes, bad lines, sentences."""

import bz2
import gzip
import json
import random
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import blocks, documents
from megatron.core.tokenizers.fast_encoder import GigatokenEncoder
from megatron.core.tokenizers.training import save_tokenizer, train_byte_level_bpe
from megatron.corpora import preprocessing
from tests.end_to_end.preprocessing import both_bytes, corpus, failed, files_in, read, run

DRAW = random.Random(0)
IDS = [[DRAW.randrange(100) for _ in range(DRAW.choice([1, 2, 30, 200]))] for _ in range(400)]
TEXTS = [" ".join(map(str, ids)) for ids in IDS]
LINES = [json.dumps({"text": text}) + "\n" for text in TEXTS]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a little corpus has many, and so can be cut into parts."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4000)


@pytest.fixture
def mixed(tmp_path):
    """One corpus in five files of five kinds, whose names say nothing, and a pattern that names them."""
    shares = ["".join(LINES[n * 80 : n * 80 + 80]).encode() for n in range(5)]
    (tmp_path / "in-0").write_bytes(shares[0])
    (tmp_path / "in-1").write_bytes(gzip.compress(shares[1]))
    (tmp_path / "in-2").write_bytes(zstandard.compress(shares[2]))
    (tmp_path / "in-3").write_bytes(bz2.compress(shares[3]))
    pyarrow.parquet.write_table(pyarrow.table({"id": range(80), "text": TEXTS[320:]}), tmp_path / "in-4")
    return tmp_path / "in-*"


def test_all_formats_and_any_partitions_give_one_and_the_same(tmp_path, mixed, small_blocks):
    seen = set()
    for partitions, workers in ((1, 2), (3, 1), (50, 2)):
        flags = ["--partitions", partitions, "--workers", workers, "--append-eod"]
        result = run(tmp_path, "--input", mixed, *flags)
        assert result.returncode == 0, result.stderr
        assert "100%" in result.stderr
        seen.add(both_bytes(tmp_path))
    assert read(tmp_path / "out_text_document") == [[[*ids, 99]] for ids in IDS]
    assert len(seen) == 1
    assert files_in(tmp_path) == [f"in-{n}" for n in range(5)] + [
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_a_compressed_file_that_is_cut_off_is_named(tmp_path, mixed):
    path = tmp_path / "in-3"
    path.write_bytes(path.read_bytes()[:-9])
    result = run(tmp_path, "--input", mixed, "--skip-bad-lines")
    error = failed(tmp_path, result, kept=[f"in-{n}" for n in range(5)])
    assert "in-3: the bzip2 file is damaged or cut off" in error
    assert error.count("\n") == 1


def crash_at(monkeypatch, part):
    """Let the run fail in a part, as on a full disk."""
    take = preprocessing.Preprocessing._take

    def failing(self, result, writer):
        if result.block.part == part:
            raise OSError("no space left")
        take(self, result, writer)

    monkeypatch.setattr(preprocessing.Preprocessing, "_take", failing)
    return lambda: monkeypatch.setattr(preprocessing.Preprocessing, "_take", take)


def test_a_resumed_run_gives_the_bytes_of_an_uninterrupted_one(tmp_path, small_blocks, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(LINES))
    assert run(tmp_path, "--input", path).returncode == 0
    expected = both_bytes(tmp_path)
    for name in ("bin", "idx"):
        (tmp_path / f"out_text_document.{name}").unlink()
    flags = ["--input", path, "--partitions", 6]
    mend = crash_at(monkeypatch, 4)
    broken = run(tmp_path, *flags)
    assert broken.returncode == 1
    assert "no space left (4 finished parts are kept: --resume goes on from them)" in broken.stderr
    assert files_in(tmp_path) == ["in.jsonl", "out_text_document.parts"]
    mend()
    resumed = run(tmp_path, *flags, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "4 of 6 parts are finished already" in resumed.stderr
    assert "400 documents" in resumed.stdout
    assert both_bytes(tmp_path) == expected
    assert files_in(tmp_path) == ["in.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_stale_parts_are_never_used(tmp_path, small_blocks, monkeypatch):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(LINES))
    flags = ["--input", path, "--partitions", 6]
    mend = crash_at(monkeypatch, 4)
    run(tmp_path, *flags)
    mend()
    path.write_text("".join(reversed(LINES)))
    refused = run(tmp_path, *flags, "--resume")
    assert refused.returncode == 1
    assert "were made from something else: input 0 changed was " in refused.stderr
    other = run(tmp_path, *flags, "--append-eod", "--resume")
    assert other.returncode == 1
    anew = run(tmp_path, *flags)
    assert anew.returncode == 0, anew.stderr
    assert "deleted 4 finished parts of an earlier run" in anew.stderr
    assert read(tmp_path / "out_text_document") == [[ids] for ids in reversed(IDS)]


def test_a_bad_line_in_a_late_part_has_its_number_in_the_file(tmp_path, small_blocks):
    lines = [*LINES[:377], '{"text": 5}\n', "\n", *LINES[377:]]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(lines))
    broken = run(tmp_path, "--input", path, "--partitions", 4)
    assert "in.jsonl:378: key 'text' holds a number" in broken.stderr
    skipped = run(tmp_path, "--input", path, "--partitions", 4, "--resume", "--skip-bad-lines")
    assert skipped.returncode == 0, skipped.stderr
    assert "skipped 1 unusable lines, the first " in skipped.stdout
    assert "in.jsonl:378: key" in skipped.stdout
    assert read(tmp_path / "out_text_document") == [[ids] for ids in IDS]


def malformed(draw, line):
    """A line of JSON with something wrong in it: cut, doubled, garbled, or of another kind."""
    cut = draw.randrange(1, len(line))
    ways = [
        line[:cut],
        line + draw.choice([line, ",", "]", "x", '"']),
        line[:cut] + draw.choice(["\x00", "\x01", '"', "\\", "\\ud800", "}", "{", "["]) + line[cut:],
        draw.choice(["[1]", "null", "7", '"text"', "[" * 3000, "{}", "nan", '{"text": [1]}', '{"text": {}}']),
        draw.choice(
            ['{"text": null}', '{"text": 1.5}', '{"text": false}', '{"txt": "1"}', '{"text": ["1", null]}']
        ),
        line.replace('"text"', draw.choice(["text", "'text'", '"Text"', '"text" "text"'])),
        line.replace(":", draw.choice(["", "=", "::", ",", ";"])),
    ]
    return draw.choice(ways)


def meant(line):
    """What the standard library makes of a line: the ids, or None if it is no document."""
    try:
        text = json.loads(line)["text"]
        assert isinstance(text, str)
        ids = [int(word) for word in text.split()]
        assert all(word.isascii() and word.isdigit() for word in text.split())
        assert max(ids, default=0) < 100
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
        return None
    return ids


def test_a_thousand_malformed_lines_make_an_error_or_are_skipped(tmp_path, small_blocks):
    draw = random.Random(1)
    lines, expected, num_bad = [], [], 0
    while num_bad < 1000:
        good, number = draw.random() < 0.3, draw.randrange(400)
        line = LINES[number].strip() if good else malformed(draw, LINES[number].strip())
        ids = meant(line)
        if ids is not None and ids:
            expected.append([ids])
        num_bad += ids is None
        lines.append(line)
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    skipped = run(tmp_path, "--input", path, "--skip-bad-lines", "--partitions", 3)
    assert skipped.returncode == 0, skipped.stderr
    assert f"skipped {num_bad} unusable lines" in skipped.stdout
    assert read(tmp_path / "out_text_document") == expected
    for suffix in ("bin", "idx"):
        (tmp_path / f"out_text_document.{suffix}").unlink()
    first = next(number for number, line in enumerate(lines, start=1) if meant(line) is None)
    error = failed(tmp_path, run(tmp_path, "--input", path), kept=["in.jsonl"])
    assert f"in.jsonl:{first}: " in error


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    """A tokenizer of single bytes and a few pairs: its ids are decoded without it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_byte_level_bpe(["the whale the ship"], 270)
    save_tokenizer(tokenizer, folder)
    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    allowed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {chr(byte): byte for byte in allowed}
    others = [byte for byte in range(256) if byte not in allowed]
    spelling.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return folder, lambda ids: bytes(spelling[char] for one in ids for char in vocabulary[one]).decode()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.text(max_size=40) | st.lists(st.text(max_size=10), max_size=4), min_size=1, max_size=30),
       st.booleans())  # fmt: skip
def test_random_documents_come_back_as_they_were(tmp_path_factory, bytes_tokenizer, texts, spelled):
    folder, decode = bytes_tokenizer
    tmp_path = tmp_path_factory.mktemp("random")
    lines = [json.dumps({"text": text}, ensure_ascii=spelled) for text in [*texts, "the end"]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    result = run(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", 1, tokenizer=flags)
    assert result.returncode == 0, result.stderr
    assert "encoding with gigatoken" in result.stderr
    as_lists = [[text] if isinstance(text, str) else text for text in [*texts, "the end"]]
    expected = [[piece for piece in pieces if piece and not piece.isspace()] for pieces in as_lists]
    found = [[decode(ids) for ids in sequences] for sequences in read(tmp_path / "out_text_document")]
    assert found == [pieces for pieces in expected if pieces]


def test_an_encoder_found_wrong_on_the_way_is_replaced_from_the_start(tmp_path, bytes_tokenizer, monkeypatch):
    folder, decode = bytes_tokenizer
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 200)
    monkeypatch.setattr(documents, "_SAMPLED_BLOCKS", 1)
    texts = [f"whale {n} ship" for n in range(200)]
    path = corpus(tmp_path, *texts)
    right = GigatokenEncoder.__call__

    def wrong(self, batch):
        return right(self, [text.replace("whale 1", "ship") for text in batch])

    monkeypatch.setattr(GigatokenEncoder, "__call__", wrong)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    result = run(tmp_path, "--input", path, "--partitions", 5, tokenizer=flags)
    assert result.returncode == 0, result.stderr
    assert "encoding with gigatoken" in result.stderr
    assert "beginning anew with the tokenizer's own library" in result.stderr
    assert "deleted" not in result.stderr
    assert [decode(ids) for (ids,) in read(tmp_path / "out_text_document")] == texts
    own = run(tmp_path, "--input", path, "--encoder", "own", tokenizer=flags)
    assert "gigatoken" not in own.stderr


def test_literal_markers_make_no_boundaries_with_the_fast_encoder(tmp_path, bytes_tokenizer):
    folder, decode = bytes_tokenizer
    texts = ["a<|endoftext|>b<|endoftext|>", "<|endoftext|>"]
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    result = run(tmp_path, "--input", corpus(tmp_path, *texts), "--append-eod", tokenizer=flags)
    assert "encoding with gigatoken" in result.stderr
    found = read(tmp_path / "out_text_document")
    end = found[0][0][-1]
    assert [decode(ids[:-1]) for (ids,) in found] == texts
    assert sum(ids.count(end) for (ids,) in found) == 2


SENTENCES = "One. Two words.\n\nThree now. "


def split(tmp_path, bytes_tokenizer, *flags):
    folder, decode = bytes_tokenizer
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    result = run(
        tmp_path, "--input", corpus(tmp_path, SENTENCES), "--split-sentences", *flags, tokenizer=tokenizer
    )
    if result.returncode:
        return result
    (document,) = read(tmp_path / "out_text_sentence")
    return [decode(ids) for ids in document]


def test_the_built_in_splitter_works_without_nltk(tmp_path, bytes_tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk", None)
    assert split(tmp_path, bytes_tokenizer) == ["One.", "Two words.", "Three now."]
    assert split(tmp_path, bytes_tokenizer, "--keep-newlines") == ["One. ", "Two words.\n\n", "Three now. "]
    assert split(tmp_path, bytes_tokenizer, "--sentence-splitter", "auto") == [
        "One.",
        "Two words.",
        "Three now.",
    ]
    for flags, message in (
        (["--sentence-splitter", "nltk"], "the package nltk is not installed: pip install nltk"),
        (
            ["--lang", "german"],
            "--lang german: the built-in splitter knows the abbreviations of English only",
        ),
    ):
        refused = split(tmp_path, bytes_tokenizer, *flags)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1


class FakePunkt:
    """Cuts at every space, which no real splitter does."""

    def __init__(self, language):
        self.language = language

    def span_tokenize(self, text):
        start = 0
        for word in text.split():
            start = text.index(word, start)
            yield start, start + len(word)
            start += len(word)


def install_nltk(monkeypatch, languages):
    """A package with the three names that are used of NLTK, and data for some languages."""

    def find(path):
        if path not in [f"tokenizers/punkt_tab/{language}/" for language in languages]:
            raise LookupError("Resource punkt_tab not found.\n >>> nltk.download('punkt_tab')")

    nltk, data, tokenize, punkt = map(
        types.ModuleType, ("nltk", "nltk.data", "nltk.tokenize", "nltk.tokenize.punkt")
    )
    data.find, punkt.PunktTokenizer = find, FakePunkt
    for module in (nltk, data, tokenize, punkt):
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_nltk_is_used_where_it_is_asked_for_and_there(tmp_path, bytes_tokenizer, monkeypatch):
    install_nltk(monkeypatch, ["english", "german"])
    words = ["One.", "Two", "words.", "Three", "now."]
    assert split(tmp_path, bytes_tokenizer) == ["One.", "Two words.", "Three now."]  # not by itself
    assert split(tmp_path, bytes_tokenizer, "--sentence-splitter", "nltk") == words
    assert split(tmp_path, bytes_tokenizer, "--sentence-splitter", "auto", "--lang", "german") == words
    kept = split(tmp_path, bytes_tokenizer, "--sentence-splitter", "nltk", "--keep-newlines")
    assert kept == ["One. ", "Two ", "words.\n\n", "Three ", "now. "]


def test_nltk_without_its_data_is_refused_with_a_way_out(tmp_path, bytes_tokenizer, monkeypatch):
    install_nltk(monkeypatch, [])
    refused = split(tmp_path, bytes_tokenizer, "--sentence-splitter", "nltk")
    assert refused.returncode == 2
    assert "NLTK's data punkt_tab for english cannot be used" in refused.stderr
    assert "NLTK_DATA=FOLDER; or use --sentence-splitter builtin" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert split(tmp_path, bytes_tokenizer, "--sentence-splitter", "auto") == [
        "One.",
        "Two words.",
        "Three now.",
    ]
