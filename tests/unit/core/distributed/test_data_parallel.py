"""Accumulation of gradients on one rank."""

import pytest
import torch

from megatron.core.distributed import GradientReducer, ParameterBuffers, filling
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


def test_a_parameter_used_twice_gets_both_gradients_once():
    with solo_group() as group:
        model = TwoLayers(torch.float32)
        buffers = ParameterBuffers(parameters(model), bucket_size=None)
        reducer = GradientReducer(buffers, group, overlap=False)
        reducer.zero_grad(1)
        (3 * model.bias.sum() + 4 * model.bias.sum()).backward()
        reducer.finish()
        assert buffers.gradients()["bias"].tolist() == [7.0] * 7
