"""Update rules on flat tensors: PyTorch's fused kernels, on state that the optimizer owns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.config import OptimizerConfig


@dataclass(frozen=True)
class FlatState:
    """A flat run of parameters that one rule updates alike."""

    weights: torch.Tensor
    """[n] main weights."""
    gradients: torch.Tensor
    """[n] gradients, in the weights' dtype."""
    moments: dict[str, torch.Tensor]
    """[n] each, under the names that the rule gives."""


class UpdateRule(Protocol):
    """How weights follow from gradients."""

    moment_names: ClassVar[tuple[str, ...]]
    """The tensors of state that the rule keeps for each parameter; zero at first."""

    def apply(
        self, runs: Sequence[FlatState], *, steps: int, learning_rate: float, weight_decay: float
    ) -> None:
        """Update weights and moments in place; ``steps`` updates came before this one."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay: p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps), bias-corrected.

    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """

    beta1: float
    beta2: float
    eps: float
    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def apply(
        self, runs: Sequence[FlatState], *, steps: int, learning_rate: float, weight_decay: float
    ) -> None:
        """Update in place with PyTorch's fused kernel."""
        counters = [torch.full((), float(steps), device=run.weights.device) for run in runs]
        adamw(
            [run.weights for run in runs],
            [run.gradients for run in runs],
            [run.moments["exp_avg"] for run in runs],
            [run.moments["exp_avg_sq"] for run in runs],
            [],
            counters,
            fused=True,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum: u <- mu u + g + wd p, p <- p - lr u. Its weight decay is an L2 term."""

    momentum: float
    moment_names: ClassVar[tuple[str, ...]] = ("momentum",)

    def apply(
        self, runs: Sequence[FlatState], *, steps: int, learning_rate: float, weight_decay: float
    ) -> None:
        """Update in place with PyTorch's fused kernel."""
        sgd(
            [run.weights for run in runs],
            [run.gradients for run in runs],
            [run.moments["momentum"] for run in runs],
            fused=True,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The rule that ``--optimizer`` names."""
    if config.optimizer == "sgd":
        return SGD(config.sgd_momentum)
    return AdamW(config.adam_beta1, config.adam_beta2, config.adam_eps)
