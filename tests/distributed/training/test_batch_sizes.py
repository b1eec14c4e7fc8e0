"""Runs whose global batch grows: each iteration as in a straight run, after a resume and in other layouts."""

import json
import re

import pytest

from tests.distributed.training.saved_runs import column, iterations, layout, metered_runs, resuming
from tests.harness import run_ranks
from tests.training_harness import SHAPES, flags, start, write_corpus

SMALL = [*SHAPES["gpt2"], "--num-layers", "2"]
RAMP = "--global-batch-size 12 --rampup-batch-size 4 4 32 --train-iters 8 --lr 3e-3".split()
SCHEDULES = "--lr-decay-style cosine --lr-warmup-iters 3 --min-lr 1e-3".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def batch_sizes(path):
    return [json.loads(line)["global_batch_size"] for line in path.read_text().splitlines()]


def test_a_ramp_goes_on_where_it_stood_in_another_layout(prefix, tmp_path):
    base = flags(prefix, SMALL, *RAMP, *SCHEDULES)
    straight, parts = tmp_path / "straight.json", tmp_path / "parts.json"
    saved = [*resuming(tmp_path / "root"), f"--metrics-file={parts}"]
    run_ranks(1, metered_runs, [[*base, f"--metrics-file={straight}"], [*base, *saved, "--exit-interval=3"]])
    more = [[*base, *saved, "--exit-interval=6"], [*base, *saved, "--micro-batch-size=2", *layout(1, 2)]]
    run_ranks(2, metered_runs, more)
    found, expected = iterations(parts), iterations(straight)
    # Worked out by hand: 4 up to 16 samples, 8 up to 32, then 12.
    assert batch_sizes(straight) == batch_sizes(parts) == [4, 4, 4, 4, 8, 8, 12, 12]
    assert column(expected, "consumed_samples") == [4, 8, 12, 16, 24, 32, 44, 56]
    for name in ("iteration", "consumed_samples", "learning_rate", "skipped"):
        assert column(found, name) == column(expected, name)
    assert column(found, "lm_loss") == pytest.approx(column(expected, "lm_loss"), rel=2e-6)
    assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5)


def test_a_run_counted_in_samples_ends_with_the_last_batch_that_fits(prefix, tmp_path):
    base = [word for word in flags(prefix, SMALL, "--micro-batch-size=2") if word]
    at = base.index("--train-iters")
    base[at : at + 2] = ["--train-samples", "50"]
    at = base.index("--global-batch-size")
    del base[at : at + 2]
    metrics = tmp_path / "metrics.json"
    # Thresholds in tokens, of 32 in a sample: 8 samples from sample 12 on, 12 from sample 30 on.
    steps = ["--step-batch-size-schedule", "0:4 384:8 0.96K:12", f"--metrics-file={metrics}"]
    run_ranks(2, metered_runs, [[*base, *steps]])
    assert batch_sizes(metrics) == [4, 4, 4, 8, 8, 8, 12]
    assert column(iterations(metrics), "consumed_samples")[-1] == 48


def refusal(argv):
    try:
        start(argv)
    except ValueError as error:
        return str(error)
    return None


def test_sizes_that_do_not_divide_are_all_named(prefix):
    base = flags(prefix, SMALL, *RAMP)
    (said, _) = run_ranks(2, refusal, [*base, "--micro-batch-size=4"])
    assert re.search(r"--global-batch-size 12 is not a multiple", said)
    (said, _) = run_ranks(2, refusal, [*base, "--global-batch-size=16", "--micro-batch-size=4"])
    assert re.search(
        r"sizes 4, 12 are not multiples of --micro-batch-size 4 x data-parallel size 2 = 8", said
    )
