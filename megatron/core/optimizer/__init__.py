"""The update of the weights: norms, clipping, loss scaling, AdamW and SGD, schedules. Knows no layer."""

from megatron.core.optimizer.grad_scaler import ConstantScaler, DynamicScaler, LossScaleError
from megatron.core.optimizer.optimizer import NonFiniteGradientError, Optimizer, StepResult
from megatron.core.optimizer.schedule import (
    ParameterSchedule,
    ScheduleLengths,
    build_schedule,
    resume_schedule,
)
from megatron.core.optimizer.state import StatePart, sharded_states

__all__ = [
    "ConstantScaler",
    "DynamicScaler",
    "LossScaleError",
    "NonFiniteGradientError",
    "Optimizer",
    "ParameterSchedule",
    "ScheduleLengths",
    "StatePart",
    "StepResult",
    "build_schedule",
    "resume_schedule",
    "sharded_states",
]
