import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config import PrecisionConfig
from megatron.training.console import PROGRESS, configure, report_failure, run_as_program

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def loggers():
    """Puts the package's loggers back as they were."""
    package, progress = logging.getLogger("megatron"), logging.getLogger(PROGRESS)
    state = package.handlers[:], package.propagate, package.level, progress.level
    yield package, progress
    package.handlers[:], package.propagate = state[0], state[1]
    package.setLevel(state[2])
    progress.setLevel(state[3])


@pytest.mark.parametrize(
    ("rank", "world", "said"),
    [
        (0, 1, ["set-up", "warning", "line"]),
        (0, 3, ["set-up", "warning"]),
        (1, 3, ["warning"]),
        (2, 3, ["warning", "line"]),
    ],
)
def test_who_says_what(loggers, capsys, rank, world, said):
    package, progress = loggers
    configure(rank, world)
    package.getChild("core").info("set-up")
    package.getChild("core").warning("warning")
    progress.info("line")
    assert capsys.readouterr().out.split() == said


def test_the_last_rank_alone_says_why_an_update_is_skipped(loggers, capsys):
    _, progress = loggers
    for rank in range(3):
        configure(rank, 3)
        progress.warning("skipped on %d", rank)
    assert capsys.readouterr().out == "skipped on 2\n"


def failure_of(action):
    with pytest.raises(ValueError) as failure:  # noqa: PT011 - what it says is the test's matter
        action()
    return failure.value


def test_an_error_for_the_user_is_one_line(capsys):
    report_failure(failure_of(lambda: PrecisionConfig(fp16=True, bf16=True)), prefix="[rank 3] ")
    assert capsys.readouterr().err == (
        "[rank 3] error: --fp16 and --bf16 exclude each other; give one of them, or neither for float32\n"
    )


def test_a_defect_has_its_traceback(capsys):
    report_failure(failure_of(lambda: json.loads("{")))
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):")
    assert "json.decoder.JSONDecodeError" in text


@pytest.mark.parametrize(
    ("open_it", "problem"),
    [
        (lambda folder: np.load(folder / "gone.npy"), "gone.npy: No such file or directory"),
        (lambda folder: json.load(open(folder)), ": Is a directory"),  # noqa: SIM115
        (lambda folder: os.listdir(folder / "file" / "below"), "file/below: Not a directory"),
        (lambda folder: (folder / "file").mkdir(), "file: File exists"),
    ],
)
def test_a_wrong_path_is_the_user_s_wherever_it_comes_up(tmp_path, capsys, open_it, problem):
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as failure:  # noqa: PT011 - what it says is the test's matter
        open_it(tmp_path)
    report_failure(failure.value)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"error: {tmp_path}")
    assert said.endswith(f"{problem}\n")


def test_what_a_tool_raises_is_one_line(capsys):
    code = compile("raise ValueError('wrong')", str(ROOT / "tools" / "some_tool.py"), "exec")
    report_failure(failure_of(lambda: exec(code)))
    assert capsys.readouterr().err == "error: wrong\n"


def test_ctrl_c_in_a_tool_is_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_as_program(main)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_peer_that_has_gone_is_one_line_too(capsys):
    lost = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1"
    )
    report_failure(lost, prefix="[rank 0] ")
    assert capsys.readouterr().err == (
        "[rank 0] error: lost another rank, which should have said why it ended "
        "([../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:1)\n"
    )


def test_a_tool_ends_with_the_reason(capsys):
    with pytest.raises(SystemExit) as stop:
        run_as_program(lambda: PrecisionConfig(min_loss_scale=0.0) and None)
    assert stop.value.code == 1
    assert "error: --min-loss-scale 0.0: must be above 0" in capsys.readouterr().err


def test_a_tool_whose_reader_has_gone_says_nothing(capsys, monkeypatch):
    class Closable:
        closed = False

        def close(self):
            self.closed = True

    stream = Closable()
    monkeypatch.setattr(sys, "stderr", stream)

    def main():
        raise BrokenPipeError

    with pytest.raises(SystemExit) as stop:
        run_as_program(main)
    assert (stop.value.code, stream.closed) == (1, True)
