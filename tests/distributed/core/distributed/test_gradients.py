"""Sums of gradients over ranks: data parallel, tied, and partly shared."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import (
    GradientReducer,
    ParameterBuffers,
    ReplicaError,
    SharedGradients,
    check_replicas,
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
