"""Tools told the wrong thing say so in one line; told the right thing, what they have made."""

import argparse
import json
import sys

import pytest

from megatron.core.config import TokenizerConfig
from megatron.training.console import run_as_program
from tools import generate_text, plot_loss


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"iteration": n, "lm_loss": 5.0 - n}) + "\n" for n in range(3)))
    return str(path)


def plot(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot_loss.py", *map(str, arguments)])
    run_as_program(plot_loss.main)


def test_a_plot_goes_to_a_folder_that_is_made(monkeypatch, capsys, tmp_path, metrics):
    output = tmp_path / "made" / "anew" / "loss.png"
    plot(monkeypatch, metrics, "--output", output, "--mark", "1", "here", "--reference", "4.5", "level")
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (None, [], "{path}: No such file or directory"),
        (b"3\n", [], "{path}:1: not a metrics record, which says its iteration"),
        (b"\xff\xfe\n", [], "{path}:1: not a metrics record (Expecting value: line 1 column 1 (char 0))"),
        (b'{"iteration": 1}\n', [], "{path} holds no record with 'lm_loss'"),
        (b'{"iteration": 1, "lm_loss": 2}\n', ["--mark", "x", "y"], "--mark x: wants a number, then a text"),
        (b'{"iteration": 1, "lm_loss": 2}\n', ["--output", "{path}/loss.png"], "{path}: File exists"),
    ],
)
def test_what_cannot_be_plotted_is_one_line(monkeypatch, capsys, tmp_path, content, more, said):
    path = tmp_path / "wrong.jsonl"
    if content is not None:
        path.write_bytes(content)
    more = [word.format(path=path) for word in more]
    with pytest.raises(SystemExit) as stop:
        plot(monkeypatch, path, "--output", tmp_path / "loss.png", *more)
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"error: {said.format(path=path)}\n"


def test_a_kind_of_picture_that_is_not_known(monkeypatch, capsys, metrics, tmp_path):
    with pytest.raises(SystemExit):
        plot(monkeypatch, metrics, "--output", tmp_path / "loss.doc")
    said = capsys.readouterr().err
    assert said.startswith(f"error: --output {tmp_path}/loss.doc: give a name that ends in one of ")
    assert "png" in said
    assert said.count("\n") == 1


def paths(**given):
    names = ("vocab_file", "merge_file", "tokenizer_model")
    return argparse.Namespace(**dict.fromkeys(names) | given)


def test_a_tokenizer_that_has_moved():
    trained = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file="old/v", merge_file="old/m")
    now = generate_text.moved(trained, paths(vocab_file="new/v"))
    assert (now.vocab_file, now.merge_file) == ("new/v", "old/m")


@pytest.mark.parametrize(
    ("kind", "flag", "said"),
    [
        (
            "GPT2BPETokenizer",
            "tokenizer_model",
            "a GPT2BPETokenizer, which takes --vocab-file and --merge-file",
        ),
        ("HuggingFaceTokenizer", "vocab_file", "a HuggingFaceTokenizer, which takes --tokenizer-model"),
        ("NullTokenizer", "merge_file", "a NullTokenizer, which takes no file"),
    ],
)
def test_files_that_the_checkpoint_s_tokenizer_does_not_take(kind, flag, said):
    with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')}: the checkpoint has {said}$"):
        generate_text.moved(TokenizerConfig(tokenizer_type=kind), paths(**{flag: "somewhere"}))
