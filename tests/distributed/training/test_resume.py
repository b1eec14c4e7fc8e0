"""A run that stops and resumes in the same layout goes on as if nothing had happened, bit for bit."""

import itertools

import pytest

from tests.distributed.training.saved_runs import (
    assert_equal_bits,
    column,
    evaluations,
    iterations,
    layout,
    manifest_of,
    metered_runs,
    read_checkpoint,
    resuming,
)
from tests.harness import run_ranks
from tests.training_harness import SHAPES, flags, write_corpus

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
MOVING_SCHEDULES = (
    "--lr-decay-style cosine --lr-warmup-iters 4 --min-lr 1e-3 --lr-warmup-init 1e-4 "
    "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.2"
).split()
SMALL = [*SHAPES["gpt2"], "--num-layers", "2"]
EVALUATED = "--eval-interval 4 --eval-iters 2 --split 80,10,10".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def metrics(path):
    return ["--metrics-file", str(path)]


def test_one_rank_stopped_twice_and_evaluated_in_between(prefix, tmp_path):
    base = flags(prefix, SMALL, *DROPOUT, *MOVING_SCHEDULES)
    unevaluated, straight, parts = (tmp_path / name for name in ("unevaluated", "straight", "parts"))
    stopping = [*base, *EVALUATED, *resuming(tmp_path / "root"), *metrics(parts), "--exit-interval", "7"]
    run_ranks(
        1,
        metered_runs,
        [
            [*base, "--split", "80,10,10", *metrics(unevaluated)],
            [*base, *EVALUATED, *metrics(straight), "--save", str(tmp_path / "straight_root")],
            *[stopping] * 3,
        ],
    )
    expected = iterations(straight)
    assert column(expected, "iteration") == list(range(1, 21))
    assert column(expected, "consumed_samples") == list(range(8, 161, 8))
    # Both schedules move at every iteration, so that a position counted twice, or one late, would show.
    assert len(set(column(expected, "learning_rate"))) == len(set(column(expected, "weight_decay"))) == 20
    assert iterations(unevaluated) == expected
    assert iterations(parts) == expected
    assert column(evaluations(straight), "iteration") == [4, 8, 12, 16, 20, 20, 20]
    assert len(set(column(evaluations(straight)[:5], "lm_loss"))) == 5
    assert evaluations(parts) == evaluations(straight)
    found = read_checkpoint(tmp_path / "root", 20)
    assert_equal_bits(found, read_checkpoint(tmp_path / "straight_root", 20))
    assert {name.split(".")[1] for name in found if name.startswith("optimizer.")} == {
        "exp_avg",
        "exp_avg_sq",
    }
    assert manifest_of(tmp_path / "root", 14)["state"]["progress"] == {
        "iteration": 14,
        "consumed_samples": 112,
        "schedule_samples": 112,
        "skipped_iterations": 0,
    }


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "dp"),
    [("llama", 2, 2, 1), ("gpt2", 1, 2, 2), ("gpt2", 1, 1, 2)],
)
def test_ranks_in_an_unchanged_layout(prefix, tmp_path, shape, tp, pp, dp):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    base = flags(prefix, SHAPES[shape], *DROPOUT, *MOVING_SCHEDULES, *layout(tp, pp))
    stopping = [*base, *resuming(tmp_path / "root"), *metrics(parts), "--exit-interval", "10"]
    runs = [[*base, *metrics(straight)], stopping, stopping]
    run_ranks(tp * pp * dp, metered_runs, runs, timeout_seconds=120)
    assert len(iterations(straight)) == 20
    assert iterations(parts) == iterations(straight)


def test_loss_scale_skips_and_schedules_of_fp16(prefix, tmp_path):
    """Saved while updates are still being skipped, and again when the scale has grown."""
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    base = flags(prefix, SMALL, *DROPOUT, *MOVING_SCHEDULES, "--fp16")
    base += "--initial-loss-scale 16777216 --loss-scale-window 4".split()
    stopping = [*base, *resuming(tmp_path / "root"), *metrics(parts), "--exit-interval"]
    runs = [[*base, *metrics(straight)], [*stopping, "2"], [*stopping, "10"], [*stopping, "20"]]
    run_ranks(1, metered_runs, runs, timeout_seconds=120)
    expected = iterations(straight)
    assert iterations(parts) == expected
    scales, skipped = column(expected, "loss_scale"), column(expected, "skipped")
    first = skipped.index(0)
    assert first >= 3
    assert all(skipped[:first])
    # The first overflow uses up the hysteresis, each later one halves; four good steps in a row double.
    assert scales[: first + 1] == [2.0**24, *(2.0 ** (24 - n) for n in range(first))]
    assert any(after > before for before, after in itertools.pairwise(scales))
    # Neither schedule moves on a skipped update, while samples are consumed.
    assert set(column(expected[: first + 1], "learning_rate")) == {1e-4}
    assert set(column(expected[: first + 1], "weight_decay")) == {0.01}
    assert expected[first + 1]["learning_rate"] > 1e-4
    assert column(expected, "consumed_samples") == list(range(8, 161, 8))
    progress = manifest_of(tmp_path / "root", 20)["state"]["progress"]
    assert progress["skipped_iterations"] == sum(skipped)
    assert progress["schedule_samples"] == 8 * (20 - sum(skipped))


def test_shuffled_epochs_worker_processes_and_momentum(prefix, tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    base = flags(prefix, SMALL, *DROPOUT, "--optimizer", "sgd", "--train-iters", "12")
    base += "--dataloader-type cyclic --reset-attention-mask --reset-position-ids".split()
    stopping = [*base, *resuming(tmp_path / "root"), *metrics(parts), "--exit-interval", "7"]
    runs = [[*base, *metrics(straight)], stopping, [*stopping, "--num-workers", "1"]]
    run_ranks(1, metered_runs, runs)
    assert column(iterations(parts), "iteration") == list(range(1, 13))
    assert iterations(parts) == iterations(straight)


def test_a_run_counted_in_samples_stopped_before_its_first_evaluation(prefix, tmp_path):
    counted = flags(prefix, SMALL, *DROPOUT)
    at = counted.index("--train-iters")
    counted[at : at + 2] = ["--train-samples", "67"]  # the last three make no global batch
    counted += ["--split", "80,10,10", "--eval-interval", "1000", "--eval-iters", "1"]
    straight, parts, larger = (tmp_path / name for name in ("straight", "parts", "larger"))
    stop = ["--exit-interval", "2"]
    runs = [[*counted, *metrics(straight)]]
    runs += [[*counted, *resuming(tmp_path / "root"), *metrics(parts), *more] for more in (stop, [])]
    # The samples that are left count, whatever the size of the batches that took the first ones.
    runs += [
        [*counted, *resuming(tmp_path / "other"), *metrics(larger), *more]
        for more in (stop, ["--global-batch-size", "16"])
    ]
    run_ranks(1, metered_runs, runs)
    assert column(iterations(straight), "consumed_samples") == list(range(8, 65, 8))
    assert iterations(parts) == iterations(straight)
    assert evaluations(parts) == evaluations(straight)
    assert column(evaluations(parts), "iteration") == [8, 8]
    assert column(iterations(larger), "consumed_samples") == [8, 16, 32, 48, 64]
