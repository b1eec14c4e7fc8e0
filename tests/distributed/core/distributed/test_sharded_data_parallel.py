"""Training with what data-parallel ranks divide among them, against PyTorch's own optimizers on one rank."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import Meter, MeteredGroup
from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed import GradientReducer, ParameterBuffers
from megatron.core.distributed.buffers import Strategy
from megatron.core.optimizer import Optimizer
from tests.harness import make_state, run_ranks
from tests.unit.core.distributed.toy import TwoLayers, parameters

STRATEGIES: tuple[Strategy, ...] = ("no_shard", "optim", "optim_grads")
CLIP, RATE, DECAY, STEPS = 0.5, 0.01, 0.1, 3


class Case(NamedTuple):
    """How one training goes."""

    strategy: Strategy
    overlap: bool = False
    bucket_size: int | None = None
    average: bool = False
    reduce_dtype: torch.dtype | None = None
    rule: str = "adam"
    micro_batches: int = 2
    gather_during_forward: bool = False


class Outcome(NamedTuple):
    """What came of it on one rank."""

    norms: list[float]
    params_norm: float
    weights: dict[str, torch.Tensor]
    traffic: dict[str, tuple[int, float]]
    """Calls and bytes by kind, of the last step."""


def batch(step: int) -> torch.Tensor:
    return (torch.arange(48, dtype=torch.float64).view(8, 6) + step).sin()


def train(case: Case, group: ProcessGroup, alone: ProcessGroup, dtype: torch.dtype) -> Outcome:
    """Some steps on a global batch of 8 rows, of which each rank of ``group`` has its share."""
    meter = Meter()
    metered = MeteredGroup(group, "dp", meter)
    model = TwoLayers(dtype, width=6)
    buffers = ParameterBuffers(
        parameters(model), bucket_size=case.bucket_size, strategy=case.strategy, data_group=metered
    )
    if case.gather_during_forward:
        buffers.gather_during_forward([model])
    reducer = GradientReducer(
        buffers, metered, overlap=case.overlap, average=case.average, reduce_dtype=case.reduce_dtype
    )
    config = OptimizerConfig(optimizer=case.rule, clip_grad=CLIP)
    optimizer = Optimizer(buffers, config, PrecisionConfig(), model_group=alone, data_group=metered)
    norms = []
    for step in range(STEPS):
        meter.take()
        mine = batch(step).chunk(group.size())[group.rank()]
        reducer.zero_grad(case.micro_batches)
        for part in mine.chunk(case.micro_batches):
            loss = model(part.to(dtype)).to(torch.float64).square().sum() / 8
            (loss * reducer.loss_factor).backward()
        reducer.finish()
        norms.append(optimizer.step(RATE, DECAY).grad_norm)
    buffers.wait_for_parameters()
    traffic = {kind: (entry.calls, entry.moved_bytes) for (_, kind), entry in meter.take().items()}
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    return Outcome(norms, optimizer.params_norm(), weights, traffic)


def dense(rule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in float64 by PyTorch's optimizer."""
    model = TwoLayers(torch.float64, width=6)
    groups: Any = [
        {"params": [model.first, model.second], "weight_decay": DECAY},
        {"params": [model.bias], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)
    if rule == "sgd":
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9, foreach=False)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step)).square().sum() / 8).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms, {name: value.detach() for name, value in model.named_parameters()}


def exact_cases() -> Iterator[Case]:
    """All of these sum the same numbers in float64."""
    for strategy, overlap, bucket_size in product(STRATEGIES, (False, True), (1, 43, None)):
        yield Case(strategy, overlap, bucket_size)
    for strategy in STRATEGIES:
        yield Case(strategy, True, 1, average=True)
        yield Case(strategy, True, 1, rule="sgd", micro_batches=1)
        yield Case(strategy, True, 1, gather_during_forward=True)


def train_all(cases: list[Case], dtype: torch.dtype) -> list[Outcome]:
    state = make_state()
    return [train(case, state.data_group, state.model_group, dtype) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_any_division_trains_as_one_rank_does(world: int):
    """Of four ranks one has nothing to update at all in the largest buckets: 3 x 64 elements over 4."""
    cases = list(exact_cases())
    references = {rule: dense(rule) for rule in ("adam", "sgd")}
    for outcomes in run_ranks(world, train_all, cases, torch.float64):
        for case, outcome in zip(cases, outcomes, strict=True):
            norms, weights = references[case.rule]
            assert outcome.norms == pytest.approx(norms, rel=1e-12), case
            total = sum(weight.square().sum().item() for weight in weights.values())
            assert outcome.params_norm == pytest.approx(total**0.5, rel=1e-12), case
            for name, weight in outcome.weights.items():
                torch.testing.assert_close(
                    weight, weights[name], rtol=1e-11, atol=1e-12, msg=f"{case} {name}"
                )


def test_sums_in_bfloat16_are_close():
    """A bfloat16 keeps 8 bits: each gradient is off by at most 2^-8 of its largest summand or so."""
    cases = [Case(strategy, True, 1, reduce_dtype=torch.bfloat16) for strategy in STRATEGIES]
    norms, weights = dense("adam")
    for outcomes in run_ranks(2, train_all, cases, torch.float32):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome.norms == pytest.approx(norms, rel=1e-2), case
            assert outcome.norms != pytest.approx(norms, rel=1e-5), case
            for name, weight in outcome.weights.items():
                # Adam moves an element by at most about the rate a step, whatever its gradient.
                assert (weight - weights[name]).abs().max() < 2 * STEPS * RATE


def test_traffic_is_what_the_papers_say():
    """A reduce-scatter is (d-1)/d 4P bytes, an all-gather (d-1)/d 2P, an all-reduce 2 (d-1)/d 4P.

    d ranks; P counts what the buckets hold: parameters of 42, 7 and 42 elements in places of 64, one bucket a
    parameter, each padded to a multiple of 64 d. (Rajbhandari et al. 2020, section 7.)
    """
    cases = [Case(strategy, True, 1, micro_batches=2) for strategy in STRATEGIES]
    cases += [case._replace(reduce_dtype=torch.bfloat16) for case in cases[:2]]
    cases += [cases[1]._replace(gather_during_forward=True, average=True)]
    for world in (2, 4):
        padded = 64 * world  # elements of a bucket
        share = (world - 1) / world
        reduce_scatter, all_gather = share * 4 * 3 * padded, share * 2 * 3 * padded
        norm = 2 * share * 3 * 8  # three float64 sums of the gradient norm
        expected = [
            # One flag over the data-parallel ranks says whether all replicas' gradients are finite.
            {"all_reduce": (3 + 1, 2 * share * (4 * 3 * 64 + 8))},
            {"reduce_scatter": (3, reduce_scatter), "all_gather": (3, all_gather), "all_reduce": (1, norm)},
            {
                "reduce_scatter": (6, 2 * reduce_scatter),
                "all_gather": (3, all_gather),
                "all_reduce": (2, norm + 2 * share * 2 * 8),  # two integers tell whether the orders agree
            },
            {"all_reduce": (3 + 1, 2 * share * (2 * 3 * 64 + 8))},
            {
                "reduce_scatter": (3, reduce_scatter / 2),
                "all_gather": (3, all_gather),
                "all_reduce": (1, norm),
            },
            {"reduce_scatter": (3, reduce_scatter), "all_gather": (3, all_gather), "all_reduce": (1, norm)},
        ]
        for outcomes in run_ranks(world, train_all, cases, torch.bfloat16):
            assert [outcome.traffic for outcome in outcomes] == expected


def uneven_backwards(strategy: Strategy) -> dict[str, list[float]] | str:
    """Twice two passes, which on one rank give gradients to other parameters than on the other."""
    group = make_state().data_group
    model = TwoLayers(torch.float32)
    buffers = ParameterBuffers(parameters(model), bucket_size=1, strategy=strategy, data_group=group)
    reducer = GradientReducer(buffers, group, overlap=True)
    for _ in range(2):
        reducer.zero_grad(2)
        for _ in range(2):
            if group.rank() == 0:
                (model.first.sum() + 2 * model.bias.sum()).backward()
            else:
                (3 * model.second.sum() + 4 * model.bias.sum()).backward()
        try:
            reducer.finish()
        except RuntimeError as error:
            return str(error)
    return {
        part.named.name: part.view(bucket.gradients).unique().tolist()
        for bucket in buffers.buckets
        for part in bucket.parts
    }


def test_ranks_whose_backwards_differ_scatter_the_same_buckets_in_order():
    # Every parameter lies in the first rank's slice: buckets of 128 elements, 64 a rank.
    assert run_ranks(2, uneven_backwards, "optim") == [{"first": [2.0], "bias": [12.0], "second": [6.0]}, {}]


def test_buckets_that_ranks_reduce_in_different_orders_are_found():
    """The first rank has no gradient of the first bucket, and so reduces it at the end of the step."""
    for message in run_ranks(2, uneven_backwards, "optim_grads"):
        assert "different orders" in message
