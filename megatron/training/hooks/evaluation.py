"""Losses on the validation and test splits."""

import logging
from typing import Literal

from megatron.training.console import PROGRESS
from megatron.training.hooks.base import Hook
from megatron.training.metrics import EvaluationRecord
from megatron.training.progress import StepOutcome
from megatron.training.run import Run
from megatron.training.step import evaluation_losses

progress_log = logging.getLogger(PROGRESS)


class EvaluationHook(Hook):
    """Every ``interval`` iterations on validation; at the end on validation and test."""

    def __init__(self, interval: int | None, iterations: int) -> None:
        self._interval = interval
        self._iterations = iterations

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Evaluate where the interval asks for it."""
        if self._interval and run.progress.iteration % self._interval == 0:
            self._evaluate(run, "valid", final=False)

    def after_training(self, run: Run) -> None:
        """Evaluate both splits, unless the run was stopped before its last iteration."""
        if run.progress.iteration >= run.last_iteration:
            self._evaluate(run, "valid", final=True)
            self._evaluate(run, "test", final=True)

    def _evaluate(self, run: Run, split: Literal["valid", "test"], *, final: bool) -> None:
        readers = run.readers
        exists, reader = (
            (readers.has_valid, readers.valid) if split == "valid" else (readers.has_test, readers.test)
        )
        if not exists or not self._iterations:
            return
        losses = evaluation_losses(run, reader, self._iterations)
        if not losses:
            progress_log.warning(
                " iteration %d: no token of the %s data counts towards the loss: there is none to report",
                run.progress.iteration,
                "validation" if split == "valid" else split,
            )
            return
        run.metrics.evaluation(
            EvaluationRecord(run.progress.iteration, run.progress.consumed_samples, split, losses, final)
        )
