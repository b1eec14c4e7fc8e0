import json
import logging
import sys

import pytest

from megatron.core.config import PrecisionConfig
from megatron.training.console import PROGRESS, configure, report_failure, run_as_program


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
