"""merge_datasets, inspect_dataset and prepare_cache as a user runs them, on files written by hand."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.training.console import run_as_program
from tests.program import launch
from tests.training_harness import GPT2_SHAPE, flags, write_corpus
from tools import inspect_dataset, merge_datasets, prepare_cache, preprocess_data

CODES = {"uint16": 8, "int32": 4, "float32": 7}


def pair(prefix, documents, dtype="uint16", modes=b""):
    """Write the two files, field by field; each document is a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    itemsize = np.dtype(dtype).itemsize
    index = struct.pack("<9sQBQQ", b"MMIDIDX", 1, CODES[dtype], len(sequences), len(documents) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *(itemsize * sum(lengths[:at]) for at in range(len(lengths))))
    ends = [sum(map(len, documents[:at])) for at in range(len(documents) + 1)]
    index += struct.pack(f"<{len(ends)}q", *ends) + modes
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(
        tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
    )
    return str(prefix)


def both_bytes(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls a tool with a command line; gives exit code, standard output and standard error."""

    def call(tool, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{tool.__name__.removeprefix('tools.')}.py", *map(str, arguments)])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        code = 0
        try:
            run_as_program(tool.main)
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return call


def test_a_folder_is_merged_in_the_order_of_its_names(tmp_path, run):
    (tmp_path / "parts").mkdir()
    pair(tmp_path / "parts" / "b_sentence", [[[6]], [], [[7, 8], [9]]])
    pair(tmp_path / "parts" / "a_sentence", [[], [[1, 2, 3], [4, 5]]])
    (tmp_path / "parts" / "notes.txt").touch()
    whole = pair(tmp_path / "whole", [[], [[1, 2, 3], [4, 5]], [[6]], [], [[7, 8], [9]]])
    output = tmp_path / "new" / "merged"
    code, said, error = run(merge_datasets, "--input", tmp_path / "parts", "--output-prefix", output)
    assert code == 0, error
    assert both_bytes(output) == both_bytes(whole)
    assert f"{output}.bin and .idx: 5 documents, 5 sequences, 9 tokens" in said
    assert "merging: 100%" in error


def test_parts_merge_to_the_bytes_of_all_the_text_at_once(tmp_path, run):
    texts = [["1 2 3", "4"], ["5 6"], ["7", "8 9"]]
    inputs = []
    for number, part in enumerate(texts):
        inputs.append(tmp_path / f"{number}.jsonl")
        inputs[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    prefixes = []
    for name, files in (("all", inputs), *((path.stem, [path]) for path in inputs)):
        common = [
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            "100",
            "--append-eod",
            "--workers",
            "1",
        ]
        command = ["--input", *map(str, files), "--output-prefix", str(tmp_path / name), *common]
        assert preprocess_data.main(command) == 0
        prefixes.append(tmp_path / f"{name}_text_document")
    code, _, error = run(merge_datasets, "--prefixes", *prefixes[1:], "--output-prefix", tmp_path / "merged")
    assert code == 0, error
    assert both_bytes(tmp_path / "merged") == both_bytes(prefixes[0])


@pytest.mark.parametrize(
    ("names", "output", "said"),
    [
        (["a", "wide"], "out", "{0}/a holds uint16 tokens and {0}/wide int32: a dataset has one type"),
        (
            ["a", "x_document", "y_sentence"],
            "out",
            "{0}/x_document has a sequence for each document, {0}/y_sentence for each sentence",
        ),
        (["a", "b"], "b", "the output {0}/b.bin is among the inputs"),
        (["a", "cut"], "out", "{0}/cut.bin: 2 bytes, but {0}/cut.idx describes 4"),
        (["a", "falls"], "out", "{0}/falls.idx: the document index falls from 2 to 1 at document 2"),
        (["a", "seen"], "out", "{0}/seen.idx: holds a mode for each of 2 sequences"),
        (["a", "none"], "out", "no dataset at the data path '{0}/none'"),
        (["a", "b"], "", "the output prefix '{0}' is a folder"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_one_line(tmp_path, run, names, output, said):
    for name in ("a", "b", "cut", "x_document", "y_sentence"):
        pair(tmp_path / name, [[[1, 2]]])
    pair(tmp_path / "wide", [[[1]]], "int32")
    pair(tmp_path / "seen", [[[1], [2]]], modes=b"\0\1")
    pair(tmp_path / "falls", [[[1], [2]], [], [[3]]])
    index = bytearray((tmp_path / "falls.idx").read_bytes())
    index[-16] = 1  # the entry before the last: 2 becomes 1
    (tmp_path / "falls.idx").write_bytes(index)
    (tmp_path / "cut.bin").write_bytes(b"\1\0")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    prefixes = [tmp_path / name for name in names]
    code, _, error = run(merge_datasets, "--prefixes", *prefixes, "--output-prefix", tmp_path / output)
    assert code == 1
    assert f"error: {said.format(tmp_path)}" in error.splitlines()[-1]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_is_not_whole_is_not_merged(tmp_path, run):
    def refused(*arguments):
        code, _, error = run(merge_datasets, *arguments, "--output-prefix", tmp_path / "out")
        assert error.count("\n") == 1
        return code, error

    assert refused("--input", tmp_path) == (
        1,
        f"error: {tmp_path}: holds no dataset, no pair of .bin and .idx\n",
    )
    assert refused("--input", tmp_path / "none") == (1, f"error: {tmp_path}/none: there is no such folder\n")
    pair(tmp_path / "a", [[[1]]])
    (tmp_path / "b.bin").touch()
    assert f"{tmp_path}/b.bin is there without b.idx" in refused("--input", tmp_path)[1]
    code, error = refused("--input", tmp_path, "--prefixes", "a")
    assert code == 2
    assert "give one of --input FOLDER and --prefixes A B C" in error


def test_figures_of_a_dataset_by_line_and_as_json(tmp_path, run):
    prefix = pair(tmp_path / "data", [[[5, 6], [7]], [], [[5]], [[5] * 9]])
    code, said, error = run(inspect_dataset, prefix)
    assert code == 0, error
    shares = np.array([11, 1, 1]) / 13
    assert said.splitlines() == [
        f"{prefix}:",
        "  dtype: uint16",
        "  documents: 4",
        "  empty documents: 1",
        "  sequences: 4",
        "  tokens: 13",
        "  distinct tokens: 3",
        f"  bytes: 26 in .bin, {34 + 12 * 4 + 8 * 5} in .idx",
        # Lengths 0 1 3 9, in sequences 1 1 2 9; NumPy's percentiles, worked out by hand.
        "  document lengths: min 0, p5 0.15, p25 0.75, median 2, p75 4.5, p95 8.1, p99 8.82, max 9, "
        "mean 3.25",
        "  sequence lengths: min 1, p5 1, p25 1, median 1.5, p75 3.75, p95 7.95, p99 8.79, max 9, mean 3.25",
        f"  unigram entropy (nats): {-(shares * np.log(shares)).sum():.4f}",
    ]
    picture = tmp_path / "new" / "lengths.png"
    code, said, _ = run(inspect_dataset, prefix, "--json", "--index-only", "--histogram", picture)
    assert code == 0
    report = json.loads(said)
    assert (report["tokens"], report["bytes"][".bin"]) == (13, 26)
    assert report["document_lengths"]["median"] == 2
    assert "distinct_tokens" not in report
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(picture.parent.iterdir()) == [picture]


def test_numbers_that_are_no_tokens_and_no_tokens_at_all(tmp_path, run):
    code, said, _ = run(inspect_dataset, pair(tmp_path / "float", [[[1.5]]], "float32"))
    assert code == 0
    assert "unigram" not in said
    code, said, _ = run(inspect_dataset, pair(tmp_path / "empty", [[]]))
    assert code == 0
    assert "  sequence lengths: none\n  unigram entropy (nats): 0.0000\n" in said


def test_a_document_as_ids_and_as_text(tmp_path, run):
    prefix = pair(tmp_path / "data", [[[1, 2], [3]], [], [[4]]])
    assert run(inspect_dataset, prefix, "--document", 0)[1] == f"{prefix}:\n  document 0:\n1 2\n3\n"
    null = ["--tokenizer-type", "ByteLevelTokenizer"]
    prefix = pair(tmp_path / "text", [[[*b"No "], [*"é".encode()]]])
    assert run(inspect_dataset, prefix, "--document", 0, *null)[1] == f"{prefix}:\n  document 0:\nNo é\n"
    said = json.loads(run(inspect_dataset, prefix, "--document", 0, "--json", *null)[1])
    assert said == {"prefix": prefix, "document": 0, "ids": [[78, 111, 32], [195, 169]], "text": "No é"}
    code, _, error = run(inspect_dataset, prefix, "--document", 1)
    assert (code, error) == (1, f"error: --document 1: {prefix} has 1, counted from 0\n")


def test_a_sound_dataset_and_the_first_fault_of_others(tmp_path, run):
    prefix = pair(tmp_path / "data", [[[1, 2, 9]], [], [[9, 3]]])
    code, said, error = run(
        inspect_dataset, prefix, "--verify", "--tokenizer-type", "NullTokenizer", "--vocab-size", 10
    )
    assert code == 0, error
    assert "all tokens within the vocabulary of 10" in said
    assert "at the end of 1 of 2 documents that are not empty, and 1 times elsewhere" in said
    code, said, error = run(inspect_dataset, prefix, "--verify", "--vocab-size", 9)
    assert (code, said) == (1, "")
    assert f"error: {prefix}.bin: token 2 (token 2 of sequence 0, in document 0) is 9" in error
    index = bytearray((tmp_path / "data.idx").read_bytes())
    index[34] += 1  # the first length
    (tmp_path / "data.idx").write_bytes(index)
    code, _, error = run(inspect_dataset, prefix, "--verify")
    assert code == 1
    assert "sequence 1 is said to lie at byte 6, but the sequences before it end at byte 8" in error


def test_two_datasets_compared(tmp_path, run):
    one, same = (pair(tmp_path / name, [[[1, 2]], [[3]]]) for name in ("one", "same"))
    other = pair(tmp_path / "other", [[[1, 2]], [[4]]])
    assert run(inspect_dataset, one, "--compare", same)[:2] == (0, f"{one}:\n  equal to {same}\n")
    code, said, _ = run(inspect_dataset, one, "--compare", other, "--json")
    assert code == 1
    difference = f"token 2 (token 0 of sequence 1, in document 1): 3 in {one}, 4 in {other}"
    assert json.loads(said) == {"prefix": one, "other": other, "equal": False, "difference": difference}


def test_what_cannot_be_inspected_is_one_line(tmp_path, run):
    prefix = pair(tmp_path / "data", [[[1]]])
    for arguments, code, said in (
        ([tmp_path / "dat"], 1, f"Did you mean {prefix}?"),
        ([prefix, prefix, "--histogram", "x.png"], 2, "--histogram x.png: is one picture; give one prefix"),
        ([prefix, "--histogram", "x.doc"], 1, "--histogram x.doc: give a name that ends in one of"),
        ([prefix, "--verify", "--tokenizer-type", "NullTokenizer"], 1, "--vocab-size"),
    ):
        found, _, error = run(inspect_dataset, *arguments)
        assert (found, error.count("\n")) == (code, 1)
        assert said in error


def cache_of(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")
    }


@pytest.fixture
def job(tmp_path):
    """The flags of a job of two ranks with a blend, whose global batch follows from the number of ranks."""
    prefixes = [write_corpus(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    argv = flags(prefixes[0], GPT2_SHAPE, "--data-path", "1", prefixes[0], "2", prefixes[1])
    at = argv.index("--global-batch-size")
    del argv[at : at + 2]
    more = "--split 80,10,10 --train-iters 3 --eval-interval 1 --eval-iters 2 --seq-length 16"
    return [*argv, *more.split()]


def test_a_job_finds_every_index_that_was_prepared(tmp_path, run, job):
    cache, saved = tmp_path / "cache", str(tmp_path / "saved")
    argv = [*job, "--data-cache-path", str(cache)]
    code, said, error = run(prepare_cache, *argv, "--world-size", 2)
    assert code == 0, error
    # Three splits, each a blend and its two components.
    assert "9 indices (" in said
    assert f" in {cache}, after " in said
    prepared = cache_of(cache)
    assert len([path for path in prepared if len(path.parts) == 1]) == 9
    ranks = launch(2, [*argv, "--save", saved, "--exit-interval", "1"], tmp_path).wait()
    assert ranks.codes == [0, 0], ranks.errors
    described = [line for line in ranks.outputs[0].splitlines() if "samples wanted" in line]
    assert len(described) == 6
    assert all(line in said.splitlines() for line in described)
    assert cache_of(cache) == prepared
    # One iteration of 2 samples is done, two of 6 are to come: 14, of which a third and two thirds, rounded
    # up, are 15.
    resumed = ["--load", saved, "--global-batch-size", "6", "--override-opt_param-scheduler"]
    code, said, error = run(prepare_cache, *argv, *resumed, "--world-size", 2)
    assert code == 0, error
    assert " > train: 15 samples of a blend of 2 datasets" in said


def test_indices_that_would_be_kept_nowhere_are_no_success(tmp_path, run, job):
    code, said, error = run(prepare_cache, *job)
    assert code == 0, error
    assert "the order of a blend is not kept without --data-cache-path" in said
    assert "6 indices (" in said
    (tmp_path / "lone").mkdir()
    lone = write_corpus(tmp_path / "lone" / "data")
    (tmp_path / "lone" / "cache").touch()  # where the folder of the indices would be
    code, _, error = run(prepare_cache, *job, "--data-path", lone)
    assert code == 1
    assert "error: the index files are kept nowhere" in error
    code, _, error = run(prepare_cache, *job, "--world-size", 0)
    assert (code, error) == (2, "prepare_cache.py: error: --world-size 0: a job has at least 1 rank\n")
    code, _, error = run(prepare_cache, *job, "--data-path", tmp_path / "on")
    assert code == 1
    assert "Did you mean" in error
