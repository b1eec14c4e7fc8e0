"""A small model in parts, for the pipeline engine; its layers honour deferred weight gradients."""

import functools
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.pipeline_parallel.engine import run_pipeline
from megatron.core.pipeline_parallel.lowering import lower
from megatron.core.pipeline_parallel.p2p import PipelineChannels, TensorSpec
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.weight_gradients import DeferredGradients

SEQUENCE, BATCH, HIDDEN, LAYERS = 3, 2, 4, 9
SHAPE = (SEQUENCE, BATCH, HIDDEN)  # [s, b, h]


class _Linear(torch.autograd.Function):
    """hidden [s, b, h] times weight [h, h]; the weight's gradient is handed over where that is asked for."""

    @staticmethod
    def forward(ctx, hidden, weight, deferred):
        ctx.save_for_backward(hidden, weight)
        ctx.parameter, ctx.deferred = weight, deferred
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors

        def weight_gradient():
            return hidden.flatten(0, 1).T @ gradient.flatten(0, 1)

        if ctx.deferred is not None and ctx.deferred.deferring:
            ctx.deferred.put(ctx.parameter, weight_gradient)
            return gradient @ weight.T, None, None
        return gradient @ weight.T, weight_gradient(), None


class Layer(nn.Module):
    """A residual block. Its parameters depend on its number alone; the bias's gradient never waits."""

    def __init__(self, number, dtype, deferred=None):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(HIDDEN + 1, HIDDEN, dtype=torch.float64, generator=generator) / 4
        self.weight = nn.Parameter(drawn[:-1].to(dtype))
        self.bias = nn.Parameter(drawn[-1].to(dtype))
        self.deferred = deferred

    def forward(self, hidden):
        return hidden + torch.tanh(_Linear.apply(hidden, self.weight, self.deferred) + self.bias)


def microbatches(count, dtype=torch.float64, seed=100):
    """Inputs and targets, [count, 2, s, b, h]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, 2, *SHAPE), dtype=torch.float64, generator=generator).to(dtype)


def dense(count, seed=100):
    """Losses of the micro-batches and gradients by layer, from one float64 pass through the whole model."""
    weights, biases = [], []
    for number in range(LAYERS):
        layer = Layer(number, torch.float64)
        weights.append(layer.weight)
        biases.append(layer.bias)
    hidden, targets = microbatches(count, seed=seed).unbind(1)
    for weight, bias in zip(weights, biases, strict=True):
        hidden = hidden + torch.tanh(hidden @ weight + bias)
    losses = (hidden - targets).square().sum(dim=(1, 2, 3)) / count
    losses.sum().backward()
    return losses.detach(), [(w.grad, b.grad) for w, b in zip(weights, biases, strict=True)]


def layers_of(part, parts):
    """Global numbers of a part's layers: with many parts, some have none."""
    return range(-(-part * LAYERS // parts), -(-(part + 1) * LAYERS // parts))


class Case(NamedTuple):
    """A schedule by its name, and how much it has to do."""

    name: str
    chunks: int
    count: int
    """Micro-batches."""
    group_size: int | None = None


@functools.cache
def schedule_of(case, stages):
    """The schedule of a case over so many stages."""
    return build_schedule(
        case.name, stages=stages, microbatches=case.count, chunks=case.chunks, group_size=case.group_size
    )


@functools.cache
def programs_of(case, stages, forward_only=False):
    """What each stage does in a case."""
    return lower(schedule_of(case, stages), forward_only=forward_only)


class Stage:
    """This rank's chunks as a schedule places them, and what the engine needs to run them."""

    def __init__(self, state, case, dtype=torch.float64, scatter_gather=False):
        pp = state.group("pp")
        schedule = schedule_of(case, pp.size())
        self.number, self.case, self.dtype, self.data = pp.rank(), case, dtype, None
        self.channels = PipelineChannels(pp, state.pp_gradients, state.group("tp"), scatter_gather)
        self.deferred = [DeferredGradients() for _ in range(schedule.chunks)]
        self.parts = [schedule.part(self.number, chunk) for chunk in range(schedule.chunks)]
        self.last_part = schedule.last_part
        self.chunks = [
            {i: Layer(i, dtype, deferred) for i in layers_of(part, schedule.last_part + 1)}
            for part, deferred in zip(self.parts, self.deferred, strict=True)
        ]

    @property
    def layers(self):
        """All layers of this rank by their numbers."""
        return {number: layer for chunk in self.chunks for number, layer in chunk.items()}

    def forward(self, chunk, microbatch, hidden):
        """One micro-batch through one chunk."""
        inputs, targets = self.data[microbatch]
        assert (hidden is None) == (self.parts[chunk] == 0)
        hidden = inputs if hidden is None else hidden
        for layer in self.chunks[chunk].values():
            hidden = layer(hidden)
        if self.parts[chunk] < self.last_part:
            return hidden
        return (hidden - targets).square().sum() / len(self.data)

    def step(self, case=None, *, seed=100, forward_only=False, **kwargs):
        """Run one step, of another case if it places parts likewise; give what the engine gives."""
        case, stages = case or self.case, self.channels.activations.size()
        self.data = microbatches(case.count, self.dtype, seed)
        for layer in self.layers.values():
            layer.zero_grad(set_to_none=True)
        return run_pipeline(
            kwargs.pop("program", programs_of(case, stages, forward_only)[self.number]),
            schedule=kwargs.pop("schedule", schedule_of(case, stages)),
            forward=kwargs.pop("forward", self.forward),
            channels=self.channels,
            activation=TensorSpec(SHAPE, self.dtype, torch.device("cpu")),
            deferred=kwargs.pop("deferred", self.deferred),
            forward_only=forward_only,
            **kwargs,
        )

    def gradients(self):
        """Gradients of weight and bias by the number of the layer."""
        return {number: (layer.weight.grad, layer.bias.grad) for number, layer in self.layers.items()}


def cases_for(stages):
    """All kinds of schedules over so many stages, with few and with many micro-batches, even and uneven."""
    single = [Case(name, 1, count) for name in ("gpipe", "1f1b", "zb-h1") for count in (1, 2, 3, 4, 7)]
    even = [
        Case("interleaved", chunks, rounds * stages) for chunks, rounds in ((2, 1), (2, 2), (4, 1), (4, 3))
    ]
    uneven = [Case("interleaved", chunks, 2 * stages + 1, stages + 1) for chunks in (2, 4)]
    return [*single, *even, *uneven, *(Case("zb-v", 2, count) for count in (1, 2, 3, 4, 7))]


def assert_equals_dense(ranks, case, count, seed=100):
    """Assert that all ranks' losses and gradients of a case are the dense model's; on how many losses were.

    Args:
        ranks: for each rank its results by case: losses and gradients.
        case: which one.
        count: its micro-batches.
        seed: of its data.
    """
    losses, gradients = dense(count, seed)
    seen, with_losses = set(), 0
    for results in ranks:
        rank_losses, rank_gradients = results[case]
        if rank_losses:
            with_losses += 1
            torch.testing.assert_close(torch.stack(rank_losses), losses, rtol=1e-12, atol=0)
            assert not any(loss.requires_grad for loss in rank_losses)
        for number, gradient in rank_gradients.items():
            torch.testing.assert_close(gradient, gradients[number], rtol=1e-10, atol=1e-12)
            seen.add(number)
    assert seen == set(range(LAYERS))
    return with_losses
