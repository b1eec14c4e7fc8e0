"""tools/preprocess_data.py as a user runs it, its files read by hand and not by this project's reader."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.end_to_end.preprocessing import (
    ROOT,
    both_bytes,
    command,
    corpus,
    failed,
    files_in,
    read,
    run,
    run_apart,
)


def test_flags_of_older_scripts(tmp_path):
    path = corpus(tmp_path, "1 2 3", "4 5")
    older = run(tmp_path, "--input", path, "--dataset-impl", "mmap", "--vocab-file", "v.json", "--workers", 1)
    assert older.returncode == 0, older.stderr
    assert read(tmp_path / "out_text_document") == [[[1, 2, 3]], [[4, 5]]]
    assert "--dataset-impl mmap has no meaning here: it asks for what is always so" in older.stderr
    assert "--vocab-file has no effect with --tokenizer-type NullTokenizer" in older.stderr
    assert "--keep-newlines, --lang have no effect without --split-sentences" not in older.stderr
    lazy = run(tmp_path, "--input", path, "--data-impl", "lazy")
    assert lazy.returncode == 2
    assert "--data-impl: token files are always .bin and .idx files; leave it out" in lazy.stderr


def test_several_inputs_keys_and_gzip(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_text('{"text": "1 2 3", "head": "7"}\n\n{"head": "8", "text": ["4", "5 6"]}\n')
    second.write_bytes(gzip.compress(b'{"text": "9", "head": "10 11"}'))
    result = run(tmp_path, "--input", first, second, "--json-keys", "text", "head", "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert read(tmp_path / "out_text_document") == [[[1, 2, 3]], [[4], [5, 6]], [[9]]]
    assert read(tmp_path / "out_head_document") == [[[7]], [[8]], [[10, 11]]]
    assert "3 documents, 7 tokens" in result.stdout
    assert "tokenizing: 100%" in result.stderr


def test_eod_ends_every_document_and_counts_in_its_length(tmp_path):
    path = corpus(tmp_path, "1 2", "3")
    assert run(tmp_path, "--input", path, "--append-eod").returncode == 0
    assert read(tmp_path / "out_text_document") == [[[1, 2, 99]], [[3, 99]]]
    assert run(tmp_path, "--input", path).returncode == 0
    assert read(tmp_path / "out_text_document") == [[[1, 2]], [[3]]]


def test_empty_documents_are_as_if_they_were_not_there(tmp_path):
    clean, dirty, void = (tmp_path / name for name in ("clean", "dirty", "void"))
    for folder in (clean, dirty, void):
        folder.mkdir()
    run(clean, "--input", corpus(clean, "1 2", "3"), "--append-eod")
    result = run(dirty, "--input", corpus(dirty, "", "1 2", " \n", "3", ""), "--append-eod")
    assert result.returncode == 0, result.stderr
    assert both_bytes(dirty) == both_bytes(clean)
    assert "skipped 3 empty documents" in result.stdout
    error = failed(void, run(void, "--input", corpus(void, "", "  \n"), "--append-eod"), kept=["in.jsonl"])
    assert "no document with any text under the key 'text' (2 empty documents" in error


BAD_LINES = {
    '{"text": "1"}{"text": "2"}': "Extra data",
    '["text"]': "holds an array",
    '{"text": null}': "key 'text' holds null",
    '{"content": "1", "id": 2}': "no key 'text'; the keys present are 'content', 'id'",
    '{"text": "1 whale"}': "'whale' is none",
}


def test_the_first_bad_line_is_named_and_nothing_is_left(tmp_path):
    good = [json.dumps({"text": str(n)}) for n in range(10)]
    for line, reason in BAD_LINES.items():
        (tmp_path / "in.jsonl").write_text("\n".join([*good[:5], "", line, line, *good[5:]]))
        error = failed(tmp_path, run(tmp_path, "--input", tmp_path / "in.jsonl"), kept=["in.jsonl"])
        assert "in.jsonl:7: " in error
        assert reason in error


def test_bad_lines_are_skipped_on_request(tmp_path):
    good = [json.dumps({"text": str(n)}) for n in range(10)]
    bad = list(BAD_LINES)
    (tmp_path / "in.jsonl").write_text("\n".join([bad[0], *good[:5], *bad[1:], *good[5:], '{"text": "cut']))
    result = run(tmp_path, "--input", tmp_path / "in.jsonl", "--skip-bad-lines")
    assert result.returncode == 0, result.stderr
    assert read(tmp_path / "out_text_document") == [[[n]] for n in range(10)]
    assert f"skipped {len(bad) + 1} unusable lines" in result.stdout


def test_sentences_in_one_run_with_any_partitions(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"One.": 1, "Two": 2, "words.": 3, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    path = corpus(tmp_path, *["One. Two words. One."] * 10)
    seen = set()
    for partitions in (1, 2):
        more = ["--split-sentences", "--partitions", partitions, "--keep-sequential-samples"]
        result = run(tmp_path, "--input", path, *more, tokenizer=flags)
        assert result.returncode == 0, result.stderr
        seen.add(both_bytes(tmp_path, "out_text_sentence"))
    assert len(seen) == 1
    assert read(tmp_path / "out_text_sentence") == [[[1], [2, 3], [1]]] * 10
    error = failed(
        tmp_path,
        run(tmp_path, "--input", path, "--append-eod", tokenizer=flags),
        kept=["in.jsonl", "tokenizer.json", "out_text_sentence.bin", "out_text_sentence.idx"],
        code=2,
    )
    assert "HuggingFaceTokenizer" in error
    assert "--append-eod" in error


def mixed_lines(path, count, longest, seed=0):
    """Lines of one to ``longest`` bytes of text; the ids that must come out."""
    draw = random.Random(seed)
    expected = []
    with path.open("w") as file:
        for number in range(count):
            words = 1 if number % 3 else draw.randrange(1, 60)
            if number in (5, count - 2):
                words = longest // 3
            ids = [draw.randrange(10, 99) for _ in range(words)] if words > 1 else [number % 10]
            file.write(json.dumps({"text": " ".join(map(str, ids))}) + "\n")
            expected.append([ids])
    return expected


def test_order_does_not_depend_on_workers(tmp_path):
    expected = mixed_lines(tmp_path / "in.jsonl", 800, 600_000)
    for workers, partitions in ((1, 1), (2, 2), (7, 3)):
        flags = ["--workers", workers, "--partitions", partitions]
        assert run(tmp_path, "--input", tmp_path / "in.jsonl", *flags).returncode == 0
        assert read(tmp_path / "out_text_document") == expected


@pytest.mark.nightly
def test_order_does_not_depend_on_workers_with_very_long_lines(tmp_path):
    expected = mixed_lines(tmp_path / "in.jsonl", 5000, 5_000_000)
    for workers in (1, 2, 7, 1, 2, 7):
        assert run(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", workers).returncode == 0
        assert read(tmp_path / "out_text_document") == expected


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def started(folder, path):
    """The tool at work on a corpus too long to finish, and its workers."""
    tool = subprocess.Popen(
        command(folder, "--input", path, path, path, path, "--workers", 2), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not any(file.stat().st_size for file in folder.glob("*.bin.*")):
        assert time.monotonic() < deadline, "nothing was written in 30 s"
        assert tool.poll() is None
        time.sleep(0.02)
    return tool, children_of(tool.pid)


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "in.jsonl"
    path.write_text('{"text": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"}\n' * 300_000)
    return path


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("victim", ["worker", "parent by SIGTERM", "parent by SIGKILL"])
def test_a_death_ends_the_run_and_leaves_no_dataset(tmp_path, long_corpus, victim):
    tool, workers = started(tmp_path, long_corpus)
    assert len(workers) == 2
    if victim == "worker":
        os.kill(workers[0], signal.SIGKILL)
    else:
        tool.send_signal(signal.SIGTERM if "SIGTERM" in victim else signal.SIGKILL)
    _, errors = tool.communicate(timeout=20)
    assert tool.returncode == {"worker": 1, "parent by SIGTERM": 143, "parent by SIGKILL": -9}[victim]
    left = files_in(tmp_path)
    if victim == "parent by SIGKILL":  # it could not clean up, but nothing looks complete
        assert not {"out_text_document.bin", "out_text_document.idx"} & set(left)
    else:
        assert left == []
    if victim == "worker":
        assert f"worker process {workers[0]} was killed by SIGKILL" in errors
    deadline = time.monotonic() + 10
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline, "workers outlive the tool"
        time.sleep(0.05)


def peak_kilobytes(folder, path):
    """Peak resident memory of the parent: its workers are told apart by being its children."""
    script = (
        "import resource, runpy, sys; sys.argv = sys.argv[1:];\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = [sys.executable, "-c", script, *command(folder, "--input", path, "--workers", 1)[1:]]
    output = subprocess.run(arguments, capture_output=True, text=True, timeout=250, check=True).stdout
    return int(output.split("peak ")[1])


@pytest.mark.parametrize("documents", [200_000, pytest.param(2_000_000, marks=pytest.mark.nightly)])
def test_memory_for_many_small_documents(tmp_path, documents):
    peaks = []
    for count in (50_000, documents):
        (tmp_path / "in.jsonl").write_text('{"text": "7"}\n' * count)
        peaks.append(peak_kilobytes(tmp_path, tmp_path / "in.jsonl"))
    assert (peaks[1] - peaks[0]) * 1024 <= 50 * (documents - 50_000)


@pytest.mark.parametrize(("flags", "message"), [
    (["--input", "gone.jsonl"], r"--input: gone.jsonl (no such file)"),
    (["--input", "in.jsonl", "--workers", "0"], "--workers 0: must be at least 1"),
    (["--input", "in.jsonl", "--json-keys", "a", "a"], "a key is given twice"),
    (["--input", "in.jsonl", "--append-eos"], "unknown flag --append-eos; did you mean --append-eod"),
    ([], "--input"),
])  # fmt: skip
def test_wrong_flags_are_refused_in_one_line(tmp_path, flags, message):
    corpus(tmp_path, "1")
    error = failed(tmp_path, run(tmp_path, *flags), kept=["in.jsonl"], code=2)
    assert message in error
    assert error.count("\n") == 1


def test_from_the_sample_corpus_to_tokens_from_any_folder(tmp_path):
    """The quickstart's own two commands, run in a folder that isn't the repository's."""
    sample = ROOT / "data" / "moby_dick.jsonl"
    train = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(sample)]
    for name in ("first", "second"):
        arguments = [*train, "--vocab-size", "1000", "--output", name]
        subprocess.run(arguments, check=True, timeout=60, cwd=tmp_path, capture_output=True)
    names = ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    assert files_in(tmp_path / "first") == names
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "first"]
    result = run_apart(tmp_path, "--input", sample, "--append-eod", tokenizer=flags)
    assert result.returncode == 0, result.stderr
    library = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in sample.read_text().splitlines()]
    end = library.token_to_id("<|endoftext|>")
    assert read(tmp_path / "out_text_document") == [[[*library.encode(text).ids, end]] for text in texts]
    both = both_bytes(tmp_path)
    flags = ["--tokenizer-type", "GPT2BPETokenizer"]
    flags += ["--vocab-file", "first/vocab.json", "--merge-file", "first/merges.txt"]
    assert run(tmp_path, "--input", sample, "--append-eod", tokenizer=flags).returncode == 0
    assert both_bytes(tmp_path) == both
