"""The update rules against formulas in float64."""

import pytest
import torch

from megatron.core.optimizer.update_rules import SGD, AdamW, FlatState


def run_of(dtype: torch.dtype, names: tuple[str, ...]) -> FlatState:
    torch.manual_seed(1)
    weights = torch.randn(1000, dtype=dtype)
    moments = {name: torch.zeros_like(weights) for name in names}
    return FlatState(weights, torch.zeros_like(weights), moments)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_adamw(dtype: torch.dtype, tolerance: float):
    rule = AdamW(0.9, 0.95, 1e-8)
    run = run_of(dtype, rule.moment_names)
    p, m, v = run.weights.double().clone(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in range(1, 6):
        run.gradients.copy_(torch.randn(1000))
        g = run.gradients.double()
        rule.apply([run], steps=step - 1, learning_rate=1e-2, weight_decay=0.1)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        p = p * (1 - 1e-2 * 0.1)
        p = p - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(run.weights.double(), p, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(run.moments["exp_avg_sq"].double(), v, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_sgd(dtype: torch.dtype, tolerance: float):
    rule = SGD(0.9)
    run = run_of(dtype, rule.moment_names)
    p, u = run.weights.double().clone(), torch.zeros(1000).double()
    for step in range(5):
        run.gradients.copy_(torch.randn(1000))
        u = 0.9 * u + run.gradients.double() + 0.1 * p
        p = p - 1e-2 * u
        rule.apply([run], steps=step, learning_rate=1e-2, weight_decay=0.1)
        torch.testing.assert_close(run.weights.double(), p, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(run.moments["momentum"].double(), u, rtol=tolerance, atol=tolerance)
