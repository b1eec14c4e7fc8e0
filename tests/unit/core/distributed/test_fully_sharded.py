"""ZeRO-3 on one rank: what the store refuses, holds and hands to the optimizer."""

import pytest
import torch
from torch import nn

from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.parameter import Placement, make_parameter, replicated_facts
from tests.unit.core.distributed.toy import TwoLayers, solo_group


class Pair(nn.Module):
    """Two units, and a matrix of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.own = _parameter((5, 5), dtype)
        self.one, self.two = TwoLayers(dtype, seed=1), TwoLayers(dtype, seed=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x @ self.own))


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    parameter = make_parameter(shape, replicated_facts(shape, 0), Placement(dtype, torch.device("cpu")))
    nn.init.ones_(parameter)
    return parameter


def test_a_bucket_a_unit_with_what_decays_first():
    with solo_group() as group:
        model = Pair(torch.float64)
        store = FullyShardedStore([model], [[model.one, model.two]], group)
    layouts = [[(part.named.name, part.offset) for part in bucket.parts] for bucket in store.buckets]
    # 35, 35 and 7 elements in places of 64; the bias takes no decay.
    assert layouts == [
        [("one.first", 0), ("one.second", 64), ("one.bias", 128)],
        [("two.first", 0), ("two.second", 64), ("two.bias", 128)],
        [("own", 0)],
    ]
    assert [bucket.decay_ranges(True) for bucket in store.buckets] == [[(0, 99)], [(0, 99)], [(0, 25)]]
    assert [bucket.counted_size for bucket in store.buckets] == [77, 77, 25]
    names = ["own", *(f"{unit}.{name}" for unit in ("one", "two") for name in ("first", "bias", "second"))]
    assert [named.name for named in store.parameters] == names
    assert store.sharded
    assert store.loss_factor == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_own_weights_are_at_least_float32_and_computing_is_in_the_model_s_format(dtype: torch.dtype):
    with solo_group() as group:
        model = Pair(dtype)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        store = FullyShardedStore([model], [[model.one, model.two]], group)
        store.zero_grad(1)
        output = model(torch.ones(3, 5, dtype=dtype))
        assert output.dtype == dtype
        output.sum().backward()
        store.finish()
    wide = torch.promote_types(dtype, torch.float32)
    for bucket in store.buckets:
        assert bucket.weights.dtype == bucket.gradients.dtype == wide
        for part in bucket.parts:
            assert torch.equal(part.view(bucket.weights), before[part.named.name].flatten().to(wide))
            assert part.view(bucket.gradients).any()


def test_what_is_written_to_a_bucket_is_seen_after_publishing():
    with solo_group() as group, torch.no_grad():
        model = Pair(torch.float64)
        store = FullyShardedStore([model], [[model.one, model.two]], group)
        x = torch.ones(3, 5, dtype=torch.float64)
        before, without = model(x), model(torch.zeros_like(x))
        store.buckets[-1].weights.zero_()  # the root's, which stays whole after a forward
        store.publish()
        store.wait_for_parameters()
        assert not torch.equal(before, without)
        assert torch.equal(model(x), without)


def test_a_gradient_that_went_elsewhere_is_noticed():
    with solo_group() as group:
        model = Pair(torch.float64)
        store = FullyShardedStore([model], [[model.one, model.two]], group)
        store.zero_grad(1)
        model.zero_grad(set_to_none=True)
        model(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
        with pytest.raises(AssertionError, match="went elsewhere"):
            store.finish()


def test_split_backwards_are_refused_by_name():
    model = Pair(torch.float64)
    with (
        solo_group() as group,
        pytest.raises(ValueError, match="--pipeline-schedule zb-h1 and zb-v") as caught,
    ):
        FullyShardedStore([model], [[model.one, model.two]], group, splits_backward=True)
    assert "--data-parallel-sharding-strategy optim_grads_params" in str(caught.value)
    assert type(model) is Pair, "nothing is divided yet"


def test_a_parameter_of_two_chunks_is_refused_by_name():
    first, last = Pair(torch.float64), Pair(torch.float64)
    last.own = first.own
    with solo_group() as group, pytest.raises(ValueError, match="share own") as caught:
        FullyShardedStore([first, last], [[], []], group)
    assert "--untie-embeddings-and-output-weights" in str(caught.value)
    assert type(first) is Pair, "nothing is divided yet"


def test_a_chunk_without_parameters_takes_part():
    with solo_group() as group:
        model, empty = Pair(torch.float64), nn.Identity()
        store = FullyShardedStore([empty, model], [[], [model.one, model.two]], group)
        store.zero_grad(1)
        model(empty(torch.ones(3, 5, dtype=torch.float64))).sum().backward()
        store.finish()
        assert all(bucket.gradients.any() for bucket in store.buckets)
        with pytest.raises(ValueError, match="no parameter"):
            FullyShardedStore([nn.Identity()], [[]], group)
