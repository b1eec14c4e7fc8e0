import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron.core.pipeline_parallel.engine import run_pipeline
from megatron.core.pipeline_parallel.p2p import TensorSpec
from megatron.core.pipeline_parallel.partition import layer_ranges
from megatron.core.pipeline_parallel.schedules import SCHEDULES, lower
from tests.harness import make_state, run_ranks

SEQUENCE, BATCH, HIDDEN, LAYERS = 3, 2, 4, 5
SHAPE = (SEQUENCE, BATCH, HIDDEN)  # [s, b, h]


class Layer(nn.Module):
    """A residual block; its weights depend on the layer alone."""

    def __init__(self, number, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(HIDDEN, HIDDEN, dtype=torch.float64, generator=generator) / 2
        self.weight = nn.Parameter(weight.to(dtype))

    def forward(self, hidden):
        return hidden + torch.tanh(hidden @ self.weight)


def _microbatches(count, dtype, seed=100):
    """Inputs and targets, [s, b, h] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 2, *SHAPE)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def _dense(count, dtype=torch.float64, seed=100):
    """Losses of the micro-batches and gradients of all layers, from one pass through the whole model."""
    layers = [Layer(number, dtype) for number in range(LAYERS)]
    inputs, targets = _microbatches(count, dtype, seed).unbind(1)
    hidden = inputs
    for layer in layers:
        hidden = layer(hidden)
    losses = (hidden - targets).square().sum(dim=(1, 2, 3)) / count
    losses.sum().backward()
    return losses.detach(), [layer.weight.grad for layer in layers]


def _spec(dtype):
    return TensorSpec(SHAPE, dtype, torch.device("cpu"))


class Stage:
    """This rank's layers, and a forward step for the engine."""

    def __init__(self, group, dtype=torch.float64):
        self.group = group
        self.layers = {i: Layer(i, dtype) for i in layer_ranges(LAYERS, group.size())[group.rank()]}
        self.dtype = dtype
        self.data = None

    def forward(self, microbatch, hidden):
        inputs, targets = self.data[microbatch]
        hidden = inputs if hidden is None else hidden
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.group.rank() < self.group.size() - 1:
            return hidden
        return (hidden - targets).square().sum() / len(self.data)

    def step(self, schedule, count, *, seed=100, forward_only=False, **kwargs):
        self.data = _microbatches(count, self.dtype, seed)
        for layer in self.layers.values():
            layer.weight.grad = None
        programs = lower(SCHEDULES[schedule](self.group.size(), count), forward_only=forward_only)
        return run_pipeline(
            programs[self.group.rank()],
            forward=kwargs.pop("forward", self.forward),
            group=self.group,
            activation=_spec(self.dtype),
            forward_only=forward_only,
            **kwargs,
        )

    def gradients(self):
        return {number: layer.weight.grad for number, layer in self.layers.items()}


def _train(pp, tp, cases, dtype):
    stage = Stage(make_state(tp=tp, pp=pp).group("pp"), dtype)
    return [(stage.step(schedule, count), stage.gradients()) for schedule, count in cases]


CASES = [(schedule, count) for schedule in SCHEDULES for count in (1, 2, 3, 4, 7)]


@pytest.mark.parametrize(("world", "pp", "tp"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2), (4, 2, 1)])
def test_losses_and_gradients_equal_the_dense_model(world, pp, tp):
    ranks = run_ranks(world, _train, pp, tp, CASES, torch.float64)
    for case, (schedule, count) in enumerate(CASES):
        losses, gradients = _dense(count)
        seen = set()
        for rank, results in enumerate(ranks):
            rank_losses, rank_gradients = results[case]
            if rank < world - world // pp:  # pp is the outermost axis: the last ranks are the last stage
                assert rank_losses == []
            else:
                torch.testing.assert_close(torch.stack(rank_losses), losses, rtol=1e-12, atol=0)
                assert not any(loss.requires_grad for loss in rank_losses)
            for number, gradient in rank_gradients.items():
                torch.testing.assert_close(gradient, gradients[number], rtol=1e-11, atol=1e-12)
                seen.add(number)
        assert seen == set(range(LAYERS)), schedule


def test_schedules_give_the_same_bits():
    cases = [("1f1b", 6), ("gpipe", 6)]
    for rank in run_ranks(2, _train, 2, 1, cases, torch.float32):
        (losses, gradients), (other_losses, other_gradients) = rank
        assert losses == other_losses
        assert all(torch.equal(gradients[number], other_gradients[number]) for number in gradients)


def test_bfloat16_travels_unchanged():
    # The same arithmetic in the same order on one stage and on two: any difference comes from the transfers.
    cases = [("1f1b", 4)]
    ((alone_losses, alone),) = run_ranks(1, _train, 1, 1, cases, torch.bfloat16)[0]
    ranks = run_ranks(2, _train, 2, 1, cases, torch.bfloat16)
    assert ranks[1][0][0] == alone_losses
    for ((_, gradients),) in ranks:
        assert all(torch.equal(gradient, alone[number]) for number, gradient in gradients.items())


def _recompute(pp, count):
    stage = Stage(make_state(pp=pp).group("pp"))

    def forward(microbatch, hidden):
        return checkpoint(stage.forward, microbatch, hidden, use_reentrant=False)

    stage.step("1f1b", count, forward=forward)
    return stage.gradients()


def test_recomputed_stages_give_the_same_gradients():
    _, gradients = _dense(5)
    for rank_gradients in run_ranks(2, _recompute, 2, 5):
        for number, gradient in rank_gradients.items():
            torch.testing.assert_close(gradient, gradients[number], rtol=1e-11, atol=1e-12)


def _evaluate(pp, count):
    stage = Stage(make_state(pp=pp).group("pp"))
    graphs = []

    def forward(microbatch, hidden):
        output = stage.forward(microbatch, hidden)
        graphs.append(output.requires_grad)
        return output

    losses = stage.step("1f1b", count, forward_only=True, forward=forward)
    return losses, any(graphs), [gradient for gradient in stage.gradients().values() if gradient is not None]


def test_evaluation_runs_forwards_only():
    losses, _ = _dense(5)
    ranks = run_ranks(4, _evaluate, 4, 5)
    for rank, (rank_losses, has_graph, gradients) in enumerate(ranks):
        assert not has_graph
        assert not gradients
        if rank == 3:
            torch.testing.assert_close(torch.stack(rank_losses), losses, rtol=1e-12, atol=0)
        else:
            assert rank_losses == []


def _many_iterations(pp, iterations):
    stage = Stage(make_state(pp=pp).group("pp"))
    for iteration in range(iterations):
        schedule = ("1f1b", "gpipe")[iteration % 2]
        losses = stage.step(schedule, 1 + iteration % 6, seed=iteration, forward_only=iteration % 5 == 4)
    return losses


@pytest.mark.parametrize("pp", [2, 4])
def test_two_hundred_iterations_do_not_hang(pp):
    ranks = run_ranks(pp, _many_iterations, pp, 200)
    losses, _ = _dense(1 + 199 % 6, seed=199)
    torch.testing.assert_close(torch.stack(ranks[-1]), losses, rtol=1e-12, atol=0)


class Counted(torch.autograd.Function):
    """Identity whose graph node counts as a held activation for as long as it lives."""

    @staticmethod
    def forward(ctx, hidden, tokens):
        ctx.token = Token(tokens)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Token:
    def __init__(self, counts):
        self.counts = counts
        counts["live"] += 1
        counts["peak"] = max(counts["peak"], counts["live"])

    def __del__(self):
        self.counts["live"] -= 1


def _watch_memory(pp, schedule, count):
    """Peak number of graphs alive, and how many outputs and inputs are there when they should be gone."""
    stage = Stage(make_state(pp=pp).group("pp"))
    counts = {"live": 0, "peak": 0}
    inputs, outputs, late_outputs = [], [], []

    def forward(microbatch, hidden):
        late_outputs.append(sum(not storage.expired() for storage in outputs))
        if hidden is not None:
            inputs.append(StorageWeakRef(hidden.untyped_storage()))
        output = Counted.apply(stage.forward(microbatch, hidden), counts)
        if stage.group.rank() < pp - 1:
            outputs.append(StorageWeakRef(output.untyped_storage()))
        return output

    held_inputs = []

    def count_inputs():
        held_inputs.append(sum(not storage.expired() for storage in inputs))

    stage.step(schedule, count, forward=forward, on_last_backward=count_inputs)
    count_inputs()
    return counts, late_outputs, held_inputs


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_held_longer_than_the_schedule_needs(schedule):
    pp, count = 4, 6
    for rank, (counts, late_outputs, held_inputs) in enumerate(
        run_ranks(pp, _watch_memory, pp, schedule, count)
    ):
        peak = {"1f1b": pp - rank, "gpipe": count}[schedule]
        assert counts == {"live": 0, "peak": peak}
        assert late_outputs == [0] * count  # a sent output's memory is free although its graph lives
        assert held_inputs == ([0, 0] if rank == 0 else [1, 0])


def _order_of_calls(pp, count):
    stage = Stage(make_state(pp=pp).group("pp"))
    calls = []
    for layer in stage.layers.values():
        layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("backward"))
    stage.step("1f1b", count, on_last_backward=lambda: calls.append("last"))
    return len(stage.layers), calls


def test_last_backward_is_announced_once_right_before_it():
    for layers, calls in run_ranks(2, _order_of_calls, 2, 3):
        assert calls == ["backward"] * (2 * layers) + ["last"] + ["backward"] * layers


def _fail_on(failing_rank, pp):
    stage = Stage(make_state(pp=pp).group("pp"))

    def forward(microbatch, hidden):
        if dist.get_rank() == failing_rank and microbatch == 1:
            raise ArithmeticError(f"rank {failing_rank} is unwell")
        return stage.forward(microbatch, hidden)

    stage.step("1f1b", 4, forward=forward)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_on_one_stage_ends_all(failing_rank):
    started = time.monotonic()
    with pytest.raises(Exception, match=r"is unwell|onnection (closed|reset)"):
        run_ranks(2, _fail_on, failing_rank, 2)
    assert time.monotonic() - started < 30


def _misuse():
    group = make_state().group("pp")
    weight = torch.ones(3, requires_grad=True)
    schedule = SCHEDULES["1f1b"](1, 2)

    def attempt(message, operations, output, forward_only=False):
        with pytest.raises(ValueError, match=message):
            run_pipeline(
                operations,
                forward=lambda i, x: output,
                group=group,
                activation=_spec(torch.float64),
                forward_only=forward_only,
            )

    operations = lower(schedule)[0]
    attempt(r"loss must be a scalar, but the last stage gave \(3,\)", operations, weight * 2)
    attempt("nothing to train: the output of stage 0", operations, torch.tensor(1.0))
    attempt("forward_only=True, but 2 backwards", operations, weight.sum(), forward_only=True)
    forwards = lower(schedule, forward_only=True)[0]
    attempt("forward_only=False, but 0 backwards", forwards, weight.sum())


def test_misuse_is_named():
    run_ranks(1, _misuse)


def _cut_off():
    stage = Stage(make_state(pp=2).group("pp"))

    def forward(microbatch, hidden):
        return stage.layers[4].weight.sum() if hidden is not None else stage.forward(microbatch, hidden)

    expected = {
        0: (RuntimeError, "onnection (closed|reset)"),
        1: (ValueError, "output of stage 1 does not depend on its input"),
    }
    kind, message = expected[stage.group.rank()]
    with pytest.raises(kind, match=message):
        stage.step("1f1b", 1, forward=forward)


def test_a_stage_that_ignores_its_input_is_named():
    run_ranks(2, _cut_off)


def _wrong_activation(shape, dtype):
    stage = Stage(make_state(pp=2).group("pp"))
    if stage.group.rank() == 1:
        return
    made = torch.ones(shape, dtype=dtype, requires_grad=True)
    message = (
        rf"made an activation {re.escape(str(shape))} of {dtype}, .* expects \(3, 2, 4\) of torch.float64"
    )
    with pytest.raises(ValueError, match=message):
        stage.step("1f1b", 1, forward=lambda i, x: made)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2, 5), torch.float64), ((3, 2, 4), torch.float32)])
def test_an_activation_that_the_next_stage_does_not_expect_is_refused(shape, dtype):
    run_ranks(2, _wrong_activation, shape, dtype)
