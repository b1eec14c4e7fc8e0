import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.distributed.core.pipeline_parallel.toy import (
    Case,
    Stage,
    assert_equals_dense,
    cases_for,
    dense,
)
from tests.harness import make_state, run_ranks


def _train(pp, tp, cases, dtype=torch.float64, recompute=False):
    """Losses and gradients of this rank, by case."""
    state = make_state(tp=tp, pp=pp)
    results = []
    for case in cases:
        stage = Stage(state, case, dtype)

        def recomputed(chunk, microbatch, hidden, forward=stage.forward):
            return checkpoint(forward, chunk, microbatch, hidden, use_reentrant=False)

        losses = stage.step(forward=recomputed if recompute else stage.forward)
        results.append((losses, stage.gradients()))
    return results


@pytest.mark.parametrize(("world", "pp", "tp"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2), (4, 2, 1)])
def test_losses_and_gradients_equal_the_dense_model(world, pp, tp):
    cases = cases_for(pp)
    ranks = run_ranks(world, _train, pp, tp, cases)
    for index, case in enumerate(cases):
        # One stage has the losses, a V's the first and others' the last; pp is the outermost axis.
        assert assert_equals_dense(ranks, index, case.count) == world // pp
        of_first_stage, of_last_stage = ranks[0][index], ranks[-1][index]
        assert bool(of_last_stage[0]) == (case.name != "zb-v" or pp == 1)
        assert bool(of_first_stage[0]) == (case.name == "zb-v" or pp == 1)


def test_schedules_of_one_chunk_give_the_same_bits():
    cases = [Case(name, 1, 6) for name in ("1f1b", "gpipe", "zb-h1")]
    for (losses, gradients), *others in run_ranks(2, _train, 2, 1, cases, torch.float32):
        for other_losses, other_gradients in others:
            assert losses == other_losses
            assert all(all(map(torch.equal, gradients[i], other_gradients[i])) for i in gradients)


def test_bfloat16_travels_unchanged():
    # The same arithmetic in the same order on one stage and on two: any difference comes from the transfers.
    cases = [Case("1f1b", 1, 4)]
    ((alone_losses, alone),) = run_ranks(1, _train, 1, 1, cases, torch.bfloat16)[0]
    ranks = run_ranks(2, _train, 2, 1, cases, torch.bfloat16)
    assert ranks[1][0][0] == alone_losses
    for ((_, gradients),) in ranks:
        assert all(all(map(torch.equal, gradients[i], alone[i])) for i in gradients)


def test_recomputed_stages_give_the_same_gradients():
    cases = [Case("1f1b", 1, 5), Case("zb-h1", 1, 3), Case("zb-v", 2, 3), Case("interleaved", 2, 4)]
    ranks = run_ranks(2, _train, 2, 1, cases, torch.float64, True)
    for index, case in enumerate(cases):
        assert_equals_dense(ranks, index, case.count)


def _evaluate(pp, cases):
    state = make_state(pp=pp)
    results = []
    for case in cases:
        stage = Stage(state, case)
        graphs = []

        def forward(chunk, microbatch, hidden, forward=stage.forward, graphs=graphs):
            output = forward(chunk, microbatch, hidden)
            graphs.append(output.requires_grad)
            return output

        losses = stage.step(forward_only=True, forward=forward)
        gradients = [gradient for pair in stage.gradients().values() for gradient in pair]
        results.append((losses, graphs, any(gradient is not None for gradient in gradients)))
    return results


def test_evaluation_runs_forwards_only():
    cases = [Case("1f1b", 1, 5), Case("interleaved", 2, 9, 5), Case("interleaved", 4, 4), Case("zb-v", 2, 5)]
    ranks = run_ranks(4, _evaluate, 4, cases)
    for index, case in enumerate(cases):
        expected, _ = dense(case.count)
        for rank, results in enumerate(ranks):
            losses, graphs, has_gradients = results[index]
            assert graphs == [False] * (case.count * case.chunks)
            assert not has_gradients
            if rank == (0 if case.name == "zb-v" else 3):
                torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-12, atol=0)
            else:
                assert losses == []


def _many_iterations(pp, iterations, kinds):
    """The last results of each kind of schedule, whose two cases take turns, the first one last."""
    state = make_state(pp=pp)
    stages = [Stage(state, cases[0]) for cases in kinds]
    results = []
    for iteration in range(iterations):
        for stage, cases in zip(stages, kinds, strict=True):
            losses = stage.step(cases[iteration % 2], seed=iteration, forward_only=iteration % 5 == 1)
            results.append((losses, stage.gradients()))
    return results[-len(kinds) :]


@pytest.mark.parametrize("pp", [2, 4])
def test_two_hundred_iterations_of_1f1b_and_of_interleaved_do_not_hang(pp):
    kinds = [
        [Case("1f1b", 1, count) for count in (1, 3)],
        [Case("interleaved", 2, count, count) for count in (pp, pp + 1)],
    ]
    ranks = run_ranks(pp, _many_iterations, pp, 201, kinds)
    assert assert_equals_dense(ranks, 0, 1, seed=200) == 1
    assert assert_equals_dense(ranks, 1, pp, seed=200) == 1


@pytest.mark.parametrize(
    ("pp", "iterations"),
    [
        (4, 41),
        pytest.param(2, 201, marks=pytest.mark.nightly),
        pytest.param(4, 201, marks=pytest.mark.nightly),
    ],
)
def test_many_iterations_of_a_v_do_not_hang(pp, iterations):
    kinds = [[Case("zb-v", 2, count) for count in (2 * pp, 1)]]
    ranks = run_ranks(pp, _many_iterations, pp, iterations, kinds)
    assert assert_equals_dense(ranks, 0, 2 * pp, seed=iterations - 1) == 1
