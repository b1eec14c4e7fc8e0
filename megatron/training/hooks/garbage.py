"""Python's garbage collection at fixed iterations, so that all ranks pause together."""

import gc

from megatron.training.hooks.base import Hook
from megatron.training.progress import StepOutcome
from megatron.training.run import Run


class GarbageCollectionHook(Hook):
    """``--manual-gc``: collect every ``interval`` iterations (never if 0) and not otherwise."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def before_training(self, run: Run) -> None:
        """Switch automatic collection off."""
        gc.disable()
        gc.collect()

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Collect where the interval asks for it."""
        if self._interval and run.progress.iteration % self._interval == 0:
            gc.collect()

    def after_training(self, run: Run) -> None:
        """Switch automatic collection on again."""
        gc.enable()
