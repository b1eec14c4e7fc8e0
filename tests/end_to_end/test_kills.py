"""A job of four ranks that is killed at any moment resumes from a complete checkpoint, every time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.checkpoint import find, store, survey, verify
from tests.distributed.training.saved_runs import iterations
from tests.program import Job, launch
from tests.training_harness import SHAPES, flags, write_corpus

ROOT = Path(__file__).parents[2]
RANKS = 4
SMALL = [*SHAPES["gpt2"], "--num-layers", "2", "--hidden-size", "32"]
LAYOUTS = [("2", "1"), ("2", "2"), ("1", "2"), ("1", "1")]
"""(TP, PP): the job comes back in another layout each time."""


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path / "corpus")


class TorchrunJob:
    """The same as :class:`Job`, started and killed as a user of torchrun does."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self._output = folder / "torchrun"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                [*command, str(ROOT / "pretrain_gpt.py"), *argv],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def outputs(self) -> list[str]:
        return [self._output.read_text()]

    def kill(self) -> None:
        ranks = _children(self._process.pid)
        for process in random.sample([self._process.pid, *ranks], len(ranks) + 1):
            os.kill(process, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):  # init buries them
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait(self, timeout_seconds: float = 120) -> "TorchrunJob":
        assert self._process.wait(timeout_seconds) == 0, self.outputs
        return self


def _children(parent: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def start_forked(argv: list[str], folder: Path) -> Job:
    return launch(RANKS, argv, folder)


def kill_rounds(prefix: str, folder: Path, start, rounds: int, wait_seconds: float) -> int:
    """Kill the job at random moments and take it up each time; give the number of saves that were cut off."""
    root, metrics = folder / "root", folder / "metrics"
    base = flags(prefix, SMALL)
    base += ["--save", str(root), "--load", str(root), "--metrics-file", str(metrics)]
    base += ["--train-iters", "5000", "--save-interval", "2"]
    metrics.touch()
    reached = cut = 0
    for number in range(rounds):
        argv = [*base, *_layout(number)]
        before = len(metrics.read_bytes())
        job = start(argv, folder)
        _wait_for_growth(job, metrics, before, wait_seconds)
        time.sleep(random.uniform(0, 0.5))
        job.kill()
        # It went on from the newest checkpoint that was complete.
        assert json.loads(metrics.read_bytes()[before:].split(b"\n")[0])["iteration"] == reached + 1
        inventory = survey(root)
        for path in list(inventory.complete.values())[-2:]:
            verify(path)
        reached = 0 if inventory.empty else verify(find(root)).manifest.iteration
        cut += len(inventory.unfinished)
    argv = [*base, *_layout(rounds), "--exit-interval", "2"]
    said = "".join(start(argv, folder).wait().outputs)
    assert f"at iteration {reached}" in said
    inventory = survey(root)
    assert inventory.unfinished == ()
    assert inventory.tracked == reached + 2
    return cut


def _layout(number: int) -> list[str]:
    tp, pp = LAYOUTS[number % len(LAYOUTS)]
    return ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]


def _wait_for_growth(job: Job | TorchrunJob, path: Path, before: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while b"\n" not in path.read_bytes()[before:]:
        assert job.running, "the job ended by itself"
        assert time.monotonic() < deadline, "the job does not get on"
        time.sleep(0.01)


def assert_one_curve(metrics: Path) -> None:
    """Every iteration that was done again after a kill came to the same, in whatever layout."""
    losses: dict[int, float] = {}
    for record in iterations(metrics):
        number, loss = record["iteration"], record["lm_loss"]
        assert losses.setdefault(number, loss) == pytest.approx(loss, rel=2e-6), number
    assert sorted(losses) == list(range(1, len(losses) + 1))


def test_a_few_kills(prefix, tmp_path):
    random.seed(1)
    kill_rounds(prefix, tmp_path, start_forked, rounds=4, wait_seconds=60)
    assert_one_curve(tmp_path / "metrics")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_kills_of_torchrun(prefix, tmp_path):
    assert kill_rounds(prefix, tmp_path, TorchrunJob, rounds=30, wait_seconds=180) > 0
    assert_one_curve(tmp_path / "metrics")


def die_before_the_manifest_of_iteration_4() -> None:
    write = store.write_manifest

    def write_or_die(folder, manifest):
        if manifest.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, manifest)

    store.write_manifest = write_or_die


def test_a_save_that_is_cut_off_is_reported_and_cleared_away(prefix, tmp_path):
    root = tmp_path / "root"
    argv = flags(prefix, SMALL, "--load", str(root), "--save", str(root), "--save-interval", "2")
    job = launch(2, argv, tmp_path, die_before_the_manifest_of_iteration_4).wait()
    assert job.codes == [-signal.SIGKILL, 1]
    assert job.errors[1].startswith("[rank 1] error: ")
    assert job.errors[1].count("\n") == 1
    partial = root / "iter_0000004.partial"
    assert len(list(partial.glob("*.safetensors"))) == 2
    job = launch(2, [*argv, "--exit-interval", "4"], tmp_path).wait()
    assert job.codes == [0, 0], job.errors
    for text in (f"unfinished checkpoint, left out: {partial}", f"removing {partial}"):
        assert "".join(job.outputs).count(text) == 1
    assert "at iteration 2" in job.outputs[0]
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    ]
