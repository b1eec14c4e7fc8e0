import datetime
import json
import logging
import math
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training.console import PROGRESS
from megatron.training.metrics import (
    ConsoleSink,
    EvaluationRecord,
    IterationRecord,
    JsonLinesSink,
    LogLine,
    Metrics,
    TensorBoardOptions,
    TensorBoardSink,
    perplexity,
)

RECORD = IterationRecord(
    iteration=100,
    consumed_samples=12800,
    losses={"lm loss": 6.54321},
    grad_norm=1.2344,
    num_zeros=None,
    params_norm=None,
    learning_rate=1.5e-4,
    weight_decay=0.01,
    loss_scale=1.0,
    skipped=False,
    nan=False,
    global_batch_size=128,
    elapsed_ms=123.4,
    data_ms=1.5,
    tokens_per_second=1062230.0,
    tflops_per_device=56.7,
    memory={"allocated": 1, "max_allocated": 2, "reserved": 3, "max_reserved": 4},
    world_size=8,
)
LINE = LogLine(
    iteration=100,
    train_iters=500,
    consumed_samples=12800,
    elapsed_ms=123.4,
    throughput=None,
    learning_rate=1.5e-4,
    global_batch_size=128,
    losses={"lm loss": 6.54321},
    loss_scale=1.0,
    grad_norm=1.2344,
    num_zeros=None,
    params_norm=None,
    skipped=0,
    nan=0,
)
NOW = datetime.datetime(2026, 8, 22, 10, 11, 12, 123456)


def test_the_log_line_character_by_character():
    assert LINE.format(NOW) == (
        " [2026-08-22 10:11:12.123456] iteration      100/     500 | consumed samples:        12800 |"
        " elapsed time per iteration (ms): 123.4 | learning rate: 1.500000E-04 | global batch size:   128 |"
        " lm loss: 6.543210E+00 | loss scale: 1.0 | grad norm: 1.234 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_every_optional_field_of_the_log_line_stands_in_its_place():
    line = replace(
        LINE,
        losses={"lm loss": 6.54321, "sop loss": 0.6931471},
        throughput=56.74,
        num_zeros=12,
        params_norm=98.7654,
        loss_scale=2.0**32,
        skipped=3,
        nan=1,
    )
    assert line.format(NOW) == (
        " [2026-08-22 10:11:12.123456] iteration      100/     500 | consumed samples:        12800 |"
        " elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 56.7 |"
        " learning rate: 1.500000E-04 | global batch size:   128 | lm loss: 6.543210E+00 |"
        " sop loss: 6.931471E-01 | loss scale: 4294967296.0 | grad norm: 1.234 | num zeros: 12 |"
        " params norm: 98.765 | number of skipped iterations:   3 | number of nan iterations:   1 |"
    )


def test_what_is_wider_than_its_field_is_not_cut():
    line = replace(LINE, iteration=123456789, consumed_samples=10**13, global_batch_size=123456, skipped=1234)
    text = line.format(NOW)
    assert "iteration 123456789/     500 | consumed samples: 10000000000000 |" in text
    assert "global batch size: 123456 |" in text
    assert "number of skipped iterations: 1234 |" in text


@pytest.mark.parametrize("loss", [math.nan, -0.5])
def test_a_mean_loss_that_is_none_is_not_printed(loss):
    text = replace(LINE, losses={"lm loss": loss}, grad_norm=None).format(NOW)
    assert "global batch size:   128 | loss scale: 1.0 | number of skipped" in text


def validation_lines(caplog, record):
    logging.getLogger(PROGRESS).setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, logger=PROGRESS):
        ConsoleSink().evaluation(record)
    return caplog.messages[-1].split("\n")


def test_validation_lines(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    record = EvaluationRecord(100, 12800, "valid", {"lm loss": 6.54321}, final=False)
    text = " validation loss at iteration 100 | lm loss value: 6.543210E+00 | lm loss PPL: 6.945124E+02 | "
    assert validation_lines(caplog, record) == ["-" * (len(text) + 1), text, "-" * (len(text) + 1)]
    _, text, _ = validation_lines(caplog, replace(record, iteration=500, final=True))
    assert text.startswith(" validation loss at iteration 500 on validation set | lm loss value: ")
    _, text, _ = validation_lines(caplog, replace(record, iteration=500, final=True, split="test"))
    assert text.startswith(" validation loss at iteration 500 on test set | lm loss value: ")


def test_perplexity_is_capped():
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50257)) == pytest.approx(50257)
    assert perplexity(20.0) == perplexity(1e6) == pytest.approx(485165195.4097903)


def test_json_lines(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonLinesSink(str(path))
    third = replace(RECORD, losses={"lm loss": 1 / 3, "sop loss": 0.1}, num_zeros=7, params_norm=2.5)
    sink.iteration(third)
    sink.iteration(replace(RECORD, losses={"lm loss": math.nan}, grad_norm=math.inf, skipped=True, nan=True))
    sink.iteration(replace(RECORD, grad_norm=None))
    sink.evaluation(EvaluationRecord(100, 12800, "test", {"lm loss": 2.0, "sop loss": 0.5}, final=True))
    # Each line is on disk as soon as it is written.
    first, bad, given_up, evaluation = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "iteration": 100,
        "consumed_samples": 12800,
        "lm_loss": 1 / 3,
        "sop_loss": 0.1,
        "grad_norm": 1.2344,
        "num_zeros": 7,
        "params_norm": 2.5,
        "learning_rate": 1.5e-4,
        "weight_decay": 0.01,
        "loss_scale": 1.0,
        "skipped": 0,
        "nan": 0,
        "global_batch_size": 128,
        "tokens_per_second": 1062230.0,
        "elapsed_ms": 123.4,
        "data_ms": 1.5,
        "tflops_per_device": 56.7,
        "peak_memory_bytes": 2,
    }
    assert (math.isnan(float(bad["lm_loss"])), float(bad["grad_norm"])) == (True, math.inf)
    assert (bad["skipped"], bad["nan"], given_up["grad_norm"]) == (1, 1, None)
    assert "num_zeros" not in bad
    expected = {"iteration": 100, "split": "test", "lm_loss": 2.0, "sop_loss": 0.5, "ppl": math.exp(2.0)}
    assert evaluation == expected
    sink.close()


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for iteration in (1, 2):
        sink = JsonLinesSink(str(path))
        sink.iteration(replace(RECORD, iteration=iteration))
        sink.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "sink", [JsonLinesSink, lambda path: TensorBoardSink(path, 10, TensorBoardOptions())]
)
def test_a_place_that_cannot_be_written_to_is_named(sink, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"--(metrics-file|tensorboard-dir) \S*/file/below: (File exists|Not a directory)"
    ):
        sink(str(tmp_path / "file" / "below"))


def scalars(folder):
    """Every scalar of an event folder: name to {step: value}."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]
    }


def test_tensorboard_scalars_have_the_names_that_others_know(tmp_path):
    options = TensorBoardOptions(timers=True, memory=True, validation_perplexity=True, world_size=True)
    metrics = Metrics([TensorBoardSink(str(tmp_path), 1000, options)])
    metrics.iteration(replace(RECORD, num_zeros=12, params_norm=98.5))
    metrics.evaluation(EvaluationRecord(100, 12800, "valid", {"lm loss": 2.0}, final=False))
    metrics.evaluation(EvaluationRecord(100, 12800, "test", {"lm loss": 3.0}, final=True))
    metrics.close()
    found = scalars(tmp_path)
    by_sample = {
        "learning-rate": 1.5e-4,
        "batch-size": 128,
        "lm loss": 6.54321,
        "loss-scale": 1.0,
        "world-size": 8,
        "grad-norm": 1.2344,
        "num-zeros": 12,
        "params-norm": 98.5,
        "lm loss validation": 2.0,
        "lm loss validation ppl": math.exp(2.0),
    }
    by_iteration = {
        "iteration-time": 0.1234,
        "data-time": 0.0015,
        "throughput": 56.7,
        "mem-allocated-bytes": 1,
        "mem-max-allocated-bytes": 2,
        "mem-reserved-bytes": 3,
        "mem-max-reserved-bytes": 4,
    }
    expected = {name: {100: value} for name, value in (by_sample | by_iteration).items()}
    expected |= {f"{name} vs samples": {12800: value} for name, value in by_sample.items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name


def test_tensorboard_leaves_out_what_is_not_asked_for(tmp_path):
    options = TensorBoardOptions(interval=2, loss_scale=False, learning_rate=False)
    sink = TensorBoardSink(str(tmp_path), 1000, options)
    for iteration in (1, 2, 3, 4):
        sink.iteration(replace(RECORD, iteration=iteration, grad_norm=None))
    sink.evaluation(EvaluationRecord(4, 512, "valid", {"lm loss": 2.0}, final=False))
    sink.close()
    found = scalars(tmp_path)
    assert set(found["lm loss"]) == {2, 4}
    names = {"batch-size", "lm loss", "lm loss validation"}
    assert set(found) == names | {f"{name} vs samples" for name in names}
