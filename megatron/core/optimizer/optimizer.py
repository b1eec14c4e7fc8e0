"""One update of this rank's parameters: measure, unscale, clip, apply, and write the result to the model.

All of it works on the flat own buckets of a :class:`ParameterStore`, a few operations for each: all that the
rank holds, or the slice that it has to update of what the data-parallel ranks divide among them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.communication import all_gather, ranks_of
from megatron.core.config import OptimizerConfig, PrecisionConfig
from megatron.core.distributed.own_bucket import OwnBucket, ParameterStore
from megatron.core.optimizer.grad_norm import (
    GradientStatistics,
    clip_coefficient,
    measure_gradients,
    parameters_norm,
)
from megatron.core.optimizer.grad_scaler import build_grad_scaler
from megatron.core.optimizer.state import StatePart
from megatron.core.optimizer.update_rules import FlatState, build_update_rule

_NAME_BYTES = 256


class NonFiniteGradientError(RuntimeError):
    """A gradient is NaN or infinite and no loss scaling explains it."""


@dataclass(frozen=True)
class StepResult:
    """What one call of :meth:`Optimizer.step` did; the same on all ranks."""

    grad_norm: float
    """L2 norm of the whole model's gradients before clipping, loss scale taken out."""
    num_zeros: int | None
    """Zeros among the gradients, with --log-num-zeros-in-grad."""
    updated: bool
    """Whether the weights were updated, or the step was skipped."""
    found_inf: bool
    """Whether a gradient was NaN or infinite."""
    problem: str | None = None
    """Which gradient that was, in words, where no loss scaling explains it."""


class _BucketState:
    """Main weights and moments of one bucket: of the slice that this rank updates."""

    def __init__(self, bucket: OwnBucket, moment_names: tuple[str, ...]) -> None:
        self.bucket = bucket
        # A float32 or float64 model is its own main copy.
        self.separate = bucket.weights.dtype != bucket.gradients.dtype
        self.main = bucket.weights.to(bucket.gradients.dtype)
        self.moments = {name: torch.zeros_like(self.main) for name in moment_names}

    def runs(self, weight_decay: bool) -> list[FlatState]:
        """The runs of parameters that weight decay applies to, or does not."""
        return [
            FlatState(
                self.main[start:stop],
                self.bucket.gradients[start:stop],
                {name: moment[start:stop] for name, moment in self.moments.items()},
            )
            for start, stop in self.bucket.decay_ranges(weight_decay)
        ]


class Optimizer:
    """Float32 main weights, moments, loss scale and the update rule of what this rank updates."""

    def __init__(
        self,
        store: ParameterStore,
        config: OptimizerConfig,
        precision: PrecisionConfig,
        *,
        model_group: ProcessGroup,
        data_group: ProcessGroup,
    ) -> None:
        """Make main weights from the model's weights as they are now, and zero moments.

        Args:
            store: this rank's parameters and gradients.
            config: rule and clipping.
            precision: loss scaling.
            model_group: ranks that hold one replica of the model together (tensor and pipeline parallel).
            data_group: ranks that hold the same parameters, or disjoint slices of them.
        """
        self._store = store
        self._config = config
        self._model_group = model_group
        self._data_group = data_group
        self._rule = build_update_rule(config)
        self._scaler = build_grad_scaler(precision)
        self._buckets = [_BucketState(bucket, self._rule.moment_names) for bucket in store.buckets]
        self._decay_runs = [run for state in self._buckets for run in state.runs(True)]
        self._plain_runs = [run for state in self._buckets for run in state.runs(False)]
        self._steps = 0

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before its backward; 1 without loss scaling."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def has_main_weights(self) -> bool:
        """Whether main weights are kept apart from the model's (a 16-bit model), and not the same storage."""
        return any(state.separate for state in self._buckets)

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> StepResult:
        """Update the weights from the reduced gradients; all ranks call it together and do the same.

        The gradients are scaled in place by what takes the loss scale out and clips them.

        Args:
            learning_rate: of this update.
            weight_decay: of this update, for parameters that it applies to.

        Raises:
            NonFiniteGradientError: on all ranks, before any update, if a gradient is NaN or infinite, unless
                the loss is scaled (the update is then skipped and the scale moves) or --skip-nan-iterations
                is given.
            LossScaleError: on all ranks, if too many updates in a row were skipped at the minimum loss scale.
        """
        scale = self.loss_scale
        statistics = measure_gradients(
            self._store,
            self._model_group,
            self._data_group,
            loss_scale=scale,
            count_zeros=self._config.log_num_zeros_in_grad,
        )
        problem = None
        if not statistics.finite:
            problem = self._refuse(statistics)
        else:
            self._update(
                clip_coefficient(statistics.norm, self._config.clip_grad) / scale, learning_rate, weight_decay
            )
        if self._scaler is not None:
            self._scaler.update(found_inf=not statistics.finite)
        return StepResult(
            grad_norm=statistics.norm,
            num_zeros=statistics.num_zeros,
            updated=statistics.finite,
            found_inf=not statistics.finite,
            problem=problem,
        )

    def _update(self, coefficient: float, learning_rate: float, weight_decay: float) -> None:
        self._store.wait_for_parameters()  # weights that are still on their way must not change
        if coefficient != 1:
            for bucket in self._store.buckets:
                bucket.gradients.mul_(coefficient)
        for runs, decay in ((self._decay_runs, weight_decay), (self._plain_runs, 0.0)):
            if runs:
                self._rule.apply(runs, steps=self._steps, learning_rate=learning_rate, weight_decay=decay)
        self._steps += 1
        self.sync_model_weights()

    def _refuse(self, statistics: GradientStatistics) -> str | None:
        """Raise, unless a step with unusable gradients is to be skipped; say what is wrong with them."""
        if self._scaler is not None:
            return None
        message = (
            f"gradients are NaN or infinite (their norm is {statistics.norm}), {self._first_non_finite()}"
        )
        if not self._config.skip_nan_iterations:
            raise NonFiniteGradientError(
                f"{message}. The weights are still those of before this step. Lower --lr, look at this "
                "step's data, or skip such steps with --skip-nan-iterations."
            )
        return message

    def _first_non_finite(self) -> str:
        """The first parameter with such a gradient, on the first rank that has one of those that share it."""
        bad = {
            part.named.name
            for bucket in self._store.buckets
            for part in bucket.parts
            if not part.view(bucket.gradients).isfinite().all()
        }
        name = next((named.name for named in self._store.parameters if named.name in bad), None)
        rank = ranks_of(self._model_group)[self._model_group.rank()]
        own = f"first in {name[-_NAME_BYTES:]} on rank {rank}" if name is not None else ""
        packed = bytearray(own.encode().ljust(2 * _NAME_BYTES))
        found = all_gather(
            torch.frombuffer(packed, dtype=torch.uint8).to(self._store.device), self._model_group
        )
        if self._store.sharded:
            found = all_gather(found, self._data_group)
        messages = [bytes(row).decode().strip() for row in found.view(-1, len(packed)).tolist()]
        return next(filter(None, messages), "in another replica")

    @torch.no_grad()
    def sync_model_weights(self) -> None:
        """Write the main weights to the model, rounded to its dtype; call it after loading main weights.

        All ranks of the data group call it together. It publishes them too (:class:`ParameterStore`).
        """
        for state in self._buckets:
            if state.separate:
                state.bucket.weights.copy_(state.main)
        self._store.publish()

    @torch.no_grad()
    def params_norm(self) -> float:
        """L2 norm of the whole model's main weights; all ranks call it together."""
        weights = [state.main for state in self._buckets]
        return parameters_norm(self._store, weights, self._model_group, self._data_group)

    def state_tensors(self) -> dict[str, list[StatePart]]:
        """Views of all optimizer tensors that this rank updates: to save them, or to load into.

        Keys are the rule's moments (``exp_avg`` and ``exp_avg_sq``, or ``momentum``) and, where
        :attr:`has_main_weights`, ``main``; a float32 or float64 model's own weights are its main weights.
        """
        names = [*(["main"] if self.has_main_weights else []), *self._rule.moment_names]
        found: dict[str, list[StatePart]] = {name: [] for name in names}
        for state in self._buckets:
            for name in names:
                flat = state.main if name == "main" else state.moments[name]
                parts = state.bucket.parts
                found[name] += [StatePart(part.named, part.view(flat), part.start) for part in parts]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Scalar state as plain JSON values: successful steps, and the loss scaler's state or None."""
        return {
            "steps": self._steps,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from saved scalar state; a loss scaler that had none then starts anew.

        Raises:
            ValueError: if the number of steps is missing or no whole number.
        """
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"the optimizer state has no valid number of steps: {steps!r}")
        self._steps = steps
        saved = state.get("scaler")
        if self._scaler is not None and saved is not None:
            if not math.isfinite(saved.get("scale", 1.0)):
                raise ValueError(f"the optimizer state has no valid loss scale: {saved}")
            self._scaler.load_state_dict(saved)
