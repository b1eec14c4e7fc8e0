"""Checkpoints at fixed iterations and at the end of a run."""

from pathlib import Path

from megatron.training.checkpointing import save_run
from megatron.training.config import CheckpointConfig
from megatron.training.hooks.base import Hook
from megatron.training.progress import StepOutcome
from megatron.training.run import Run


class CheckpointHook(Hook):
    """Saves every ``--save-interval`` iterations, when the run is stopped, and after its last iteration."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._saved: int | None = None

    def before_training(self, run: Run) -> None:
        """Remember what is saved already: what was loaded, unless this run saves elsewhere."""
        save, load = self._config.save, self._config.load
        if save is not None and load is not None and Path(save).resolve() == Path(load).resolve():
            self._saved = run.progress.iteration

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Save where the interval, or the end of the run, asks for it."""
        interval = self._config.save_interval
        due = interval is not None and run.progress.iteration % interval == 0
        if due or run.stop_reason is not None:
            self._save(run)

    def after_training(self, run: Run) -> None:
        """Save the last iteration."""
        self._save(run)

    def _save(self, run: Run) -> None:
        if self._config.save is not None and self._saved != run.progress.iteration:
            save_run(run, self._config.save)
            self._saved = run.progress.iteration
