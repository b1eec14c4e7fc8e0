"""When a run is evaluated, on what, and what comes out."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.core.config import DataConfig
from megatron.core.datasets import IndexedDatasetBuilder, build_datasets
from megatron.core.tensor_parallel import RandomStream
from megatron.training.console import PROGRESS
from megatron.training.metrics import Metrics
from megatron.training.step import evaluation_losses
from megatron.training.training import build_hooks, train
from tests.harness import run_ranks
from tests.training_harness import VOCAB, flags, start, write_corpus

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
EOD = VOCAB - 1


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", documents=120)


class Records:
    """A sink that keeps the evaluations."""

    def __init__(self):
        self.evaluations = []

    def iteration(self, record):
        pass

    def evaluation(self, record):
        self.evaluations.append(record)

    def close(self):
        pass


def evaluated_run(argv):
    """[(iteration, consumed samples, split, loss, final)] of a run, and its warnings."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger(PROGRESS).addHandler(handler)
    run = start(argv)
    records = Records()
    run.metrics = Metrics([records])
    train(run, build_hooks(run))
    logging.getLogger(PROGRESS).removeHandler(handler)
    assert run.chunks[0].model.training
    seen = [
        (one.iteration, one.consumed_samples, one.split, one.losses["lm loss"], one.final)
        for one in records.evaluations
    ]
    return seen, warnings


def evaluated_runs(command_lines):
    return [evaluated_run(argv) for argv in command_lines]


def whens(argv_list, world=1):
    (results, *others) = run_ranks(world, evaluated_runs, argv_list)
    assert all(other == results for other in others)
    return [[(iteration, split, final) for iteration, _, split, _, final in seen] for seen, _ in results]


def test_when_a_run_is_evaluated(prefix):
    few = ("--train-iters", "5", "--split", "60,20,20")
    never = flags(prefix, TINY, *few, "--eval-iters", "0", "--eval-interval", "2")
    only_at_the_end = flags(prefix, TINY, *few, "--eval-iters", "1")
    without_test = flags(
        prefix, TINY, *few, "--eval-iters", "1", "--eval-interval", "3", "--split", "80,20,0"
    )
    without_any = flags(prefix, TINY, *few, "--eval-iters", "1", "--eval-interval", "3", "--split", "1,0,0")
    stopped = flags(prefix, TINY, *few, "--eval-iters", "1", "--eval-interval", "2", "--exit-interval", "3")
    both = [(5, "valid", True), (5, "test", True)]
    expected = [[], both, [(3, "valid", False), (5, "valid", True)], [], [(2, "valid", False)]]
    assert whens([never, only_at_the_end, without_test, without_any, stopped]) == expected
    # Stages that read no data of their own take part all the same.
    staged = [*only_at_the_end, "--num-layers", "3", "--pipeline-model-parallel-size", "3"]
    assert whens([staged, [*staged, "--eval-iters", "0"]], world=3) == [both, []]


def losses_without_the_loop(argv, batches):
    """Mean loss of each pair of global batches, from the model's logits and plain PyTorch, in float64."""
    run = start(argv, torch.float64)
    data = DataConfig(data_path=run.config.data.data_path, split="60,40,0", eod_mask_loss=True)
    valid = build_datasets(
        data, seq_length=32, seed=7, sizes=(8, batches * 8, 8), eod=EOD, vocab_size=VOCAB
    ).valid
    samples = [valid[number] for number in range(batches * 8)]
    tokens, labels, mask = (
        torch.from_numpy(np.stack([sample[name] for sample in samples]))
        for name in ("tokens", "labels", "loss_mask")
    )
    run.chunks[0].model.eval()
    with torch.no_grad():
        logits = run.chunks[0].model(tokens=tokens, labels=None, stream=RandomStream.root(0))  # [s, b, v]
    losses = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none") * mask  # [b, s]
    sums, counts = losses.view(-1, 16, 32).sum(dim=(1, 2)), mask.double().view(-1, 16, 32).sum(dim=(1, 2))
    return (sums / counts).tolist()


def losses_of_the_loop(argv, dtype=torch.float64):
    """Two evaluations one after the other: each goes on in the split where the last one stopped."""
    run = start(argv, dtype)
    (valid,) = run.readers.evaluation
    return [evaluation_losses(run, valid)["lm loss"] for _ in range(2)]


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, ()),
        (1, ("--micro-batch-size", "8", "--hidden-dropout", "0.5", "--attention-dropout", "0.5")),
        (2, ("--tensor-model-parallel-size", "2")),
        (2, ("--pipeline-model-parallel-size", "2")),
        (2, ("--micro-batch-size", "2", "--pipeline-schedule", "gpipe")),
    ],
)
def test_the_loss_is_that_of_the_split_s_samples(prefix, world, more):
    line = flags(
        prefix, TINY, "--split", "60,40,0", "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "2"
    )
    (expected,) = run_ranks(1, losses_without_the_loop, line, 4)
    for found in run_ranks(world, losses_of_the_loop, [*line, *more]):
        assert found == pytest.approx(expected, rel=1e-12)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)


@pytest.mark.parametrize(("world", "more"), [(1, ()), (2, ()), (2, ("--pipeline-model-parallel-size", "2"))])
def test_full_validation_counts_every_sample_once_each_time(prefix, world, more):
    """The samples make no whole number of global batches, which leaves places that must count nothing."""
    line = flags(
        prefix, TINY, "--split", "60,40,0", "--train-iters", "1", "--eval-interval", "1", "--eval-iters", "1"
    )
    whole = [*line, "--full-validation", "--eval-global-batch-size", "12", "--micro-batch-size", "2"]
    (expected,) = run_ranks(1, loss_of_all_samples, line)
    for first, again in run_ranks(world, losses_of_the_loop, [*whole, *more]):
        assert first == again == pytest.approx(expected, rel=1e-12)


def test_full_validation_at_the_end_is_not_made_twice(prefix):
    line = flags(
        prefix, TINY, "--split", "60,20,20", "--train-iters", "4", "--eval-interval", "2", "--eval-iters", "1"
    )
    ((seen, _),) = run_ranks(1, evaluated_run, [*line, "--full-validation"])
    assert [(iteration, split, final) for iteration, _, split, _, final in seen] == [
        (2, "valid", False),
        (4, "valid", False),
        (4, "valid", True),
        (4, "test", True),
    ]
    assert seen[1][3] == seen[2][3] != seen[0][3]


def loss_of_all_samples(argv):
    """Mean loss of one epoch of the validation split, one sample at a time, from logits, in float64."""
    run = start(argv, torch.float64)
    data = DataConfig(data_path=run.config.data.data_path, split="60,40,0", eod_mask_loss=True)
    valid = build_datasets(data, seq_length=32, seed=7, sizes=(8, None, 0), eod=EOD, vocab_size=VOCAB).valid
    assert len(valid) % 12
    run.chunks[0].model.eval()
    total = count = 0.0
    for number in range(len(valid)):
        sample = {name: torch.from_numpy(valid[number][name]) for name in ("tokens", "labels", "loss_mask")}
        with torch.no_grad():
            logits = run.chunks[0].model(tokens=sample["tokens"][None], stream=RandomStream.root(0))[:, 0]
        losses = F.cross_entropy(logits, sample["labels"], reduction="none")
        total += (losses * sample["loss_mask"]).sum().item()
        count += sample["loss_mask"].sum().item()
    return total / count


def test_a_split_without_a_counted_token_has_no_loss(tmp_path):
    draws = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "half", np.uint16) as builder:
        for _ in range(50):
            builder.add_document(np.append(draws.integers(0, EOD, 30), EOD))
        for _ in range(50):
            builder.add_document(np.full(8, EOD))
        builder.finalize()
    line = flags(
        str(tmp_path / "half"), TINY, "--split", "50,50,0", "--train-iters", "2", "--eval-iters", "1"
    )
    for world in (1, 2):
        for seen, warnings in run_ranks(world, evaluated_run, line):
            assert seen == []
            said = "no token of the validation data counts towards the loss: there is none to report"
            assert warnings == [f" iteration 2: {said}"]
