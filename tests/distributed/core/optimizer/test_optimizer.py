"""One update over several ranks: one norm and one decision everywhere, the same weights in every layout."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed import GradientReducer, ParameterBuffers, SharedGradients
from megatron.core.distributed.buffers import Strategy
from megatron.core.optimizer import NonFiniteGradientError, Optimizer
from megatron.core.parallel_state import ParallelState
from megatron.core.parameter import ParameterFacts
from tests.harness import make_state, run_ranks
from tests.unit.core.distributed.toy import SHAPES, Probe, TwoLayers, parameters, whole

Steps = list[tuple[float, int | None, bool, float]]


class Engine:
    """The probe model of a layout with everything that updates it."""

    def __init__(
        self,
        state: ParallelState,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        dtype: torch.dtype = torch.float64,
        tied: bool = True,
        strategy: Strategy = "no_shard",
    ) -> None:
        self.state = state
        self.probe = Probe(state, dtype, tied=tied)
        self.buffers = ParameterBuffers(
            parameters(self.probe), bucket_size=40, strategy=strategy, data_group=state.data_group
        )
        self.reducer = GradientReducer(self.buffers, state.data_group, overlap=False)
        self.shared = SharedGradients(self.buffers, state.group("tp"), state.embedding_group)
        groups = {"model_group": state.model_group, "data_group": state.data_group}
        self.optimizer = Optimizer(self.buffers, config, precision, **groups)

    def backward(self, salt: int) -> None:
        self.reducer.zero_grad(1)
        loss = self.probe.loss(salt) / self.state.data_group.size()
        (loss * self.optimizer.loss_scale).backward()
        self.reducer.finish()
        self.shared.sum()

    def spoil(self, name: str, value: float) -> None:
        """Put a number into this rank's own gradients of a parameter, after all sums over ranks."""
        for bucket in self.buffers.buckets:
            for part in bucket.parts:
                if part.named.name == name:
                    part.view(bucket.gradients)[-1] = value


def train(
    tp: int, pp: int, tied: bool, clip: float, strategy: Strategy = "no_shard"
) -> tuple[Steps, float, list[tuple[str, torch.Tensor, ParameterFacts]]]:
    """Three Adam steps; what each returned, the norm of the weights, and this rank's weights."""
    config = OptimizerConfig(clip_grad=clip, log_num_zeros_in_grad=True)
    engine = Engine(make_state(tp, pp), config, PrecisionConfig(), tied=tied, strategy=strategy)
    steps: Steps = []
    for salt in (2, 3, 4):
        engine.backward(salt)
        result = engine.optimizer.step(0.01, 0.1)
        rate = engine.optimizer.loss_scale
        steps.append((result.grad_norm, result.num_zeros, result.updated, rate))
    weights = [(named.name, named.parameter.detach(), named.facts) for named in engine.buffers.parameters]
    return steps, engine.optimizer.params_norm(), weights


def dense_weights(clip: float) -> dict[str, torch.Tensor]:
    """The whole model after the same steps, by PyTorch's own optimizer on one process."""
    weights = {name: torch.nn.Parameter(whole(name, 1)) for name in SHAPES}
    groups = [
        {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    for salt in (2, 3, 4):
        for name, weight in weights.items():
            weight.grad = whole(name, salt)
        torch.nn.utils.clip_grad_norm_(weights.values(), clip or math.inf)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


LAYOUTS = [
    (1, 1, 1, True),
    (2, 2, 1, True),
    (4, 4, 1, True),
    (2, 1, 2, True),
    (2, 1, 2, False),
    (2, 1, 1, True),
]


SHARDED_LAYOUTS: list[tuple[int, int, int, bool, Strategy]] = [
    (4, 1, 1, True, "optim"),
    (4, 2, 1, True, "optim"),
    (4, 1, 2, True, "optim"),
    (4, 1, 2, False, "optim_grads"),
    (4, 2, 1, True, "optim_grads"),
]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "tied", "strategy"),
    [*((*layout, "no_shard") for layout in [*LAYOUTS, (4, 2, 2, True)]), *SHARDED_LAYOUTS],
)
def test_norm_clip_zeros_and_weights_do_not_depend_on_the_layout(
    world: int, tp: int, pp: int, tied: bool, strategy: Strategy
):
    gradients = [[whole(name, salt) for name in SHAPES] for salt in (2, 3, 4)]
    norms = [math.sqrt(sum(g.square().sum().item() for g in step)) for step in gradients]
    zeros = [sum(int((g == 0).sum()) for g in step) for step in gradients]
    dense = dense_weights(0.1)
    weights_norm = math.sqrt(sum(w.square().sum().item() for w in dense.values()))
    for steps, params_norm, weights in run_ranks(world, train, tp, pp, tied, 0.1, strategy):
        assert [step[0] for step in steps] == pytest.approx(norms, rel=1e-12)
        assert [step[1] for step in steps] == zeros
        assert params_norm == pytest.approx(weights_norm, rel=1e-12)
        for name, weight, facts in weights:
            expected = Probe.local(dense[name], facts, tuple(weight.shape))
            torch.testing.assert_close(weight, expected, rtol=1e-11, atol=1e-12, msg=name)


def overflow_on_one_rank(
    tp: int, pp: int, name: str, rank: int, bad: float, strategy: Strategy
) -> list[tuple[bool, float, bool]]:
    """Three fp16 steps, in the second a bad gradient on one rank: (updated, scale, weights changed)."""
    precision = PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=1, loss_scale_window=2)
    engine = Engine(make_state(tp, pp), OptimizerConfig(), precision, dtype=torch.float16, strategy=strategy)
    seen = []
    for step in range(3):
        before = [bucket.weights.clone() for bucket in engine.buffers.flat_buckets]
        engine.backward(2)
        if step == 1 and dist.get_rank() == rank:
            engine.spoil(name, bad)
        result = engine.optimizer.step(0.01, 0.1)
        after = [bucket.weights for bucket in engine.buffers.flat_buckets]
        changed = not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        seen.append((result.updated, engine.optimizer.loss_scale, changed))
    return seen


@pytest.mark.parametrize(
    ("tp", "pp", "name", "rank", "strategy"),
    [
        (1, 2, "row.weight", 1, "no_shard"),  # one stage alone
        (2, 1, "qkv.weight", 0, "no_shard"),  # one tensor-parallel rank alone
        (2, 1, "norm.weight", 1, "no_shard"),  # in a duplicate that no norm counts
        (1, 1, "norm.weight", 1, "no_shard"),  # in one data-parallel replica, after the reduction
        (1, 1, "final.weight", 0, "optim"),  # in the slice of one data-parallel rank
    ],
)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_on_one_rank_is_skipped_by_all(
    tp: int, pp: int, name: str, rank: int, strategy: Strategy, bad: float
):
    for seen in run_ranks(2, overflow_on_one_rank, tp, pp, name, rank, bad, strategy):
        assert seen == [(True, 8.0, True), (False, 4.0, False), (True, 4.0, True)]


def bad_gradient_without_scaling(tp: int, pp: int, name: str, strategy: Strategy) -> tuple[str, bool]:
    engine = Engine(make_state(tp, pp), OptimizerConfig(), PrecisionConfig(), strategy=strategy)
    engine.backward(2)
    before = [bucket.weights.clone() for bucket in engine.buffers.buckets]
    if dist.get_rank() == 1:
        engine.spoil(name, math.nan)
    message = ""
    try:
        engine.optimizer.step(0.01, 0.1)
    except NonFiniteGradientError as error:
        message = str(error)
    after = [bucket.weights for bucket in engine.buffers.buckets]
    return message, all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("tp", "pp", "name", "strategy"),
    [
        (2, 1, "row.weight", "no_shard"),
        (1, 2, "row.weight", "no_shard"),
        (1, 1, "row.weight", "no_shard"),
        (1, 1, "qkv.bias", "optim"),
    ],
)
def test_a_bad_gradient_ends_all_ranks_before_the_update(tp: int, pp: int, name: str, strategy: Strategy):
    answers = run_ranks(2, bad_gradient_without_scaling, tp, pp, name, strategy)
    assert all(unchanged for _, unchanged in answers)
    # Data-parallel replicas hold the same sums; a rank whose replica is sound says that another is not.
    replicas = tp * pp == 1 and strategy == "no_shard"
    here, there = "in another replica", f"first in {name} on rank 1"
    assert [here in answers[0][0], there in answers[1][0]] == [replicas, True]
    assert replicas or answers[0][0] == answers[1][0]


def data_parallel_training(overlap: bool, micro_batches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps on a global batch of 8 rows; norms and weights."""
    state = make_state()
    model = TwoLayers(torch.float64)
    buffers = ParameterBuffers(parameters(model), bucket_size=36)
    reducer = GradientReducer(buffers, state.data_group, overlap=overlap)
    groups = {"model_group": state.model_group, "data_group": state.data_group}
    optimizer = Optimizer(buffers, OptimizerConfig(clip_grad=0.5), PrecisionConfig(), **groups)
    norms = []
    for step in range(5):
        rows = (torch.arange(40, dtype=torch.float64).view(8, 5) + step).sin()
        mine = rows.chunk(state.data_group.size())[state.data_group.rank()]
        reducer.zero_grad(micro_batches)
        for part in mine.chunk(micro_batches):
            (model(part).square().sum() / 8).backward()
        reducer.finish()
        norms.append(optimizer.step(0.01, 0.1).grad_norm)
    return norms, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 1), (2, 4), (4, 2)])
def test_data_parallel_training_equals_one_rank_s(world: int, micro_batches: int):
    ((norms, weights),) = run_ranks(1, data_parallel_training, False, 1)
    for rank_norms, rank_weights in run_ranks(world, data_parallel_training, True, micro_batches):
        assert rank_norms == pytest.approx(norms, rel=1e-11)
        for name, weight in rank_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-10, atol=1e-11)
