"""What one iteration does with micro-batches, masks, overflows and numbers that are none."""

import hashlib
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.config import DataConfig
from megatron.core.datasets import IndexedDatasetBuilder, build_datasets
from megatron.core.distributed.replicas import ReplicaError
from megatron.core.optimizer import LossScaleError, NonFiniteGradientError
from megatron.training.setup import verify_replicas
from megatron.training.step import NonFiniteLossError
from megatron.training.training import build_hooks, train
from pretrain_gpt import GPTTask
from tests.harness import run_ranks
from tests.training_harness import (
    VOCAB,
    Recorder,
    flags,
    start,
    train_runs,
    whole_weights,
    write_corpus,
)

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
EOD = VOCAB - 1


def layout(tp=1, pp=1):
    return [f"--tensor-model-parallel-size={tp}", f"--pipeline-model-parallel-size={pp}"]


CP2 = "--context-parallel-size=2"
V_OF_TWO_LAYERS = (
    "--pipeline-schedule zb-v --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
).split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def write_documents(path, documents):
    with IndexedDatasetBuilder(path, np.uint16) as builder:
        for document in documents:
            builder.add_document(np.asarray(document))
        builder.finalize()
    return str(path)


# How the global batch is cut


def test_loss_and_gradient_do_not_depend_on_how_the_global_batch_is_cut(prefix):
    five = ("--train-iters", "5")
    cuts = [[*five, "--micro-batch-size", str(size)] for size in (8, 4, 1)]
    alone = [flags(prefix, TINY, *cut) for cut in cuts]
    (records,) = run_ranks(1, train_runs, alone)
    staged = run_ranks(2, train_runs, [[*line, *layout(pp=2)] for line in alone])
    expected = records[0]
    assert len(expected.losses) == 5
    for record in [*records, *staged[0], *staged[1]]:
        assert record.losses == pytest.approx(expected.losses, rel=2e-6)
        assert record.norms == pytest.approx(expected.norms, rel=1e-5)


@dataclass
class Gradients:
    """Gradients of one bf16 step: by the run, and the same micro-batches' added up here."""

    run: torch.Tensor
    exact: torch.Tensor
    in_bfloat16: torch.Tensor
    loss: float
    norm: float


def gradients_of_a_step(argv):
    run = start(argv)
    exact = {named.name: torch.zeros_like(named.parameter, dtype=torch.float64) for named in run.parameters}
    narrow = {named.name: torch.zeros_like(named.parameter) for named in run.parameters}

    def listen(name):
        def add(gradient):
            exact[name] += gradient
            narrow[name] += gradient

        return add

    for named in run.parameters:
        named.parameter.register_hook(listen(named.name))
    # Clipping and the loss scale are 1, so that the buckets keep the gradient as it is.
    recorder = Recorder()
    train(run, [recorder])

    def flat(gradients):
        return torch.cat([gradients[name].double().view(-1) for name in sorted(gradients)])

    sums = [flat(exact), flat(narrow)]
    for one in sums:
        dist.all_reduce(one, group=run.state.data_group)
    outcome = recorder.outcomes[1]
    return Gradients(flat(run.store.gradients()), *sums, outcome.losses["lm loss"], outcome.grad_norm)


def several_gradients(command_lines):
    return [gradients_of_a_step(argv) for argv in command_lines]


def test_sixty_four_bfloat16_micro_batches_add_up_in_float32(prefix):
    step = ("--bf16", "--global-batch-size", "64", "--train-iters", "1", "--clip-grad", "0")
    many, one = (flags(prefix, TINY, *step, "--micro-batch-size", size) for size in ("1", "64"))
    ((cut, whole),) = run_ranks(1, several_gradients, [many, one])
    shared = run_ranks(2, several_gradients, [many])

    def error(found, expected):
        return ((found - expected).norm() / expected.norm()).item()

    for (gradients,) in [(cut,), *shared]:
        assert error(gradients.run, gradients.exact) < 1e-6
        assert error(gradients.in_bfloat16, gradients.exact) > 1e-3  # what the test would notice
        assert gradients.loss == pytest.approx(whole.loss, rel=1e-3)
        assert gradients.norm == pytest.approx(whole.norm, rel=1e-3)


# Masks


def test_micro_batches_without_a_counted_token_contribute_nothing(prefix, tmp_path):
    # Mostly documents of nothing but EOD, whose loss --eod-mask-loss leaves out.
    draws = np.random.default_rng(3)
    documents = [[*draws.integers(0, EOD, 20), EOD] if number % 12 == 0 else [EOD] for number in range(1500)]
    sparse = write_documents(tmp_path / "sparse", documents)
    five = ("--train-iters", "5", "--split", "1,0,0")
    cuts = [[*five, "--micro-batch-size", str(size)] for size in (8, 1)]
    lines = [flags(sparse, TINY, *cut) for cut in cuts]
    data = DataConfig(data_path=(sparse,), split="1,0,0", eod_mask_loss=True)
    train_split = build_datasets(
        data, seq_length=32, seed=7, sizes=(40, 0, 0), eod=EOD, vocab_size=VOCAB
    ).train
    counts = np.array([train_split[sample]["loss_mask"].sum() for sample in range(40)]).reshape(5, 8)
    assert (counts == 0).any(axis=1).sum() >= 3
    assert (counts.sum(axis=1) > 0).all()
    ((whole, cut),) = run_ranks(1, train_runs, lines)
    shared = run_ranks(2, train_runs, lines[1:])
    splits = [layout(pp=2), [*layout(pp=2), *V_OF_TWO_LAYERS], [CP2]]
    split = run_ranks(2, train_runs, [[*lines[1], *words] for words in splits])
    for record in [cut, *(rank[0] for rank in shared), *itertools.chain.from_iterable(split)]:
        assert all(map(math.isfinite, record.losses))
        assert record.losses == pytest.approx(whole.losses, rel=2e-6)
        assert record.norms == pytest.approx(whole.norms, rel=1e-5)


def wholly_masked(argv):
    run = start(argv)
    before = whole_weights(run)
    recorder = Recorder()
    train(run, [recorder, *build_hooks(run)])
    unchanged = all(torch.equal(before[name], weight) for name, weight in whole_weights(run).items())
    return recorder.outcomes, run.progress.to_json(), unchanged


@pytest.mark.parametrize(
    "more", [layout(), layout(pp=2), layout(tp=2), [CP2], [*layout(pp=2), *V_OF_TWO_LAYERS]]
)
def test_a_global_batch_without_a_counted_token_is_reported_and_not_applied(tmp_path, more):
    empty = write_documents(tmp_path / "empty", [[EOD]] * 300)
    line = flags(empty, TINY, "--train-iters", "2", "--split", "1,0,0", *more)
    for outcomes, progress, unchanged in run_ranks(2, wholly_masked, line):
        assert unchanged
        for outcome in outcomes.values():
            assert (outcome.updated, outcome.has_nan, outcome.losses) == (False, False, {"lm loss": 0.0})
            assert outcome.remarks == (
                "no token of this global batch counts towards the loss: the update is skipped",
            )
        assert progress == {
            "iteration": 2,
            "consumed_samples": 16,
            "schedule_samples": 0,
            "skipped_iterations": 2,
        }


# Replicas


def digests(argv):
    """Digest of this rank's weights after the build and after training, and its place (tp, replica)."""
    run = start(argv)

    def digest():
        run.store.wait_for_parameters()
        found = hashlib.sha256()
        for named in run.parameters:
            found.update(named.name.encode() + named.parameter.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    first = digest()
    verify_replicas(run)
    train(run, build_hooks(run))
    last = digest()
    verify_replicas(run)
    with torch.no_grad():
        if run.state.data_group.rank() == 1:
            run.parameters[3].parameter.view(-1)[5] += 1e-7
    try:
        verify_replicas(run)
        message = ""
    except ReplicaError as error:
        message = str(error)
    return (run.state.rank("tp"), run.state.data_group.rank()), (first, last), message, run.parameters[3].name


@pytest.mark.parametrize(
    ("tp", "more"),
    [
        (1, ""),
        (2, ""),
        (1, "--context-parallel-size 2"),
        (1, "--use-distributed-optimizer --overlap-param-gather"),
        (2, "--context-parallel-size 2 --use-distributed-optimizer"),
    ],
)
def test_replicas_are_equal_bit_for_bit_and_one_that_is_not_is_found(prefix, tp, more):
    line = flags(prefix, TINY, "--train-iters", "10", "--overlap-grad-reduce", *layout(tp=tp), *more.split())
    ranks = run_ranks(2 * tp, digests, line)
    found = {place: digest for place, digest, _, _ in ranks}
    for tp_rank in range(tp):
        assert found[tp_rank, 0] == found[tp_rank, 1]
        first, last = found[tp_rank, 0]
        assert first != last
    assert len(set(found.values())) == tp
    for (tp_rank, _), _, message, name in ranks:
        odd = tp + tp_rank  # tp is the innermost axis
        assert message.startswith(f"data-parallel replicas differ: {name} on ranks [{odd}] is not what it is")


def shares_compared(argv, spoilt):
    """Trains with divided weights, then spoils one row on rank 3; what the check says before and after."""
    run = start(argv)
    verify_replicas(run)
    train(run, build_hooks(run))
    verify_replicas(run)
    for bucket in run.store.buckets:
        for part in bucket.parts:
            if part.named.name == spoilt and dist.get_rank() == 3:
                part.view(bucket.weights)[-1] += 1e-7
    try:
        verify_replicas(run)
    except ReplicaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("spoilt", "rows"),
    [
        ("decoder.final_layernorm.weight", "16:32"),
        # Key and value of the one query group, behind 32 rows of queries: both ranks hold them, and of their
        # 16 + 16 rows the second replica has the last 16.
        ("decoder.layers.1.self_attention.linear_qkv.weight", "32:48"),
    ],
)
def test_shares_that_tensor_parallel_ranks_hold_alike_are_compared(prefix, spoilt, rows):
    divided = "--group-query-attention --data-parallel-sharding-strategy optim_grads_params".split()
    line = flags(prefix, TINY, "--train-iters", "2", *divided, *layout(tp=2))
    answers = run_ranks(4, shares_compared, line, spoilt)
    assert answers[:2] == ["", ""]
    for answer in answers[2:]:
        assert answer.startswith(
            f"tensor-parallel ranks differ in what they hold alike: {spoilt}[{rows}] on ranks [3] is not "
            "what it is on rank 2 (1 of "
        )


# Overflows and numbers that are none


class SpoiledGradients:
    """Puts a number into one rank's gradients at some iterations, after all sums over ranks."""

    def __init__(self, run, rank, iterations, value):
        self.sum_of_run = run.shared_gradients.sum
        self.run, self.rank, self.iterations, self.value = run, rank, iterations, value
        run.shared_gradients = self

    def sum(self):
        self.sum_of_run()
        if dist.get_rank() == self.rank and self.run.progress.iteration + 1 in self.iterations:
            self.run.store.buckets[-1].gradients[0] = self.value


def spoiled_run(argv, rank, iterations, value):
    """(outcomes, counters, weights before the end, weights at the end, error)."""
    run = start(argv)
    SpoiledGradients(run, rank, iterations, value)
    recorder, snapshots = Recorder(), Snapshots()
    message = ""
    try:
        train(run, [recorder, snapshots, *build_hooks(run)])
    except (LossScaleError, NonFiniteGradientError, NonFiniteLossError) as error:
        message = f"{type(error).__name__}: {error}"
    snapshots.after_step(run, None, 0.0)
    return recorder.outcomes, run.progress.to_json(), snapshots.weights, message


class Snapshots(Recorder):
    """Keeps this rank's weights after each iteration; the first are the initial ones, the last the final."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def before_training(self, run):
        self.after_step(run, None, 0.0)

    def after_step(self, run, outcome, elapsed_seconds):
        self.weights.append([bucket.weights.clone() for bucket in run.store.buckets])


def same(one, other):
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


FP16 = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 100 --train-iters 4".split()


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 2, 0), (1, 2, 1), (2, 1, 1)])
def test_an_overflow_on_one_rank_is_skipped_by_all(prefix, tp, pp, rank):
    line = flags(prefix, TINY, *FP16, *layout(tp, pp))
    ranks = run_ranks(2, spoiled_run, line, rank, (2,), math.inf)
    for outcomes, progress, weights, message in ranks:
        assert message == ""
        assert [one.updated for one in outcomes.values()] == [True, False, True, True]
        assert [one.loss_scale for one in outcomes.values()] == [1024.0, 1024.0, 512.0, 512.0]
        assert outcomes[2].remarks == ("gradients overflowed at loss scale 1024.0: the update is skipped",)
        assert (progress["schedule_samples"], progress["consumed_samples"]) == (24, 32)
        changed = [not same(before, after) for before, after in itertools.pairwise(weights)]
        assert changed == [True, False, True, True, False]
    assert ranks[0][0] == ranks[1][0]


def test_learning_rate_stands_still_on_skipped_updates_and_samples_do_not(prefix):
    schedule = (
        "--lr-warmup-iters 4 --lr-decay-iters 6 --lr-decay-style linear --weight-decay-incr-style linear"
    )
    ramp = "--start-weight-decay 0.0 --end-weight-decay 0.1"
    more = f"--fp16 --initial-loss-scale {2**40} --hysteresis 2 --train-iters 30 {schedule} {ramp}".split()
    ((record,),) = run_ranks(1, train_runs, [flags(prefix, TINY, *more)])
    outcomes = list(record.outcomes.values())
    skipped = [not one.updated for one in outcomes]
    overflows = skipped.index(False)
    assert overflows >= 3
    # Two overflows until the scale halves, then it halves at each.
    scales = [2.0**40, 2.0**40] + [2.0**39 / 2**step for step in range(28)]
    assert [one.loss_scale for one in outcomes[: overflows + 1]] == scales[: overflows + 1]
    good = 0
    for number, one in enumerate(outcomes, start=1):
        n, warmup, decay = 8 * good, 4 * 8, 6 * 8
        rate = 1e-2 * (n / warmup if n <= warmup else 0 if n > decay else 1 - (n - warmup) / (decay - warmup))
        assert one.learning_rate == pytest.approx(rate, abs=1e-12), number
        assert one.weight_decay == pytest.approx(0.1 * min(good / 30, 1)), number
        assert record.consumed[number] == 8 * number
        good += one.updated


@pytest.mark.parametrize(("tp", "pp"), [(1, 2)])
def test_overflows_without_end_end_the_run_with_iteration_and_scale(prefix, tp, pp):
    more = "--fp16 --initial-loss-scale 4 --hysteresis 1 --train-iters 20 --max-consecutive-skips 3".split()
    line = flags(prefix, TINY, *more, *layout(tp, pp))
    for outcomes, progress, weights, message in run_ranks(2, spoiled_run, line, 1, range(3, 99), math.nan):
        # 4, 2, 1 and two more at the minimum of 1.
        assert [one.loss_scale for one in outcomes.values()] == [4.0, 4.0, 4.0, 2.0, 1.0, 1.0]
        assert message.startswith(
            "LossScaleError: iteration 7: 3 updates in a row were skipped because gradients overflowed with "
            "the loss scale at its minimum 1.0"
        )
        assert progress["iteration"] == 6
        assert same(weights[2], weights[-1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_ends_the_run_before_the_update(prefix, value):
    line = flags(prefix, TINY, "--train-iters", "4", *layout(pp=2))
    for outcomes, _, weights, message in run_ranks(2, spoiled_run, line, 1, (3,), value):
        assert list(outcomes) == [1, 2]
        assert message.startswith("NonFiniteGradientError: iteration 3: gradients are NaN or infinite")
        assert "on rank 1" in message
        assert same(weights[2], weights[-1])
        assert not same(weights[1], weights[2])


@pytest.mark.parametrize("flag", ["--skip-nan-iterations", "--no-check-for-nan-in-loss-and-grad"])
def test_a_bad_gradient_costs_one_update_where_asked_for(prefix, flag):
    line = flags(prefix, TINY, "--train-iters", "4", flag, *layout(tp=2))
    ranks = run_ranks(2, spoiled_run, line, 1, (3,), math.nan)
    for outcomes, progress, weights, message in ranks:
        assert message == ""
        assert [one.updated for one in outcomes.values()] == [True, True, False, True]
        assert (
            outcomes[3].remarks[0].startswith("gradients are NaN or infinite (their norm is nan), first in ")
        )
        assert outcomes[3].remarks[0].endswith(" on rank 1: the update is skipped")
        assert same(weights[2], weights[3])
        assert (progress["schedule_samples"], progress["skipped_iterations"]) == (24, 1)


class BadLossTask(GPTTask):
    """The loss of one micro-batch of one iteration is no number."""

    def __init__(self, run, iteration, value):
        self.run, self.iteration, self.value = run, iteration, value

    def forward(self, model, batch, hidden_states, stream):
        output = super().forward(model, batch, hidden_states, stream)
        here = self.run.progress.iteration + 1 == self.iteration and self.run.state.rank("dp") == 0
        return output * self.value if here and self.run.holds_loss else output


def bad_loss_run(argv, value):
    run = start(argv)
    run.task = BadLossTask(run, 3, value)
    recorder, snapshots = Recorder(), Snapshots()
    message = ""
    try:
        train(run, [recorder, snapshots, *build_hooks(run)])
    except NonFiniteLossError as error:
        message = str(error)
    snapshots.after_step(run, None, 0.0)
    return recorder.outcomes, run.progress.to_json(), snapshots.weights, message


def several_bad_losses(command_lines, value):
    return [bad_loss_run(argv, value) for argv in command_lines]


@pytest.mark.parametrize(("value", "more"), [(math.nan, layout(pp=2)), (math.inf, layout())])
def test_a_bad_loss_is_found_at_its_step_before_the_update(prefix, value, more):
    lines = [
        flags(prefix, TINY, "--train-iters", "4", *more, *extra)
        for extra in ([], ["--skip-nan-iterations"], ["--no-check-for-nan-in-loss-and-grad"])
    ]
    for ended, *others in run_ranks(2, several_bad_losses, lines, value):
        outcomes, _, weights, message = ended
        assert list(outcomes) == [1, 2]
        assert message.startswith(
            f"loss is not finite at iteration 3: {{'lm loss': {value}}}; the weights are"
        )
        assert "--skip-nan-iterations" in message
        assert same(weights[2], weights[-1])
        for outcomes, progress, weights, message in others:
            assert message == ""
            assert [one.updated for one in outcomes.values()] == [True, True, False, True]
            assert [one.has_nan for one in outcomes.values()] == [False, False, True, False]
            assert same(weights[2], weights[3])
            assert not same(weights[3], weights[4])
            assert progress["schedule_samples"] == 24
            assert outcomes[3].remarks[0].endswith("the update is skipped")
