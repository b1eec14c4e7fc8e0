"""What a run logs of its iterations, against what they came to."""

import json
import logging
import re

import pytest

from megatron.planning.flops import training_flops
from megatron.training.console import PROGRESS
from megatron.training.hooks import Hook
from megatron.training.setup import attach_metrics
from megatron.training.training import build_hooks, train
from tests.harness import run_ranks
from tests.training_harness import Recorder, flags, start, whole_weights, write_corpus

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


class Norms(Hook):
    """L2 norm of the whole model's weights after each iteration."""

    def __init__(self):
        self.norms = []

    def after_step(self, run, outcome, elapsed_seconds):
        weights = whole_weights(run).values()
        self.norms.append(sum(weight.square().sum().item() for weight in weights) ** 0.5)


def logged_run(argv):
    """(log lines, remarks, outcomes, norms of the weights, FLOPs of a step)."""
    lines, remarks = [], []
    handler = logging.Handler()
    handler.emit = lambda record: (remarks if record.levelno > logging.INFO else lines).append(
        record.getMessage()
    )
    logger = logging.getLogger(PROGRESS)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    run = start(argv)
    attach_metrics(run)
    recorder, norms = Recorder(), Norms()
    train(run, [recorder, norms, *build_hooks(run)])
    logger.removeHandler(handler)
    model = run.config.model
    flops = training_flops(model, 8, model.padded_vocab_size(run.state.size("tp")))
    return lines, remarks, recorder.outcomes, norms.norms, flops


FIELD = re.compile(r"([^|]+?): +([^|]+?) \|")


def fields(line):
    return dict(FIELD.findall(line.partition(" | ")[2].replace(" | ", " |")))


@pytest.mark.parametrize(
    "more", [[], ["--tensor-model-parallel-size=2"], ["--pipeline-model-parallel-size=2"]]
)
def test_lines_and_records_say_what_the_iterations_came_to(prefix, tmp_path, more):
    # The first updates overflow; then every iteration is good.
    precision = f"--fp16 --initial-loss-scale {2**30} --hysteresis 1 --train-iters 20".split()
    logs = "--log-interval 3 --log-throughput --log-params-norm --log-num-zeros-in-grad".split()
    path = tmp_path / "metrics.jsonl"
    schedule = "--lr-decay-style cosine --lr-warmup-iters 2".split()
    argv = flags(prefix, TINY, *precision, *logs, *schedule, "--metrics-file", str(path), *more)
    ranks = run_ranks(2, logged_run, argv)
    assert [rank[2] for rank in ranks] == [ranks[0][2]] * 2
    lines, remarks, outcomes, norms, flops = ranks[1]
    skipped = [not one.updated for one in outcomes.values()]
    overflows = sum(skipped)
    assert 3 < overflows < 17
    scales = [2.0**30 / 2**number for number in range(overflows)]
    assert remarks == [
        f" iteration {number}: gradients overflowed at loss scale {scale}: the update is skipped"
        for number, scale in enumerate(scales, start=1)
    ]

    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["iteration"] for one in records] == [*range(1, 21)]
    for number, record, norm in zip(outcomes, records, norms, strict=True):
        one = outcomes[number]
        assert record["lm_loss"] == one.losses["lm loss"]
        assert (record["consumed_samples"], record["global_batch_size"]) == (8 * number, 8)
        assert (record["learning_rate"], record["weight_decay"]) == (one.learning_rate, one.weight_decay)
        assert (record["loss_scale"], record["skipped"], record["nan"]) == (
            one.loss_scale,
            not one.updated,
            0,
        )
        assert (record["grad_norm"], record.get("num_zeros")) == (one.grad_norm, one.num_zeros)
        assert (one.grad_norm is None) == (one.num_zeros is None) == (not one.updated)
        assert record["params_norm"] == pytest.approx(norm, rel=1e-3)  # these weights are rounded to float16
        seconds = record["elapsed_ms"] / 1000
        assert record["tokens_per_second"] == pytest.approx(8 * 32 / seconds)
        assert record["tflops_per_device"] == pytest.approx(flops / seconds / 1e12 / 2)

    ends = [1, 3, 6, 9, 12, 15, 18]
    assert [int(re.search(r"iteration +(\d+)/ +20 \|", line)[1]) for line in lines] == ends
    for line, first, last in zip(lines, [0, *ends], ends, strict=False):
        window = [outcomes[number] for number in range(first + 1, last + 1)]
        good = [one.losses["lm loss"] for one in window if one.updated]
        found, record = fields(line), records[last - 1]
        if good:
            assert found["lm loss"] == f"{sum(good) / len(good):.6E}"
        else:
            assert "lm loss" not in found
        assert found["number of skipped iterations"] == str(len(window) - len(good))
        assert found["number of nan iterations"] == "0"
        assert found["consumed samples"] == str(8 * last)
        assert found["learning rate"] == f"{window[-1].learning_rate:.6E}"
        assert found["loss scale"] == f"{window[-1].loss_scale:.1f}"
        assert found["params norm"] == f"{record['params_norm']:.3f}"
        if window[-1].updated:
            assert found["num zeros"] == str(record["num_zeros"])
            assert found["grad norm"] == f"{record['grad_norm']:.3f}"
        else:
            assert not {"num zeros", "grad norm"} & set(found)
        mean = sum(one["elapsed_ms"] for one in records[first:last]) / (last - first)
        assert float(found["elapsed time per iteration (ms)"]) == pytest.approx(mean, abs=0.06)
        assert float(found["throughput per GPU (TFLOP/s/GPU)"]) == round(flops / mean / 1e9 / 2, 1)
