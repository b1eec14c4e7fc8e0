"""How far a run has come, and what one iteration of it came to."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters that a checkpoint carries. The loop alone advances them."""

    iteration: int = 0
    """Iterations done."""
    consumed_samples: int = 0
    """Training samples read, those of skipped iterations included."""
    schedule_samples: int = 0
    """Samples of successful updates: where the schedules stand. A skipped update does not move them."""
    skipped_iterations: int = 0
    """Iterations without an update, so far."""

    def to_json(self) -> dict[str, int]:
        """Plain values for a checkpoint."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "schedule_samples": self.schedule_samples,
            "skipped_iterations": self.skipped_iterations,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progress":
        """The counters that :meth:`to_json` wrote."""
        return cls(**{name: int(values[name]) for name in cls().to_json()})


@dataclass(frozen=True)
class StepOutcome:
    """What one iteration came to, the same on every rank."""

    losses: dict[str, float]
    """Each loss: its sum over the global batch divided by its count."""
    learning_rate: float
    """The learning rate that the update used."""
    weight_decay: float
    """The weight decay that the update used."""
    loss_scale: float
    """The loss scale that the backward pass used."""
    global_batch_size: int
    """Samples that it read."""
    data_seconds: float = 0.0
    """How long the ranks that read data waited for it, on average."""
    grad_norm: float | None = None
    """Global L2 norm of the gradients before clipping; None where the update was skipped."""
    num_zeros: int | None = None
    """Zeros among the gradients, if asked for; None where the update was skipped."""
    updated: bool = False
    """Whether the weights were updated."""
    remarks: tuple[str, ...] = ()
    """Lines that the user should see: why an update was skipped."""

    @property
    def has_nan(self) -> bool:
        """Whether a loss is NaN or infinite."""
        return not all(math.isfinite(value) for value in self.losses.values())


@dataclass
class LossWindow:
    """Running means since the last log line."""

    sums: dict[str, float] = field(default_factory=dict)
    successful: int = 0
    iterations: int = 0
    skipped: int = 0
    nan: int = 0

    def add(self, outcome: StepOutcome) -> None:
        """Count one iteration; the losses of a skipped one are left out of the mean."""
        self.iterations += 1
        self.nan += outcome.has_nan
        if not outcome.updated:
            self.skipped += 1
            return
        self.successful += 1
        for name, value in outcome.losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Mean of each loss over the successful iterations."""
        return {name: total / max(self.successful, 1) for name, total in self.sums.items()}
