"""One rank fails: all end within seconds, with a code above 0, and one of them says why."""

import functools
import os
import signal
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training import training
from tests.program import launch
from tests.training_harness import flags, write_corpus

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
LAYOUTS = {
    "dp": [],
    "tp": ["--tensor-model-parallel-size", "2"],
    "pp": ["--pipeline-model-parallel-size", "2"],
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def by_slurm():
    """Put SLURM's variables in the place of torchrun's."""
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    del os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]
    os.environ |= {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NTASKS": size,
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }


def own_rank():
    return int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])


def fail_at(iteration, rank, failure, *, slurm=False):
    """Let one rank fail in the middle of a run."""
    if slurm:
        by_slurm()
    if own_rank() != rank:
        return
    step = training.train_step

    def spoiled(run):
        if run.progress.iteration + 1 == iteration:
            failure()
        return step(run)

    training.train_step = spoiled


def raise_error():
    raise ZeroDivisionError("this rank has had enough")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("kind", "slurm"), [("dp", False), ("tp", True), ("pp", False)])
def test_a_rank_that_raises_ends_the_others(prefix, tmp_path, kind, slurm):
    argv = flags(prefix, TINY, "--train-iters", "100000", *LAYOUTS[kind])
    prepare = functools.partial(fail_at, 3, 1, raise_error, slurm=slurm)
    began = time.monotonic()
    job = launch(2, argv, tmp_path, prepare).wait(45)
    assert job.codes == [1, 1]
    assert time.monotonic() - began < 40
    assert job.errors[1].startswith("[rank 1] Traceback")
    assert job.errors[1].endswith("ZeroDivisionError: this rank has had enough\n")
    assert job.errors[0].startswith(
        "[rank 0] error: lost another rank, which should have said why it ended ("
    )
    assert job.errors[0].count("\n") == 1


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_rank_that_is_killed_ends_the_others(prefix, tmp_path, kind):
    argv = flags(prefix, TINY, "--train-iters", "100000", *LAYOUTS[kind])
    job = launch(2, argv, tmp_path, functools.partial(fail_at, 3, 0, be_killed)).wait(45)
    assert job.codes == [-signal.SIGKILL, 1]
    assert job.errors[1].startswith("[rank 1] error: lost another rank")


def with_flags(rank, words):
    """Give one rank a command line of its own."""
    if own_rank() == rank:
        sys.argv += words


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_before_all_have_met(prefix, tmp_path, rank):
    # As on a node that lacks a file which the others have.
    missing = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "missing")]
    argv = flags(prefix, TINY, "--distributed-timeout-minutes", "30")
    began = time.monotonic()
    job = launch(2, argv, tmp_path, functools.partial(with_flags, rank, missing)).wait(45)
    assert job.codes == ([2, 1] if rank == 0 else [1, 2])  # the rank whose flags cannot be run, and its peer
    assert time.monotonic() - began < 20
    assert "".join(job.errors) == job.errors[0]
    assert job.errors[0].count("\n") == 1
    assert f"{tmp_path / 'missing'}" in job.errors[0]
    if rank == 1:
        assert job.errors[0].startswith("error: rank 1 failed at the start: ")


def be_one_of_two(rank):
    """Be a rank whose peer never comes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "error: only 1 of 2 ranks came within 1.2 s (--distributed-timeout-minutes): missing 1"),
        (1, "error: rank 1 finds nobody at 127.0.0.1:"),
    ],
)
def test_a_rank_whose_peer_never_comes(prefix, tmp_path, rank, said):
    argv = flags(prefix, TINY, "--distributed-timeout-minutes", "0.02")
    job = launch(1, argv, tmp_path, functools.partial(be_one_of_two, rank)).wait(30)
    assert job.codes == [1]
    assert job.errors[0].startswith(said)
    assert job.errors[0].count("\n") == 1


def test_a_rank_that_lacks_the_data_says_so_and_the_others_end(prefix, tmp_path):
    argv = flags(prefix, TINY)
    absent = ["--data-path", str(tmp_path / "absent")]
    job = launch(2, argv, tmp_path, functools.partial(with_flags, 1, absent)).wait(45)
    assert job.codes == [1, 1]
    problem = f"no dataset at the data path '{tmp_path / 'absent'}'"
    assert job.errors[0].startswith(f"error: rank 1 failed at the start: {problem}")
    assert job.errors[1] == ""


def test_replicas_that_start_from_different_weights_do_not_train(prefix, tmp_path):
    argv = flags(prefix, TINY, "--train-iters", "2")
    job = launch(2, argv, tmp_path, functools.partial(with_flags, 1, ["--seed", "8"])).wait(45)
    assert job.codes == [1, 1]
    said = "error: data-parallel replicas differ: embedding.word_embeddings.weight on ranks [1] is not what"
    assert job.errors[0].startswith(f"[rank 0] {said}")
    assert "before the start of training" not in job.outputs[0]


def test_only_the_last_rank_writes_metrics_and_says_where_it_cannot(prefix, tmp_path):
    (tmp_path / "file").write_text("")
    argv = flags(prefix, TINY, "--metrics-file", str(tmp_path / "file" / "metrics.jsonl"))
    job = launch(2, argv, tmp_path).wait(45)
    assert job.codes == [1, 1]
    said = f"--metrics-file {tmp_path}/file/metrics.jsonl: File exists; give a file in a folder of yours"
    assert job.errors == ["", f"[rank 1] error: {said}\n"]


def lose_a_weight(run_iteration):
    """Let a weight become NaN on the last stage, as after a bad update."""
    step = training.train_step

    def spoiled(run):
        if run.progress.iteration + 1 == run_iteration and run.holds_loss:
            run.parameters[-1].parameter.data.view(-1)[0] = float("nan")
        return step(run)

    training.train_step = spoiled


def test_a_loss_that_is_no_number_ends_all_ranks_and_one_of_them_says_so(prefix, tmp_path):
    folder = tmp_path / "board"
    metrics = tmp_path / "metrics.jsonl"
    argv = flags(
        prefix, TINY, "--metrics-file", str(metrics), "--tensorboard-dir", str(folder), *LAYOUTS["pp"]
    )
    job = launch(2, argv, tmp_path, functools.partial(lose_a_weight, 4)).wait(45)
    assert job.codes == [1, 1]
    assert job.errors[1] == ""
    assert job.errors[0].startswith(
        "[rank 0] error: loss is not finite at iteration 4: {'lm loss': nan}; the "
    )
    assert job.errors[0].count("\n") == 1
    # What was measured before is there.
    assert len(metrics.read_text().splitlines()) == 3
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3]


def test_overflows_without_end_end_the_run_and_leave_the_last_checkpoint(prefix, tmp_path):
    root = str(tmp_path / "root")
    argv = flags(prefix, TINY, "--fp16", "--save", root, "--load", root, "--max-consecutive-skips", "3")
    job = launch(2, [*argv, "--loss-scale", "1024", "--exit-interval", "2"], tmp_path).wait(45)
    assert job.codes == [0, 0], job.errors
    before = {path: path.read_bytes() for path in (tmp_path / "root").rglob("*") if path.is_file()}
    job = launch(2, [*argv, "--loss-scale", "1e30"], tmp_path).wait(45)
    assert job.codes == [1, 1]
    assert job.errors[1] == ""
    assert job.errors[0].startswith("[rank 0] error: iteration 5: 3 updates in a row were skipped ")
    assert "1e+30" in job.errors[0]
    assert before == {path: path.read_bytes() for path in (tmp_path / "root").rglob("*") if path.is_file()}
