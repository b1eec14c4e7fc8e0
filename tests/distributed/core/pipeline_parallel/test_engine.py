import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.distributed.core.pipeline_parallel.toy import (
    Stage,
    assert_equals_dense,
    schedule_for,
)
from tests.harness import make_state, run_ranks

CASES = [("gpipe", 1, count) for count in (1, 2, 3, 4, 7)]
CASES += [("1f1b", 1, count) for count in (1, 2, 3, 4, 7)]


def _train(pp, tp, cases, dtype):
    """Losses and gradients of this rank, by case."""
    state = make_state(tp=tp, pp=pp)
    results = []
    for name, chunks, count in cases:
        schedule = schedule_for(state, name, chunks, count)
        stage = Stage(state, schedule, dtype)
        results.append((stage.step(schedule), stage.gradients()))
    return results


@pytest.mark.parametrize(("world", "pp", "tp"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2), (4, 2, 1)])
def test_losses_and_gradients_equal_the_dense_model(world, pp, tp):
    ranks = run_ranks(world, _train, pp, tp, CASES, torch.float64)
    for case, (_, _, count) in enumerate(CASES):
        assert assert_equals_dense(ranks, case, count) == world // pp


def test_schedules_give_the_same_bits():
    cases = [("1f1b", 1, 6), ("gpipe", 1, 6)]
    for rank in run_ranks(2, _train, 2, 1, cases, torch.float32):
        (losses, gradients), *others = rank
        for other_losses, other_gradients in others:
            assert losses == other_losses
            assert all(map(torch.equal, gradients[number], other_gradients[number]) for number in gradients)


def test_bfloat16_travels_unchanged():
    # The same arithmetic in the same order on one stage and on two: any difference comes from the transfers.
    cases = [("1f1b", 1, 4)]
    ((alone_losses, alone),) = run_ranks(1, _train, 1, 1, cases, torch.bfloat16)[0]
    ranks = run_ranks(2, _train, 2, 1, cases, torch.bfloat16)
    assert ranks[1][0][0] == alone_losses
    for ((_, gradients),) in ranks:
        for number, (weight, bias) in gradients.items():
            assert torch.equal(weight, alone[number][0])
            assert torch.equal(bias, alone[number][1])


def _recompute(pp, cases):
    state = make_state(pp=pp)
    results = []
    for name, chunks, count in cases:
        schedule = schedule_for(state, name, chunks, count)
        stage = Stage(state, schedule)

        def forward(chunk, microbatch, hidden, stage=stage):
            return checkpoint(stage.forward, chunk, microbatch, hidden, use_reentrant=False)

        results.append((stage.step(schedule, forward=forward), stage.gradients()))
    return results


def test_recomputed_stages_give_the_same_gradients():
    cases = [("1f1b", 1, 5)]
    ranks = run_ranks(2, _recompute, 2, cases)
    for case, (_, _, count) in enumerate(cases):
        assert_equals_dense(ranks, case, count)
