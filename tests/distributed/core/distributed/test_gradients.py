"""Sums of gradients over ranks: data parallel, tied, and partly shared."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.communication import Meter, MeteredGroup
from megatron.core.distributed import (
    GradientReducer,
    ParameterBuffers,
    ReplicaError,
    SharedGradients,
    check_replicas,
)
from megatron.core.distributed.buffers import Strategy
from megatron.core.parameter import (
    NamedParameter,
    ParameterFacts,
    Piece,
    Placement,
    make_parameter,
    replicated_facts,
)
from tests.harness import make_state, run_ranks
from tests.unit.core.distributed.toy import Probe, TwoLayers, parameters, whole


def accumulate(overlap: bool, bucket_size: int | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Gradients after two micro-batches of this rank's share of 8 rows, and what happened in which order."""
    state = make_state()
    model = TwoLayers(torch.float64)
    buffers = ParameterBuffers(parameters(model), bucket_size=bucket_size)
    reducer = GradientReducer(buffers, state.data_group, overlap=overlap)
    events: list[str] = []
    plain = dist.all_reduce

    def spy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append(f"reduce {tensor.numel()}")
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = spy
    rows = torch.arange(40, dtype=torch.float64).view(8, 5).sin()
    mine = rows.chunk(state.data_group.size())[state.data_group.rank()]
    reducer.zero_grad(2)
    first, last = mine.chunk(2)
    (model(first).square().sum() / 8).backward()
    events.append("last")
    (model(last).square().sum() / 8).backward()
    events.append("finish")
    reducer.finish()
    dist.all_reduce = plain
    return {name: gradient.clone() for name, gradient in buffers.gradients().items()}, events


@pytest.mark.parametrize("world", [2, 4])
def test_data_parallel_gradients_equal_one_rank_s(world: int):
    reference = TwoLayers(torch.float64)
    (reference(torch.arange(40, dtype=torch.float64).view(8, 5).sin()).square().sum() / 8).backward()
    late = run_ranks(world, accumulate, False, 36)
    early = run_ranks(world, accumulate, True, 36)
    for rank in range(world):
        for name, gradient in late[rank][0].items():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-13)
            assert torch.equal(gradient, late[0][0][name])
            assert torch.equal(gradient, early[rank][0][name])
    # second (35 -> 64) and bias (7 -> 64) fill one bucket, first (35 -> 64) the other.
    assert late[0][1] == ["last", "finish", "reduce 128", "reduce 64"]
    assert early[0][1] == ["last", "reduce 128", "reduce 64", "finish"]


def uneven_backward() -> dict[str, torch.Tensor]:
    """The last backward of one rank reaches other parameters than that of the other."""
    state = make_state()
    model = TwoLayers(torch.float32)
    buffers = ParameterBuffers(parameters(model), bucket_size=1)
    reducer = GradientReducer(buffers, state.data_group, overlap=True)
    for _ in range(2):
        reducer.zero_grad(1)
        if state.data_group.rank() == 0:
            (model.first.sum() + 2 * model.bias.sum()).backward()
        else:
            (3 * model.second.sum() + 4 * model.bias.sum()).backward()
        reducer.finish()
    return buffers.gradients()


def test_ranks_whose_backwards_differ_reduce_the_same_buckets_in_order():
    for gradients in run_ranks(2, uneven_backward):
        assert gradients["first"].unique().tolist() == [1.0]
        assert gradients["bias"].unique().tolist() == [6.0]
        assert gradients["second"].unique().tolist() == [3.0]


def backward_too_many() -> str:
    state = make_state()
    model = TwoLayers(torch.float32)
    reducer = GradientReducer(
        ParameterBuffers(parameters(model), bucket_size=1), state.data_group, overlap=True
    )
    reducer.zero_grad(1)
    model.bias.sum().backward()
    try:
        model.bias.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_more_gradients_than_were_to_come_are_refused():
    for message in run_ranks(2, backward_too_many):
        assert "bias got gradient number 2" in message


def shared_sums(tp: int, pp: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each of this rank's parameters: its gradient, and its part of the whole one."""
    state = make_state(tp, pp)
    probe = Probe(state, torch.float64)
    buffers = ParameterBuffers(parameters(probe), bucket_size=None)
    reducer = GradientReducer(buffers, state.data_group, overlap=False)
    shared = SharedGradients(buffers, state.group("tp"), state.embedding_group)
    found = {}
    for salt in (2, 3):  # the second step must not see the first
        reducer.zero_grad(1)
        (probe.loss(salt) / state.data_group.size()).backward()
        reducer.finish()
        shared.sum()
        for named in buffers.parameters:
            expected = Probe.local(whole(named.name, salt), named.facts, tuple(named.parameter.shape))
            found[f"{named.name} {salt}"] = (buffers.gradients()[named.name].clone(), expected)
    return found


@pytest.mark.parametrize(("world", "tp", "pp"), [(2, 1, 2), (4, 2, 2), (4, 4, 1), (4, 1, 2)])
def test_tied_and_partly_shared_gradients_become_whole(world: int, tp: int, pp: int):
    for rank, found in enumerate(run_ranks(world, shared_sums, tp, pp)):
        assert len(found) >= 6
        for name, (gradient, expected) in found.items():
            torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-14, msg=f"{rank} {name}")


SHAPES = {"qkv.weight": (5, 100), "bias": (6,), "norm.weight": (70,)}


def gradient_of(name: str, tp_rank: int, replica: int) -> torch.Tensor:
    """What a rank's backward gives: that of "bias" is whole on each, that of "norm.weight" a part."""
    seed = 100 * list(SHAPES).index(name) + 10 * replica + (0 if name == "bias" else tp_rank)
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sums_of_slices(strategy: Strategy) -> tuple[list[tuple[str, int, torch.Tensor]], list[tuple[int, float]]]:
    """Name, start and values of each part that this rank keeps; calls and bytes over tp of two steps."""
    state = make_state(tp=2)
    rank, meter = state.rank("tp"), Meter()
    float64 = Placement(torch.float64, torch.device("cpu"))
    module = torch.nn.Module()
    facts = {
        # 3 query rows of its own, and 2 key and value rows that both ranks hold.
        "qkv.weight": ParameterFacts((8, 100), 0, (Piece(0, 3 * rank, 3), Piece(3, 6, 2, rank == 0)), None),
        "bias": replicated_facts((6,), rank),
        "norm.weight": replicated_facts((70,), rank, partial_over_tp=True),
    }
    named = [
        NamedParameter(name, make_parameter(SHAPES[name], facts[name], float64), facts[name])
        for name in SHAPES
    ]
    for one in named:
        torch.nn.init.ones_(one.parameter)
        module.register_parameter(one.name.replace(".", "_"), one.parameter)
    buffers = ParameterBuffers(named, bucket_size=None, strategy=strategy, data_group=state.data_group)
    reducer = GradientReducer(buffers, state.data_group, overlap=False)
    shared = SharedGradients(buffers, MeteredGroup(state.group("tp"), "tp", meter), None)
    meter.take()
    traffic = []
    for _ in range(2):
        reducer.zero_grad(1)
        for one in named:
            one.parameter.backward(gradient_of(one.name, rank, state.data_group.rank()))
        reducer.finish()
        shared.sum()
        traffic += [(entry.calls, entry.moved_bytes) for entry in meter.take().values()]
    parts = [(part, bucket) for bucket in buffers.buckets for part in bucket.parts]
    return [
        (part.named.name, part.start, part.view(bucket.gradients).clone()) for part, bucket in parts
    ], traffic


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_shared_and_partial_gradients_of_slices_are_sums(strategy: Strategy):
    """Of two data-parallel ranks one has 384 elements of qkv, the other the last 116, bias and norm."""
    expected = {}
    for tp_rank in range(2):
        for name in SHAPES:
            expected[name, tp_rank] = sum(gradient_of(name, tp_rank, replica) for replica in range(2))
    expected["norm.weight", 0] = expected["norm.weight", 1] = (
        expected["norm.weight", 0] + expected["norm.weight", 1]
    )
    rows = expected["qkv.weight", 0][3:] + expected["qkv.weight", 1][3:]
    expected["qkv.weight", 0][3:] = expected["qkv.weight", 1][3:] = rows
    found: dict[tuple[str, int], int] = {}
    elements = 0.0
    for rank, (parts, traffic) in enumerate(run_ranks(4, sums_of_slices, strategy)):
        for name, start, values in parts:
            right = expected[name, rank % 2].flatten()[start : start + values.numel()]
            torch.testing.assert_close(values, right, rtol=1e-14, atol=1e-14)
            found[name, rank % 2] = found.get((name, rank % 2), 0) + values.numel()
        assert [calls for calls, _ in traffic] == [1, 1]
        elements += traffic[0][1] / 8  # on a ring of two each rank sends as much as there is
    copies = 2 if strategy == "no_shard" else 1
    assert found == {(name, rank): copies * expected[name, rank].numel() for name, rank in expected}
    assert elements == 2 * copies * (200 + 70)


def compare_replicas(tp: int, odd_rank: int | None) -> str:
    state = make_state(tp)
    probe = Probe(state, torch.bfloat16)
    if odd_rank == dist.get_rank():
        with torch.no_grad():  # the same numbers in another order
            probe.get_parameter("row.weight").copy_(probe.get_parameter("row.weight").flip(0).clone())
            probe.get_parameter("final.weight")[0] += 0.01
    buffers = ParameterBuffers(parameters(probe), bucket_size=None)
    try:
        check_replicas(buffers, state.data_group, state.group("tp"))
    except ReplicaError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_that_start_different_are_found(tp: int):
    assert run_ranks(4, compare_replicas, tp, None) == ["equal"] * 4
    answers = run_ranks(4, compare_replicas, tp, 3)
    concerned = [rank for rank in range(4) if rank % tp == 3 % tp]
    for rank, answer in enumerate(answers):
        if rank in concerned:
            assert f"row.weight on ranks [3] is not what it is on rank {concerned[0]}" in answer
            assert "2 of 7 parameters differ" in answer
        elif rank == 2:  # the tensor-parallel peer of rank 3: it sees what both hold whole
            assert "final.weight[0:4] on ranks [3] is not what it is on rank 2" in answer
        else:
            assert answer == "equal"
