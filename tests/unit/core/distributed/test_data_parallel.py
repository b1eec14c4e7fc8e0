"""Accumulation of gradients on one rank."""

from typing import Any

import pytest
import torch

from megatron.core.distributed import GradientReducer, ParameterBuffers, filling
from megatron.core.distributed.buffers import Strategy
from megatron.core.parameter import NamedParameter
from tests.unit.core.distributed.toy import TwoLayers, parameters, solo_group


def test_micro_batches_add_up_to_the_whole_batch():
    """Global batch 8 as 8x1, 4x2, 2x4 and 1x8 (micro-batch size x number): one gradient, to rounding."""
    x = torch.randn(8, 5, dtype=torch.float64)
    reference = TwoLayers(torch.float64)
    (reference(x).square().sum() / 8).backward()
    with solo_group() as group:
        for size in (8, 4, 2, 1):
            model = TwoLayers(torch.float64)
            buffers = ParameterBuffers(parameters(model), bucket_size=30)
            reducer = GradientReducer(buffers, group, overlap=True)
            for _ in range(2):  # the second step must not see the first
                reducer.zero_grad(8 // size)
                for part in x.split(size):
                    (model(part).square().sum() / 8).backward()
                reducer.finish()
                for name, gradient in buffers.gradients().items():
                    torch.testing.assert_close(
                        gradient, reference.get_parameter(name).grad, rtol=1e-13, atol=1e-14
                    )
                assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("chunk", [4, 1 << 20])
def test_bfloat16_gradients_add_up_in_float32(chunk: int, monkeypatch: pytest.MonkeyPatch):
    """256 gradients of 1e-3: a bfloat16 sum would stop at 0.25 (0.25 + 0.001 rounds to 0.25)."""
    monkeypatch.setattr(filling, "_CAST_CHUNK", chunk)
    with solo_group() as group:
        model = TwoLayers(torch.bfloat16)
        buffers = ParameterBuffers(parameters(model), bucket_size=None)
        reducer = GradientReducer(buffers, group, overlap=False)
        reducer.zero_grad(256)
        for _ in range(256):
            (model.first * 1e-3).sum().backward()
        reducer.finish()
        one = torch.tensor(1e-3, dtype=torch.bfloat16).double()
        gradient = buffers.gradients()["first"].double()
        assert gradient.dtype == torch.float64
        assert ((gradient - 256 * one).abs() / (256 * one)).max() < 1e-6
        assert ((gradient - 0.256).abs() / 0.256).max() < 1e-3


def test_a_parameter_without_gradient_has_a_zero_one():
    with solo_group() as group:
        model = TwoLayers(torch.float32)
        buffers = ParameterBuffers(parameters(model), bucket_size=None)
        reducer = GradientReducer(buffers, group, overlap=False)
        reducer.zero_grad(1)
        model(torch.ones(1, 5)).sum().backward()
        reducer.finish()
        assert buffers.gradients()["first"].any()
        reducer.zero_grad(1)
        model.bias.sum().backward()
        reducer.finish()
        assert not buffers.gradients()["first"].any()
        assert buffers.gradients()["bias"].tolist() == [1.0] * 7


class Later(torch.autograd.Function):
    """0 for a weight, whose gradient its backward leaves for later."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_gradients_that_come_late_or_twice_are_counted(strategy: Strategy):
    """Two chunks use one weight; the weight gradients of another wait, and come for two passes at a time."""
    with solo_group() as group:
        model = TwoLayers(torch.float32)
        entries = parameters(model)
        buffers = ParameterBuffers([*entries, entries[0]], bucket_size=1, strategy=strategy, data_group=group)
        reducer = GradientReducer(buffers, group, overlap=True)
        for _ in range(2):
            reducer.zero_grad(4)
            for microbatch in range(4):
                (model.first.sum() + model.bias.sum() + Later.apply(model.second)).backward()
                (10 * model.first.sum()).backward()
                if microbatch % 2:
                    for _ in range(2):
                        torch.autograd.backward([model.second], [torch.full_like(model.second, 100.0)])
            reducer.finish()
            found = {
                part.named.name: part.view(bucket.gradients).unique().tolist()
                for bucket in buffers.buckets
                for part in bucket.parts
            }
            assert found == {"first": [44.0], "bias": [4.0], "second": [400.0]}


def test_a_gradient_too_many_is_refused_by_name():
    with solo_group() as group:
        model = TwoLayers(torch.float32)
        reducer = GradientReducer(ParameterBuffers(parameters(model), bucket_size=None), group, overlap=False)
        reducer.zero_grad(2)
        for _ in range(2):
            model.bias.sum().backward()
        with pytest.raises(
            RuntimeError, match=r"bias got gradient number 3 .* 2 micro-batches, where 2 were"
        ):
            model.bias.sum().backward()


def test_whole_gradients_of_divided_ones_live_in_a_few_pooled_buckets():
    """20 layers of 2 x 4096 weights in buckets of one layer: never more than 3 of them, and none at rest."""
    seen = []
    with solo_group() as group:
        layers = torch.nn.Sequential(
            *(TwoLayers(torch.float32, width=64, inner=64, seed=n) for n in range(20))
        )
        entries = [
            NamedParameter(f"{number}.{named.name}", named.parameter, named.facts)
            for number, layer in enumerate(layers)
            for named in parameters(layer)
        ]
        buffers = ParameterBuffers(entries, bucket_size=8192, strategy="optim_grads", data_group=group)
        reducer = GradientReducer(buffers, group, overlap=True)
        pool = reducer._pool
        for layer in layers:
            layer.first.register_post_accumulate_grad_hook(lambda _: seen.append(pool.nbytes))
        reducer.zero_grad(2)
        for _ in range(2):
            layers(torch.randn(3, 64)).sum().backward()
        reducer.finish()
    assert len(buffers.flat_buckets) == 20
    assert max(seen) <= 3 * 4 * buffers.flat_buckets[0].size
    assert pool.nbytes == 0


def test_a_parameter_used_twice_gets_both_gradients_once():
    with solo_group() as group:
        model = TwoLayers(torch.float32)
        buffers = ParameterBuffers(parameters(model), bucket_size=None)
        reducer = GradientReducer(buffers, group, overlap=False)
        reducer.zero_grad(1)
        (3 * model.bias.sum() + 4 * model.bias.sum()).backward()
        reducer.finish()
        assert buffers.gradients()["bias"].tolist() == [7.0] * 7
