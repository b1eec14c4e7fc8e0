"""tools/decontaminate.py against counts made with Python's own sets of words."""

import gzip
import itertools
import json
import random
import re

import numpy as np
import pytest

from megatron.corpora.grams import GramTable, TestSet, number_grams, which_grams
from megatron.corpora.words import fold, folded_codes, ngrams
from tests.unit.corpora.tools import last_line, read_corpus, report_of, run, write_corpus

WORDS = ["the", "a", "whale", "of", "Sea", "ship", "œuvre", "naïve", "42", "captain's", "Ahab-Ishmael", "ДОМ"]


def words(text):
    return re.findall(r"[^\W_]+", text.lower())


def grams(text, size=8):
    found = words(text)
    return [tuple(found[start : start + size]) for start in range(len(found) - size + 1)]


def sentence(rng, length, vocabulary=WORDS):
    gaps = [" ", "  ", ", ", " -- ", "\n"]
    return "".join(rng.choice(vocabulary) + rng.choice(gaps) for _ in range(length))


def decontaminate(folder, *flags):
    return run("decontaminate", "--workers", 2, *flags, cwd=folder)


def expected_counts(documents, corpus, size=8):
    """What a report says of a test set: documents are lists of texts, the corpus is texts."""
    there = {gram for text in corpus for gram in grams(text, size)}
    every = [[gram for text in texts for gram in grams(text, size)] for texts in documents]
    flat = [gram for of_document in every for gram in of_document]
    counts = {
        "documents": len(documents),
        "documents_with_overlap": sum(any(gram in there for gram in one) for one in every),
        "ngrams": len(flat),
        "ngrams_found": sum(gram in there for gram in flat),
        "different_ngrams": len(set(flat)),
        "different_ngrams_found": len(set(flat) & there),
    }
    counts["share_of_ngrams"] = round(counts["ngrams_found"] / len(flat), 6)
    counts["share_of_documents"] = round(counts["documents_with_overlap"] / len(documents), 6)
    return counts


def test_report_equals_a_count_with_sets(tmp_path):
    rng = random.Random(1)
    few = WORDS[:3]  # with so few words n-grams repeat, within documents and between them
    corpus = [sentence(rng, rng.randrange(60), rng.choice([few, WORDS])) for _ in range(400)]
    questions = [[sentence(rng, rng.randrange(30), few), sentence(rng, 12)] for _ in range(60)]
    questions += [["", rng.choice(corpus)] for _ in range(20)]
    passages = [sentence(rng, rng.randrange(40)).replace("\n", " ") for _ in range(50)]
    passages += [rng.choice(corpus).replace("\n", " ").upper() for _ in range(30)]
    write_corpus(tmp_path / "corpus.jsonl", corpus)
    lines = [json.dumps({"question": question, "choices": [answer]}) for question, answer in questions]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    (tmp_path / "passages.txt.gz").write_bytes(gzip.compress("\n\n".join(passages).encode()))
    result = decontaminate(
        tmp_path, "--input", "corpus.jsonl", "--test-sets", "qa=questions.jsonl", "passages.txt.gz",
        "--test-json-keys", "question", "choices", "--report", "report.json",
    )  # fmt: skip
    report = report_of(result)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    passages = [[text] for text in passages if text.strip()]
    assert report["test_sets"]["qa"] == expected_counts(questions, corpus)
    assert report["test_sets"]["passages.txt.gz"] == expected_counts(passages, corpus)
    assert 0.1 < report["test_sets"]["qa"]["share_of_ngrams"] < 0.9
    tested = {gram for texts in [*questions, *passages] for text in texts for gram in grams(text)}
    touched = sum(any(gram in tested for gram in grams(text)) for text in corpus)
    assert report["corpus"]["documents_with_overlap"] == touched
    assert report["corpus"]["documents"] == len(corpus)


def test_shards_find_together_what_one_run_finds(tmp_path):
    rng = random.Random(2)
    for name in "abc":
        write_corpus(tmp_path / f"{name}.jsonl", [sentence(rng, 30, WORDS[:4]) for _ in range(40)])
    (tmp_path / "test.txt").write_text(
        "\n".join(sentence(rng, 20, WORDS[:4]).replace("\n", " ") for _ in range(20))
    )
    flags = ["--input", "a.jsonl", "b.jsonl", "c.jsonl", "--test-sets", "test.txt"]
    whole = report_of(decontaminate(tmp_path, *flags))
    folder = ["--work-folder", "work"]
    report_of(decontaminate(tmp_path, *flags, *folder, "--stage", "search", "--shard", "1/2"))
    early = decontaminate(tmp_path, *flags, *folder, "--stage", "report")
    assert early.returncode == 1
    assert "--stage search is not done for 2 of 3 files, such as a.jsonl" in last_line(early)
    report_of(decontaminate(tmp_path, *flags, *folder, "--stage", "search", "--shard", "0/2"))
    assert report_of(decontaminate(tmp_path, *flags, *folder, "--stage", "report")) == whole
    assert whole["test_sets"]["test.txt"]["ngrams_found"] > 0
    for name, what in (("test.txt", "test set"), ("b.jsonl", "input")):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content.swapcase())
        changed = decontaminate(tmp_path, *flags, *folder, "--stage", "report")
        assert changed.returncode == 1
        assert f"made with another {what}: {name} has been written since" in last_line(changed)


def test_removing_documents_keeps_the_bytes_of_the_others(tmp_path):
    gram = "one two three four five six seven eight"
    lines = [
        b'{"text": "before ONE two, three -- four five six seven\\neight after", "n": 1}\n',
        b'{"n": 2.50, "text": "one two three four five six seven and eight"}\n',
        b"\n",
        b'{"text": "ones two three four five six seven eight nine"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "test.txt").write_text(gram)
    flags = ["--input", "in.jsonl", "--test-sets", "test.txt", "--remove", "documents"]
    report = report_of(decontaminate(tmp_path, *flags, "--output", "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == lines[1] + lines[3] + b"\n"
    assert report["corpus"]["documents_dropped"] == 1
    assert report["corpus"]["documents_written"] == 2
    report_of(decontaminate(tmp_path, *flags, "--output", "all.jsonl", "--min-matches", 2))
    assert len(read_corpus(tmp_path / "all.jsonl")) == 3


def test_removing_windows_cuts_documents_into_pieces(tmp_path):
    gram = "one two three four five six seven eight"
    first, second, third = "A" * 50, "b" * 30, "c" * 19
    text = f"{first} {gram}. {second} {gram} {third}"
    line = {"id": 7, "text": text, "tail": [1.0]}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "test.txt").write_text(gram)
    flags = [
        "--input",
        "in.jsonl",
        "--test-sets",
        "test.txt",
        "--remove",
        "windows",
        "--window-characters",
        5,
    ]
    report_of(decontaminate(tmp_path, *flags, "--output", "out.jsonl", "--min-piece-characters", 15))
    pieces = [first[:46], second[3:26], third[4:]]  # a window takes five characters, the space among them
    assert [piece["text"] for piece in read_corpus(tmp_path / "out.jsonl")] == pieces
    assert (tmp_path / "out.jsonl").read_text().splitlines()[0] == json.dumps(line | {"text": pieces[0]})
    report_of(decontaminate(tmp_path, *flags, "--output", "long.jsonl", "--min-piece-characters", 16))
    assert [piece["text"] for piece in read_corpus(tmp_path / "long.jsonl")] == pieces[:2]
    report = report_of(
        decontaminate(
            tmp_path, *flags, "--output", "few.jsonl", "--min-piece-characters", 15, "--max-pieces", 2
        )
    )
    assert read_corpus(tmp_path / "few.jsonl") == []
    assert report["corpus"]["documents_dropped"] == 1


def test_ngrams_whose_hashes_are_the_same_are_told_apart():
    texts = ["one two three", "one two four", "One, two -- THREE", "one twothree", "one two thre"]
    codes = [np.array([ord(letter) for letter in text], np.uint32) for text in texts]
    ends = np.cumsum([len(text) for text in texts])
    places = np.stack((ends - [len(text) for text in texts], ends))
    hashes = np.full(5, 9, np.uint64)
    numbers, kept = np.empty(5, np.int64), np.empty(5, np.int64)
    joined = np.concatenate(codes)
    count = number_grams(hashes, np.arange(5), places, joined, folded_codes(), numbers, kept)
    assert (count, numbers.tolist(), kept[:4].tolist()) == (4, [0, 1, 0, 2, 3], [0, 1, 3, 4])
    text = np.array([ord(letter) for letter in "x one TWO four? one two five"], np.uint32)
    where = np.array([[2, 16], [14, 28]])
    table = (joined, np.ascontiguousarray(places[:, kept[:4]]), hashes[:4])
    looked_up = (text, where, np.full(2, 9, np.uint64), np.zeros(2, np.int64))
    assert which_grams(looked_up, table, folded_codes()).tolist() == [1, -1]


def test_test_sets_without_ngrams_are_found_nowhere(tmp_path):
    (tmp_path / "short.txt").write_text("too short\n")
    table = GramTable([TestSet.parse(str(tmp_path / "short.txt"))], ("text",), 8)
    assert table.find(["one two three four five six seven eight nine"]).grams.tolist() == []
    (counts,) = table.report(np.zeros(0, np.bool_)).values()
    assert (counts["documents"], counts["ngrams"], counts["share_of_ngrams"]) == (1, 0, 0.0)


def test_words_are_runs_of_letters_digits_and_marks():
    text = "  Don't stop: Café ÉTÉ हिन्दी x_y\u00a03½ ΣΑΣ 山田\n"
    expected = ["don", "t", "stop", "café", "été", "हिन्दी", "x", "y", "3½", "σασ", "山田"]
    assert fold(text).split(" ") == expected
    found = ngrams([text, "", "one"], 2, "words", short=True)
    assert found.offsets.tolist() == [0, 10, 10, 11]
    spans = [text[start:end] for start, end in zip(found.starts[:10], found.ends[:10], strict=True)]
    assert [fold(span) for span in spans] == [f"{a} {b}" for a, b in itertools.pairwise(expected)]
    assert len(np.unique(found.hashes)) == 11
    assert ngrams(["one"], 2, "words", short=False).hashes.tolist() == []
    swapped = ngrams(["a b", "b a", "A, B"], 2, "words", short=False).hashes
    assert swapped[0] == swapped[2] != swapped[1]


def test_ngrams_of_characters_have_one_space_between_words():
    found = ngrams(["Ab,  c", "ab c", "abc"], 3, "characters", short=True)
    assert found.offsets.tolist() == [0, 2, 4, 5]
    assert found.hashes[:2].tolist() == found.hashes[2:4].tolist()
    assert found.hashes[4] not in found.hashes[:4]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--test-sets", "none.txt"], "--test-sets none.txt: no such file"),
        (["--test-sets", "a=t.jsonl"], "--test-sets: t.jsonl:1: no key 'text'; the keys present are 'q'"),
        (["--test-sets", "a=t.txt", "a=t.jsonl"], "two have one name"),
        (["--shard", "0/2", "--work-folder", "w"], "--shard has no meaning with --stage all"),
        (["--stage", "search"], "give --work-folder"),
        (["--output", "o.jsonl"], "--output and --output-folder have no meaning with --remove nothing"),
        (["--remove", "documents"], "give one of --output and --output-folder"),
        (["--remove", "documents", "--output", "in.jsonl"], "--output in.jsonl: is one of the inputs"),
    ],
)
def test_wrong_flags_end_with_one_line(tmp_path, flags, reason):
    write_corpus(tmp_path / "in.jsonl", ["a"])
    (tmp_path / "t.txt").write_text("text")
    (tmp_path / "t.jsonl").write_text('{"q": ""}')
    result = decontaminate(tmp_path, "--input", "in.jsonl", "--test-sets", "t.txt", *flags)
    assert result.returncode == 2
    assert reason in last_line(result)


def test_a_bad_line_leaves_no_output(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": ["a"]}\n')
    (tmp_path / "t.txt").write_text("text")
    flags = ["--input", "in.jsonl", "--test-sets", "t.txt", "--remove", "documents", "--output", "out.jsonl"]
    result = decontaminate(tmp_path, *flags)
    assert result.returncode == 1
    assert last_line(result).startswith(
        "error: in.jsonl:2: key 'text' holds an array, but one string a document"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "t.txt"]
    assert report_of(decontaminate(tmp_path, *flags, "--skip-bad-lines"))["corpus"]["skipped_bad_lines"] == 1
