"""Ends of a run that are asked for: saved, exit code 0, and taken up again where it stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.hooks import exit as exit_hook
from tests.program import launch
from tests.training_harness import flags, write_corpus

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
ENDLESS = ["--train-iters", "100000", "--dataloader-type", "cyclic"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def job_flags(prefix, folder, *more):
    """A job that takes itself up, with its metrics."""
    root = str(folder / "root")
    metrics = ["--metrics-file", str(folder / "metrics.jsonl")]
    return flags(prefix, TINY, "--save", root, "--load", root, *metrics, *more)


def records(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tracker(folder):
    return int((folder / "root" / "latest_checkpointed_iteration.txt").read_text())


def wait_for_iterations(folder, count, is_running):
    deadline = time.monotonic() + 60
    while len(records(folder)) < count:
        assert is_running(), "the run has ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid):
    """Processes that a process has started, such as those that read its data."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_exit_interval_ends_and_the_next_start_goes_on(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, "--train-iters", "5", "--exit-interval", "2", "--eval-iters", "1")
    ends = []
    for _ in range(3):
        job = launch(2, argv, tmp_path).wait()
        assert job.codes == [0, 0], job.errors
        ends.append([tracker(tmp_path), job.outputs[0].count("exiting program at iteration")])
    # The run ends by itself at the fifth iteration, and is evaluated then alone.
    assert ends == [[2, 1], [4, 1], [5, 0]]
    assert [(one["iteration"], one.get("split")) for one in records(tmp_path)] == [
        (1, None),
        (2, None),
        (3, None),
        (4, None),
        (5, None),
        (5, "valid"),
    ]


def test_an_exit_at_the_last_iteration_is_an_end_like_any_other(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, "--train-iters", "2", "--exit-interval", "2", "--eval-iters", "1")
    job = launch(1, argv, tmp_path).wait()
    assert job.codes == [0], job.errors
    assert "validation loss at iteration 2 on validation set" in job.outputs[0]
    assert "nothing left to train" not in job.outputs[0]
    assert tracker(tmp_path) == 2
    again = launch(1, argv, tmp_path).wait()
    assert again.codes == [0], again.errors
    assert again.outputs[0].splitlines().count("nothing left to train: iteration 2 of 2") == 1
    assert "validation loss at iteration 2 on validation set" in again.outputs[0]


def be_old():
    """Let the second rank alone believe that it has been running for more than an hour."""
    if os.environ["RANK"] == "1":
        exit_hook.process_age_seconds = lambda: 3601.0


def test_exit_duration_counts_on_whichever_rank_is_over_it_first(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, *ENDLESS, "--exit-duration-in-mins", "60")
    job = launch(2, argv, tmp_path, be_old).wait()
    assert job.codes == [0, 0], job.errors
    assert tracker(tmp_path) == 1
    assert "exiting program after " in job.outputs[0]


def test_a_limit_that_is_not_reached_ends_nothing(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, "--train-iters", "2", "--exit-duration-in-mins", "60")
    job = launch(1, [*argv, "--exit-signal-handler"], tmp_path).wait()
    assert job.codes == [0], job.errors
    assert "exiting program" not in job.outputs[0]


@pytest.mark.parametrize("who", ["one rank", "every process"])
def test_sigterm_saves_and_the_next_start_goes_on(prefix, tmp_path, who):
    argv = job_flags(prefix, tmp_path, *ENDLESS, "--exit-signal-handler", "--num-workers", "1")
    job = launch(2, argv, tmp_path)
    wait_for_iterations(tmp_path, 3, lambda: job.running)
    ranks = [process.pid for process in job.processes]
    if who == "every process":
        # A scheduler signals whatever belongs to the job, what reads its data included.
        readers = [pid for rank in ranks for pid in children(rank)]
        assert len(readers) == 2
        for pid in readers:
            os.kill(pid, signal.SIGTERM)
        wait_for_iterations(tmp_path, len(records(tmp_path)) + 3, lambda: job.running)
    for pid in ranks if who == "every process" else ranks[1:]:
        os.kill(pid, signal.SIGTERM)
    job.wait()
    assert job.codes == [0, 0], job.errors
    assert job.errors == ["", ""]
    assert "exiting program after receiving SIGTERM." in job.outputs[0]
    stopped = tracker(tmp_path)
    assert records(tmp_path)[-1]["iteration"] == stopped
    again = launch(2, [*argv, "--exit-interval", str(stopped + 1)], tmp_path).wait()
    assert again.codes == [0, 0], again.errors
    assert [one["iteration"] for one in records(tmp_path)] == [*range(1, stopped + 2)]


def test_sigterm_without_the_handler_ends_at_once(prefix, tmp_path):
    job = launch(1, job_flags(prefix, tmp_path, *ENDLESS), tmp_path)
    wait_for_iterations(tmp_path, 2, lambda: job.running)
    job.processes[0].terminate()
    assert job.wait(20).codes == [-signal.SIGTERM]
    assert not (tmp_path / "root").exists()


def heed_ctrl_c():
    """Be as in a terminal, also where the tests run in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_is_one_line(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, *ENDLESS, "--num-workers", "1", "--save-interval", "2")
    job = launch(2, argv, tmp_path, heed_ctrl_c)
    wait_for_iterations(tmp_path, 3, lambda: job.running)
    ranks = [process.pid for process in job.processes]
    # A terminal sends it to every process of the job.
    for pid in [*(reader for rank in ranks for reader in children(rank)), *ranks]:
        os.kill(pid, signal.SIGINT)
    job.wait()
    assert job.codes == [130, 130], job.errors
    assert job.errors == ["interrupted; checkpoints that were saved before stay\n", ""]
    assert tracker(tmp_path) >= 2


def test_torchrun_ends_with_zero_when_its_ranks_were_told_to_stop(prefix, tmp_path):
    argv = job_flags(prefix, tmp_path, *ENDLESS, "--exit-signal-handler", "--tensor-model-parallel-size", "2")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = tmp_path / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            [*torchrun, str(ROOT / "pretrain_gpt.py"), *argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            wait_for_iterations(tmp_path, 2, lambda: process.poll() is None)
            os.kill(children(process.pid)[-1], signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()
    assert code == 0, said.read_text()
    assert "exiting program after receiving SIGTERM." in said.read_text()
    assert tracker(tmp_path) == records(tmp_path)[-1]["iteration"] >= 2
