"""What the flags about loading take from a checkpoint, what they leave, and what is refused."""

from typing import Any

import pytest

from megatron.core.checkpoint import CheckpointError
from megatron.training.run import Run
from tests.distributed.training.saved_runs import column, iterations, metered_runs, read_checkpoint
from tests.harness import run_ranks
from tests.training_harness import SHAPES, flags, start, whole_weights, write_corpus

SMALL = [*SHAPES["llama"], "--num-layers", "2"]
COSINE = "--lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 2".split()
STOPPED = ["--exit-interval", "4"]


def state_of(run: Run) -> dict[str, Any]:
    """Where a run stands before its first iteration."""
    moments = [
        part.values.abs().max().item()
        for kind, parts in run.optimizer.state_tensors().items()
        if kind != "main"
        for part in parts
    ]
    return {
        "iteration": run.progress.iteration,
        "samples": run.progress.consumed_samples,
        "learning_rate": run.schedule.learning_rate(run.progress.schedule_samples),
        "steps": run.optimizer.state_dict()["steps"],
        "moments": max(moments),
        "weights": whole_weights(run),
    }


def starts(command_lines: dict[str, list[str]]) -> dict[str, dict[str, Any] | str]:
    """Where each run would start, or why it does not."""
    found: dict[str, dict[str, Any] | str] = {}
    for name, argv in command_lines.items():
        try:
            found[name] = state_of(start(argv))
        except (ValueError, CheckpointError) as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="module")
def saved(prefix, tmp_path_factory):
    """Three roots: everything of iteration 4 in one, without optimizer and without random state in others."""
    root = tmp_path_factory.mktemp("saved")
    base = flags(prefix, SMALL, *COSINE, *STOPPED)
    run_ranks(
        1,
        metered_runs,
        [
            [*base, "--save", str(root / "whole")],
            [*base, "--save", str(root / "no_optim"), "--no-save-optim", "--bf16"],
            [*base, "--save", str(root / "no_rng"), "--no-save-rng"],
        ],
    )
    return root


@pytest.fixture(scope="module")
def found(prefix, saved):
    """Where runs with various flags start."""
    base = flags(prefix, SMALL, *COSINE)
    whole, empty = ["--load", str(saved / "whole")], str(saved / "empty")
    lower = ["--lr", "3e-5"]
    lines = {
        "resumed": [*base, *whole],
        "lower": [*base, *whole, *lower],
        "override": [*base, *whole, *lower, "--override-opt_param-scheduler"],
        "theirs": [*base, *whole, *lower, "--use-checkpoint-opt_param-scheduler"],
        "finetune": [*base, *whole, *lower, "--finetune"],
        "pretrained": [*base, *lower, "--pretrained-checkpoint", str(saved / "whole")],
        "pretrained, first launch": [
            *base,
            *["--load", empty, "--save", empty, "--pretrained-checkpoint", str(saved / "whole")],
        ],
        "pretrained, later launch": [
            *base,
            *[*whole, "--save", str(saved / "whole"), "--pretrained-checkpoint", str(saved / "no_optim")],
        ],
        "no_load_optim": [*base, *whole, "--no-load-optim"],
        "lacks optimizer": [*base, "--load", str(saved / "no_optim")],
        "lacks optimizer, allowed": [*base, "--load", str(saved / "no_optim"), "--no-load-optim"],
        "lacks random": [*base, "--load", str(saved / "no_rng")],
        "lacks random, allowed": [*base, "--load", str(saved / "no_rng"), "--no-load-rng"],
        "checkpoint_args": [*flags(prefix, []), *COSINE, *whole, "--use-checkpoint-args"],
        "differs": [*base, *whole, "--hidden-size", "32", "--seed", "8", "--split", "80,20,0"],
        "finetune, differs": [*base, *whole, "--finetune", "--swiglu", "--num-layers", "3"],
        "finetune of nothing": [*base, "--finetune", "--load", empty, "--save", empty],
        "other data": [*base, *whole, "--finetune", "--seed", "8", "--split", "80,20,0"],
    }
    (result,) = run_ranks(1, starts, lines)
    return result


def test_a_lower_learning_rate_is_refused_unless_a_flag_chooses(found):
    assert "--lr 0.0003 in the checkpoint, --lr 3e-05 now" in found["lower"]
    assert "--override-opt_param-scheduler" in found["lower"]
    rate = found["resumed"]["learning_rate"]
    assert 2e-4 < rate < 3e-4
    assert found["override"]["learning_rate"] == pytest.approx(rate / 10, rel=1e-12)
    assert found["theirs"]["learning_rate"] == rate
    for name in ("resumed", "override", "theirs"):
        assert (found[name]["iteration"], found[name]["samples"], found[name]["steps"]) == (4, 32, 4)
        assert found[name]["moments"] > 0


@pytest.mark.parametrize("name", ["finetune", "pretrained", "pretrained, first launch", "other data"])
def test_only_weights_are_taken(found, saved, name):
    state = found[name]
    assert (state["iteration"], state["samples"], state["steps"], state["moments"]) == (0, 0, 0, 0)
    assert state["learning_rate"] == 0  # the new schedule's warm-up begins
    assert_weights_of(state, read_checkpoint(saved / "whole", 4), "model")


@pytest.mark.parametrize("name", ["resumed", "pretrained, later launch", "checkpoint_args", "no_load_optim"])
def test_the_run_goes_on(found, saved, name):
    state = found[name]
    assert (state["iteration"], state["samples"]) == (4, 32)
    assert state["learning_rate"] == found["resumed"]["learning_rate"]
    assert_weights_of(state, read_checkpoint(saved / "whole", 4), "model")


def test_without_the_optimizer_its_moments_start_from_zero(found):
    assert (found["no_load_optim"]["moments"], found["no_load_optim"]["steps"]) == (0, 0)


def test_the_part_that_is_missing_is_named_and_the_flag_that_goes_without_it(found, saved):
    message = found["lacks optimizer"]
    assert "no optimizer state" in message
    assert "--no-load-optim" in message
    assert "random" not in message
    message = found["lacks random"]
    assert "no random state" in message
    assert "--no-load-rng" in message
    assert "optim" not in message.replace(str(saved), "")
    state = found["lacks optimizer, allowed"]
    assert (state["iteration"], state["steps"], state["moments"]) == (4, 0, 0)
    assert_weights_of(state, read_checkpoint(saved / "no_optim", 4), "model")
    state = found["lacks random, allowed"]
    assert (state["iteration"], state["steps"]) == (4, 4)
    assert state["moments"] > 0


def test_every_setting_that_differs_is_listed_with_both_values(found):
    for line in (
        "--hidden-size 64 in the checkpoint, --hidden-size 32 now",
        "--kv-channels 16 in the checkpoint, --kv-channels 8 now",
        "--seed 7 in the checkpoint, --seed 8 now",
        "--split 90,10,0 in the checkpoint, --split 80,20,0 now",
    ):
        assert f"\n  {line}\n" in found["differs"]
    assert "--num-layers 2 in the checkpoint, --num-layers 3 now" in found["finetune, differs"]


def test_finetuning_nothing_is_no_fresh_start(found):
    assert "no checkpoint found" in found["finetune of nothing"]


def assert_weights_of(state, checkpoint, kind):
    weights = {
        name.removeprefix(f"{kind}."): tensor
        for name, tensor in checkpoint.items()
        if name.startswith(f"{kind}.")
    }
    assert state["weights"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert (state["weights"][name] == tensor.double()).all(), name


def test_a_run_that_is_done_is_saved_elsewhere_and_trains_no_more(prefix, saved, tmp_path):
    done = [*flags(prefix, SMALL, *COSINE), "--lr-decay-iters", "20", "--train-iters", "4"]
    metrics = tmp_path / "metrics"
    lines = [
        [*done, "--load", str(saved / "whole"), *more, "--metrics-file", str(metrics)]
        for more in ([], ["--save", str(tmp_path / "root")])
    ]
    run_ranks(1, metered_runs, lines)
    assert column(iterations(metrics), "iteration") == []
    before, after = (read_checkpoint(root, 4) for root in (saved / "whole", tmp_path / "root"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
