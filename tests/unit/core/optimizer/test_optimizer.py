"""The whole update on one rank: against PyTorch's optimizers, and what it refuses, skips and saves."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.distributed import ProcessGroup

from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed import GradientReducer, ParameterBuffers
from megatron.core.optimizer import LossScaleError, NonFiniteGradientError, Optimizer
from megatron.core.optimizer.grad_norm import clip_coefficient, sum_of_squares
from tests.unit.core.distributed.toy import TwoLayers, parameters, solo_group

ADAM = OptimizerConfig(adam_beta2=0.95, log_num_zeros_in_grad=True)


class Engine:
    """Model, buffers, reducer and optimizer of one rank."""

    def __init__(
        self,
        group: ProcessGroup,
        dtype: torch.dtype = torch.float64,
        config: OptimizerConfig = ADAM,
        precision: PrecisionConfig | None = None,
    ) -> None:
        self.model = TwoLayers(dtype)
        self.buffers = ParameterBuffers(parameters(self.model), bucket_size=40)
        self.reducer = GradientReducer(self.buffers, group, overlap=False)
        precision = precision or PrecisionConfig()
        self.optimizer = Optimizer(self.buffers, config, precision, model_group=group, data_group=group)

    def backward(self, x: torch.Tensor) -> None:
        self.reducer.zero_grad(1)
        loss = self.model(x.to(self.model.first.dtype)).to(torch.float64).square().mean()
        (loss * self.optimizer.loss_scale).backward()
        self.reducer.finish()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_equals_pytorch_s_optimizer_in_float64(kind: str, clip: float):
    config = OptimizerConfig(optimizer=kind, clip_grad=clip)
    reference = TwoLayers(torch.float64)
    matrices = [reference.first, reference.second]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [reference.bias], "weight_decay": 0.0},
    ]
    theirs: torch.optim.Optimizer = torch.optim.AdamW(groups, foreach=False)
    if kind == "sgd":
        theirs = torch.optim.SGD(groups, momentum=0.9, foreach=False)
    with solo_group() as group:
        ours = Engine(group, config=config)
        for step in range(5):
            x = torch.randn(3, 5, dtype=torch.float64)
            rate = 0.01 * (step + 1)
            ours.backward(x)
            result = ours.optimizer.step(rate, 0.1)
            theirs.zero_grad()
            reference(x).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
            for entry in theirs.param_groups:
                entry["lr"] = rate
            theirs.step()
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
            assert result.updated
            for name, weight in ours.weights().items():
                torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-11, atol=1e-12)


def test_bfloat16_model_follows_its_float32_main_weights():
    """Updates far below bfloat16's resolution add up in the main weights: 100 x 1e-4 moves by 1e-2."""
    with solo_group() as group:
        engine = Engine(group, torch.bfloat16, replace(ADAM, clip_grad=0.0))
        start = engine.model.first.detach().float()
        for _ in range(100):
            engine.reducer.zero_grad(1)
            engine.model.first.sum().backward()
            engine.reducer.finish()
            engine.optimizer.step(1e-4, 0.0)
        (moved,) = [
            part.values.view(part.named.parameter.shape)
            for part in engine.optimizer.state_tensors()["main"]
            if part.named.name == "first"
        ]
        assert moved.dtype == torch.float32
        # Adam with a constant gradient moves by the learning rate each step; each rounds by at most half a
        # unit in the last place of numbers below 4.
        assert start.abs().max() < 4
        torch.testing.assert_close(moved, start - 0.01, rtol=0, atol=100 * 2.0**-23)
        assert torch.equal(engine.model.first, moved.bfloat16())


def test_zeros_are_counted_without_gaps():
    with solo_group() as group:
        engine = Engine(group)
        engine.reducer.zero_grad(1)
        (engine.model.first[0, :2].sum() + engine.model.bias.sum()).backward()
        engine.reducer.finish()
        # first: 35 elements, 2 with gradient; bias: 7, all; second: 35, none.
        result = engine.optimizer.step(0.0, 0.0)
        assert result.num_zeros == 33 + 35
        assert result.grad_norm == pytest.approx(3.0)


def test_a_batch_without_any_counted_token_changes_nothing_but_by_decay():
    """All losses masked: the loss is 0 times something, gradients are zero, and nothing becomes NaN."""
    with solo_group() as group:
        engine = Engine(group)
        before = engine.weights()
        engine.reducer.zero_grad(1)
        (engine.model(torch.ones(2, 5, dtype=torch.float64)) * 0.0).sum().backward()
        engine.reducer.finish()
        result = engine.optimizer.step(0.5, 0.1)
        assert (result.grad_norm, result.num_zeros, result.updated) == (0.0, 77, True)
        after = engine.weights()
        assert torch.equal(after["bias"], before["bias"])
        torch.testing.assert_close(after["first"], before["first"] * 0.95, rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_gradient_ends_the_run_before_the_update_or_is_skipped(bad: float):
    with solo_group() as group:
        engine = Engine(group)
        engine.backward(torch.ones(1, 5))
        engine.buffers.gradients()["bias"][3] = bad
        before = engine.weights()
        with pytest.raises(NonFiniteGradientError, match=r"first in bias.*--skip-nan-iterations"):
            engine.optimizer.step(0.1, 0.1)
        assert all(torch.equal(value, before[name]) for name, value in engine.weights().items())
        assert engine.optimizer.state_dict()["steps"] == 0

        engine = Engine(group, config=replace(ADAM, skip_nan_iterations=True))
        engine.backward(torch.ones(1, 5))
        engine.buffers.gradients()["bias"][3] = bad
        result = engine.optimizer.step(0.1, 0.1)
        assert (result.updated, result.found_inf) == (False, True)
        assert all(torch.equal(value, before[name]) for name, value in engine.weights().items())


def test_loss_scale_is_taken_out_and_moves_on_overflow():
    precision = PrecisionConfig(fp16=True, initial_loss_scale=2.0**10, hysteresis=1, max_consecutive_skips=2)
    with solo_group() as group:
        plain = Engine(group, torch.float32)
        scaled = Engine(group, torch.float32, precision=precision)
        x = torch.randn(2, 5)
        for engine in (plain, scaled):
            engine.backward(x)
        results = [engine.optimizer.step(0.01, 0.1) for engine in (plain, scaled)]
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
        for name, weight in plain.weights().items():
            torch.testing.assert_close(weight, scaled.weights()[name], rtol=1e-5, atol=1e-6)
        before = scaled.weights()
        for expected in [2.0**power for power in range(9, -1, -1)]:
            scaled.backward(x)
            scaled.buffers.gradients()["first"][0, 0] = math.inf
            assert not scaled.optimizer.step(0.01, 0.1).updated
            assert scaled.optimizer.loss_scale == expected
        assert all(torch.equal(value, before[name]) for name, value in scaled.weights().items())
        scaled.backward(x)
        scaled.buffers.gradients()["first"].fill_(math.nan)
        scaled.optimizer.step(0.01, 0.1)
        with pytest.raises(LossScaleError, match=r"minimum 1\.0"):
            scaled.optimizer.step(0.01, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_state_resumes_bit_for_bit(dtype: torch.dtype):
    batches = torch.randn(6, 3, 5).unbind()
    precision = PrecisionConfig(loss_scale=4.0)
    with solo_group() as group:
        straight = Engine(group, dtype, precision=precision)
        resumed = Engine(group, dtype, precision=precision)
        for x in batches[:3]:
            straight.backward(x)
            straight.optimizer.step(0.01, 0.1)
        expected = {"exp_avg", "exp_avg_sq"} | ({"main"} if dtype == torch.bfloat16 else set())
        saved, target = straight.optimizer.state_tensors(), resumed.optimizer.state_tensors()
        assert saved.keys() == target.keys() == expected
        for kind, entries in saved.items():
            for source, sink in zip(entries, target[kind], strict=True):
                assert source.named.name == sink.named.name
                assert (source.start, source.values.numel()) == (0, source.named.parameter.numel())
                assert source.values.dtype == torch.float32
                sink.values.copy_(source.values)
        if dtype == torch.float32:
            resumed.model.load_state_dict(straight.model.state_dict())
        resumed.optimizer.load_state_dict(json.loads(json.dumps(straight.optimizer.state_dict())))
        resumed.optimizer.sync_model_weights()
        for x in batches[3:]:
            for engine in (straight, resumed):
                engine.backward(x)
            results = [engine.optimizer.step(0.01, 0.1) for engine in (straight, resumed)]
            assert results[0] == results[1]
        assert straight.optimizer.params_norm() == resumed.optimizer.params_norm()
        for name, weight in straight.weights().items():
            assert torch.equal(weight, resumed.weights()[name])


def test_bad_scalar_state_is_refused():
    with solo_group() as group:
        engine = Engine(group, precision=PrecisionConfig(fp16=True))
        with pytest.raises(ValueError, match="steps: None"):
            engine.optimizer.load_state_dict({})
        with pytest.raises(ValueError, match="loss scale"):
            engine.optimizer.load_state_dict({"steps": 3, "scaler": {"scale": math.inf}})


def test_sum_of_squares_keeps_its_digits():
    """A single float32 sum over these many elements is off by more than 1e-4."""
    flat = torch.rand(5_000_001) + 0.5
    exact = flat.double().square().sum().item()
    assert sum_of_squares(flat).item() == pytest.approx(exact, rel=1e-7)


def test_clip_coefficient():
    assert clip_coefficient(2.0, 0.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(1 / 4.000001, rel=1e-12)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 18), (torch.float32, 16)])
def test_model_state_bytes_per_parameter(dtype: torch.dtype, expected: int):
    """bf16: weight 2 + gradient 4 + main weight 4 + moments 8; float32: weight 4 + gradient 4 + moments 8."""
    with solo_group() as group:
        model = TwoLayers(dtype, width=64, inner=64)  # no gaps: all sizes are multiples of 64
        buffers = ParameterBuffers(parameters(model), bucket_size=None)
        config, precision = OptimizerConfig(), PrecisionConfig()
        optimizer = Optimizer(buffers, config, precision, model_group=group, data_group=group)
        tensors = [part.values for parts in optimizer.state_tensors().values() for part in parts]
        tensors += [*model.parameters(), *buffers.gradients().values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(storages.values()) == expected * (2 * 64 * 64 + 64)
