"""Loss scaling: float16 gradients are kept in range by scaling the loss, which the update takes out again."""

from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from megatron.core.config import PrecisionConfig


class LossScaleError(RuntimeError):
    """Updates go on overflowing although the loss scale cannot fall any further."""


class GradScaler(Protocol):
    """What the optimizer needs of a loss scaler."""

    scale: float
    """What the next loss is to be multiplied by."""

    def update(self, found_inf: bool) -> None:
        """Take note of a step, in which a gradient was infinite or NaN or was not, and set the next scale.

        Raises:
            LossScaleError: if too many steps in a row were skipped with the scale at its minimum.
        """

    def state_dict(self) -> dict[str, float | int]:
        """State that a resumed run needs, as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


@dataclass
class ConstantScaler:
    """A scale that never changes; an overflow skips the update."""

    scale: float
    max_consecutive_skips: int
    skips_at_minimum: int = 0
    """Steps in a row that overflowed: a constant scale is always at its minimum."""

    def update(self, found_inf: bool) -> None:
        """Count overflows in a row, and raise :class:`LossScaleError` when there are too many."""
        self.skips_at_minimum = self.skips_at_minimum + 1 if found_inf else 0
        _check_skips(self.skips_at_minimum, self.max_consecutive_skips, self.scale)

    def state_dict(self) -> dict[str, float | int]:
        """The overflows in a row; the scale is the command line's."""
        return {"skips_at_minimum": self.skips_at_minimum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the count of overflows, where there is one."""
        self.skips_at_minimum = int(state.get("skips_at_minimum", 0))


@dataclass(frozen=True)
class DynamicScalerRule:
    """How a dynamic scale moves."""

    min_scale: float
    growth_interval: int
    """Good steps in a row after which the scale doubles."""
    hysteresis: int
    """Overflows until the scale first halves; counted anew only when it doubles."""
    max_consecutive_skips: int


@dataclass
class DynamicScaler:
    """As large a scale as does not overflow.

    An overflow uses up one unit of the hysteresis, and when none is left halves the scale. Neither halving
    nor good steps short of a whole window give units back, so after the first few every further overflow
    halves.
    """

    rule: DynamicScalerRule
    scale: float
    growth_tracker: int = 0
    """Good steps in a row."""
    hysteresis_tracker: int = field(init=False)
    """Overflows left before the scale halves."""
    skips_at_minimum: int = 0

    def __post_init__(self) -> None:
        self.hysteresis_tracker = self.rule.hysteresis

    def update(self, found_inf: bool) -> None:
        """Move the scale by the rule, and raise :class:`LossScaleError` when it cannot help any more."""
        if not found_inf:
            self.skips_at_minimum = 0
            self.growth_tracker += 1
            if self.growth_tracker == self.rule.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.rule.hysteresis
                self.scale *= 2
            return
        self.skips_at_minimum = self.skips_at_minimum + 1 if self.scale <= self.rule.min_scale else 0
        self.growth_tracker = 0
        self.hysteresis_tracker -= 1
        if self.hysteresis_tracker <= 0:
            self.scale = max(self.scale / 2, self.rule.min_scale)
        _check_skips(self.skips_at_minimum, self.rule.max_consecutive_skips, self.scale)

    def state_dict(self) -> dict[str, float | int]:
        """Scale and counters."""
        names = [entry.name for entry in fields(self) if entry.name != "rule"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over scale and counters; a constant scaler's state has no scale and leaves the initial one."""
        for entry in fields(self):
            if entry.name != "rule" and entry.name in state:
                setattr(self, entry.name, state[entry.name])


def build_grad_scaler(precision: PrecisionConfig) -> GradScaler | None:
    """The scaler that the flags ask for: constant with --loss-scale, dynamic with --fp16 alone, else none."""
    if precision.loss_scale is not None:
        return ConstantScaler(precision.loss_scale, precision.max_consecutive_skips)
    if not precision.fp16:
        return None
    rule = DynamicScalerRule(
        min_scale=precision.min_loss_scale,
        growth_interval=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        max_consecutive_skips=precision.max_consecutive_skips,
    )
    return DynamicScaler(rule, precision.initial_loss_scale)


def _check_skips(skips: int, limit: int, scale: float) -> None:
    if skips >= limit:
        raise LossScaleError(
            f"{skips} updates in a row were skipped because gradients overflowed with the loss scale at its "
            f"minimum {scale}: the model has most likely diverged. Resume from an earlier checkpoint with a "
            "lower --lr, use --bf16, or lower --min-loss-scale (--max-consecutive-skips sets this limit)."
        )
