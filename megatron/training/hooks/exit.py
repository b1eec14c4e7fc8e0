"""Ends of a run before its last iteration: an iteration number, a time limit, a signal."""

import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron.core.communication import all_reduce
from megatron.training.config import TrainingConfig
from megatron.training.hooks.base import Hook
from megatron.training.progress import StepOutcome
from megatron.training.run import Run


class ExitHook(Hook):
    """Decides, the same on every rank, whether the run ends after this iteration."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._signalled = False
        self._previous: signal._HANDLER = None

    def before_training(self, run: Run) -> None:
        """Catch SIGTERM, if asked to."""
        if self._config.exit_signal_handler:
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Set ``run.stop_reason`` where one of the conditions holds on any rank."""
        iteration, config = run.progress.iteration, self._config
        signalled, overtime = self._agree(run)
        if signalled:
            run.stop_reason = "exiting program after receiving SIGTERM."
        elif overtime:
            run.stop_reason = f"exiting program after {process_age_seconds() / 60:.1f} minutes"
        elif config.exit_interval and iteration % config.exit_interval == 0:
            run.stop_reason = f"exiting program at iteration {iteration}"

    def after_training(self, run: Run) -> None:
        """Give SIGTERM back."""
        if self._config.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _agree(self, run: Run) -> tuple[bool, bool]:
        """Whether a signal came, or time ran out, on any rank."""
        limit = self._config.exit_duration_in_mins
        if not self._config.exit_signal_handler and limit is None:
            return False, False
        overtime = limit is not None and process_age_seconds() > limit * 60
        flags = torch.tensor([self._signalled, overtime], dtype=torch.int32, device=run.device)
        all_reduce(flags, run.state.world_group, dist.ReduceOp.MAX)
        signalled, late = flags.tolist()
        return bool(signalled), bool(late)


def process_age_seconds() -> float:
    """How long this process has been running, its imports included: what a time limit of a job counts."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start_ticks = int(fields[19])  # field 22 of proc(5), in clock ticks since the machine was started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
