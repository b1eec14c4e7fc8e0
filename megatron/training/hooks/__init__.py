"""What happens around an iteration: logging, evaluation, checkpoints, exits. One hook, one concern."""

from megatron.training.hooks.base import Hook
from megatron.training.hooks.checkpoint import CheckpointHook
from megatron.training.hooks.evaluation import EvaluationHook
from megatron.training.hooks.exit import ExitHook
from megatron.training.hooks.garbage import GarbageCollectionHook
from megatron.training.hooks.logging import LoggingHook
from megatron.training.hooks.trace import TraceHook

__all__ = [
    "CheckpointHook",
    "EvaluationHook",
    "ExitHook",
    "GarbageCollectionHook",
    "Hook",
    "LoggingHook",
    "TraceHook",
]
