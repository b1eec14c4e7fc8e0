"""Losses on the validation and test splits."""

import logging

from megatron.training.console import PROGRESS
from megatron.training.hooks.base import Hook
from megatron.training.metrics import EvaluationRecord
from megatron.training.progress import StepOutcome
from megatron.training.run import EvaluationData, Run
from megatron.training.step import evaluation_losses

progress_log = logging.getLogger(PROGRESS)


class EvaluationHook(Hook):
    """Every ``interval`` iterations on validation; at the end on validation and test."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self._found: dict[EvaluationData, tuple[int, dict[str, float]]] = {}
        """Of data that is always read whole: the last iteration with which it was, and the losses."""

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Evaluate where the interval asks for it."""
        if self._interval and run.progress.iteration % self._interval == 0:
            for data in run.readers.evaluation:
                if data.split == "valid":
                    self._evaluate(run, data, final=False)

    def after_training(self, run: Run) -> None:
        """Evaluate both splits, unless the run was stopped before its last iteration."""
        if run.progress.iteration >= run.last_iteration:
            for data in run.readers.evaluation:
                self._evaluate(run, data, final=True)

    def _evaluate(self, run: Run, data: EvaluationData, *, final: bool) -> None:
        losses = self._losses(run, data)
        if not losses:
            progress_log.warning(
                " iteration %d: no token of the %s data counts towards the loss: there is none to report",
                run.progress.iteration,
                "validation" if data.split == "valid" else data.split,
            )
            return
        progress = run.progress
        run.metrics.evaluation(
            EvaluationRecord(
                progress.iteration, progress.consumed_samples, data.split, losses, final, data.number
            )
        )

    def _losses(self, run: Run, data: EvaluationData) -> dict[str, float]:
        iteration, losses = self._found.get(data, (None, {}))
        if iteration == run.progress.iteration:
            return losses  # the same samples and the same weights
        losses = evaluation_losses(run, data)
        if data.whole:
            self._found[data] = run.progress.iteration, losses
        return losses
