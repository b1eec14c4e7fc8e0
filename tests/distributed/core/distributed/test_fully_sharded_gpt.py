"""ZeRO-3 under a real GPT in every layout: three steps are those of plain float64 algebra on one process."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from megatron.core.config import OptimizerConfig, PrecisionConfig, TransformerConfig
from megatron.core.context_parallel import take_local
from megatron.core.distributed import SharedGradients
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.models import ModelStage
from megatron.core.optimizer import Optimizer
from megatron.core.parameter import ParameterFacts, Placement
from megatron.core.pipeline_parallel.engine import run_pipeline
from megatron.core.pipeline_parallel.lowering import lower
from megatron.core.pipeline_parallel.p2p import PipelineChannels, TensorSpec
from megatron.core.pipeline_parallel.schedules import build_schedule
from tests.harness import make_state, run_ranks
from tests.unit.core.models import dense_gpt
from tests.unit.core.models.shapes import (
    FLOAT64,
    STREAM,
    batch,
    build,
    gpt2_shape,
    llama_shape,
    over,
    true_weights,
)

ROWS = 8  # sequences of a global batch
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}
RATE, DECAY, CLIP = 0.01, 0.1, 0.5
Slice = tuple[str, ParameterFacts, torch.Size, int, torch.Tensor]
"""Name, facts and local shape of a parameter; first element and values of a rank's share."""


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work; the data-parallel ranks are what is left."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False


class Trainer:
    """One rank's part of a model, trained as a run does it."""

    def __init__(self, config: TransformerConfig, layout: Layout, placement: Placement = FLOAT64) -> None:
        self.config, self.layout, self.dtype = config, layout, placement.dtype
        self.state = make_state(layout.tp, layout.pp, layout.cp)
        self.microbatches = ROWS // self.state.size("dp")
        self.schedule = build_schedule(
            layout.schedule, stages=layout.pp, microbatches=self.microbatches, chunks=layout.chunks
        )
        self.program = lower(self.schedule)[self.state.rank("pp")]
        parts = layout.pp * layout.chunks
        edges = [part * config.num_layers // parts for part in range(parts + 1)]
        stages = [
            ModelStage(range(first, last), first == 0, last == config.num_layers)
            for first, last in pairwise(edges)
        ]
        parallel = over(
            self.state.group("tp"), self.state.group("cp"), sequence_parallel=layout.sequence_parallel
        )
        own = [self.schedule.part(self.state.rank("pp"), chunk) for chunk in range(layout.chunks)]
        self.chunks = [build(config, placement, stages[part], parallel) for part in own]
        self.store = FullyShardedStore(
            self.chunks, [list(chunk.decoder.layers.values()) for chunk in self.chunks], self.state.data_group
        )
        self.shared = SharedGradients(self.store, self.state.group("tp"), self.state.embedding_group)
        groups = {"model_group": self.state.model_group, "data_group": self.state.data_group}
        self.optimizer = Optimizer(self.store, OptimizerConfig(clip_grad=CLIP), PrecisionConfig(), **groups)

    def step(self, data: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Gradient norm, and the sum of this rank's losses, of one step over a global batch."""
        count = data["loss_mask"].sum()
        losses = []

        def forward(chunk: int, microbatch: int, hidden_states: torch.Tensor | None) -> torch.Tensor:
            row = microbatch * self.state.size("dp") + self.state.rank("dp")
            local = {
                name: take_local(values[row : row + 1], 1, self.state.group("cp"))
                for name, values in data.items()
            }
            output = self.chunks[chunk](**local, hidden_states=hidden_states, stream=STREAM)
            if output.dim():
                return output
            losses.append(output.item())
            return output / count

        tokens = self.config.seq_length // self.layout.cp
        if self.layout.sequence_parallel:
            tokens //= self.layout.tp
        self.store.zero_grad(self.microbatches)
        run_pipeline(
            self.program,
            schedule=self.schedule,
            forward=forward,
            channels=PipelineChannels(
                self.state.group("pp"), self.state.pp_gradients, self.state.group("tp")
            ),
            activation=TensorSpec((tokens, 1, self.config.hidden_size), self.dtype, torch.device("cpu")),
        )
        self.store.finish()
        self.shared.sum()
        return self.optimizer.step(RATE, DECAY).grad_norm, sum(losses)

    def slices(self) -> list[Slice]:
        """What this rank holds of the weights."""
        return [
            (
                part.named.name,
                part.named.facts,
                part.named.parameter.shape,
                part.start,
                part.view(bucket.weights).clone(),
            )
            for bucket in self.store.buckets
            for part in bucket.parts
        ]


Steps = list[tuple[float, float]]
"""Gradient norm and sum of losses of each step."""


def train(config: TransformerConfig, layouts: list[Layout]) -> list[tuple[Steps, float, list[Slice]]]:
    """Three steps in each layout; then the norm of the weights, and this rank's share of them."""
    found = []
    for layout in layouts:
        trainer = Trainer(config, layout)
        steps = [trainer.step(batch(config, ROWS)) for _ in range(3)]
        found.append((steps, trainer.optimizer.params_norm(), trainer.slices()))
    return found


def dense_training(config: TransformerConfig) -> tuple[Steps, dense_gpt.Weights]:
    """The same by plain algebra and PyTorch's own optimizer."""
    weights = true_weights(build(config))
    groups = [
        {
            "params": [weight for weight in weights.values() if (weight.dim() > 1) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)
    data = batch(config, ROWS)
    steps = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = dense_gpt.loss_sum(config, weights, **data)
        (loss / data["loss_mask"].sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        steps.append((norm.item(), loss.item()))
        optimizer.step()
    return steps, weights


def share_of(whole: torch.Tensor, facts: ParameterFacts, shape: torch.Size) -> torch.Tensor:
    """A rank's local tensor, flattened; padding is zero."""
    local = torch.zeros(shape, dtype=whole.dtype)
    for piece in facts.pieces:
        local.narrow(facts.dim, piece.local, piece.length).copy_(
            whole.narrow(facts.dim, piece.start, piece.length)
        )
    return local.flatten()


@pytest.mark.parametrize(
    ("config", "world", "layouts"),
    [
        (gpt2_shape(num_layers=3, **RECOMPUTED), 2, [Layout()]),
        (
            llama_shape(num_query_groups=1, seq_length=8, num_layers=4),
            4,
            [Layout(tp=2, sequence_parallel=True), Layout(cp=2)],
        ),
        (
            gpt2_shape(seq_length=8, num_layers=4),
            4,
            [Layout(pp=2), Layout(pp=2, schedule="interleaved", chunks=2), Layout(tp=2)],
        ),
    ],
    ids=["with layers run again", "with sequence and context parallel", "tied over pipeline stages"],
)
def test_three_steps_of_a_gpt_are_those_of_dense_algebra(config, world, layouts):
    dense_steps, weights = dense_training(config)
    norms, losses = zip(*dense_steps, strict=True)
    weights_norm = sum(weight.detach().square().sum().item() for weight in weights.values()) ** 0.5
    ranks = run_ranks(world, train, config, layouts)
    for number, layout in enumerate(layouts):
        summed = [sum(rank[number][0][step][1] for rank in ranks) / layout.tp for step in range(3)]
        assert summed == pytest.approx(losses, rel=1e-11), layout
        for steps, params_norm, slices in (rank[number] for rank in ranks):
            assert [norm for norm, _ in steps] == pytest.approx(norms, rel=1e-11), layout
            assert params_norm == pytest.approx(weights_norm, rel=1e-12), layout
            for name, facts, shape, start, held in slices:
                expected = share_of(weights[name].detach(), facts, shape)[start : start + held.numel()]
                torch.testing.assert_close(held, expected, rtol=0, atol=1e-10, msg=f"{layout}: {name}")
        held_names = {name for rank in ranks for name, *_ in rank[number][2]}
        assert held_names == weights.keys(), layout


def bfloat16_losses(config: TransformerConfig) -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """The loss of three steps; the formats of the weights that a layer computes with, and of the buckets."""
    trainer = Trainer(config, Layout(), Placement(torch.bfloat16, torch.device("cpu")))
    used = set()

    def watch(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        used.update(parameter.dtype for parameter in layer.parameters())

    for layer in trainer.chunks[0].decoder.layers.values():
        layer.register_forward_pre_hook(watch)
    losses = [trainer.step(batch(config, ROWS))[1] for _ in range(3)]
    return losses, used, {bucket.weights.dtype for bucket in trainer.store.buckets}


def test_bfloat16_layers_with_float32_main_weights_learn_like_float64_ones():
    config = gpt2_shape(**RECOMPUTED)
    ranks = run_ranks(2, bfloat16_losses, config)
    assert [rank[1:] for rank in ranks] == [({torch.bfloat16}, {torch.float32})] * 2
    losses = [sum(step) for step in zip(*(rank[0] for rank in ranks), strict=True)]
    assert losses == pytest.approx([loss for _, loss in dense_training(config)[0]], rel=0.01)
