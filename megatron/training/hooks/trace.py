"""Measured timelines of the pipeline, in the format in which plans are drawn."""

import json
import logging
import tempfile
from pathlib import Path

from megatron.core.pipeline_parallel.timeline import TimelineEvent, to_chrome_trace
from megatron.training.hooks.base import Hook
from megatron.training.progress import StepOutcome
from megatron.training.run import Run

log = logging.getLogger(__name__)


class TraceHook(Hook):
    """``--trace-dir``: writes what each stage of the first replica did in some iterations, and when.

    One file for each stage, ``stage_00.json``, with all the iterations recorded so far;
    ``tools/draw_schedule.py`` draws a folder of them. Times are those of the host's steady clock, which all
    ranks of one machine share. The run's first iteration is left out: it is slower than those to come.
    """

    def __init__(self, run: Run) -> None:
        """Make the folder; ranks of the first replica alone have one.

        Raises:
            ValueError: if it cannot be written to.
        """
        config = run.config.logging
        assert config.trace_dir is not None
        self._folder = Path(config.trace_dir)
        self._iterations = config.trace_iterations
        self._events: list[TimelineEvent] = []
        self._first: int | None = None
        if any(run.state.rank(axis) for axis in ("dp", "cp", "tp")):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):  # permissions alone do not tell
                pass
        except OSError as error:
            raise ValueError(
                f"--trace-dir {self._folder}: {error.strerror}; give a folder of yours"
            ) from None
        self._first = run.progress.iteration + 2

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Write what was recorded of this iteration, and record the next one if its turn has come.

        A trace that can no longer be written is given up: it is not worth the run.
        """
        if self._first is None:
            return
        last = self._first + self._iterations - 1
        recorded = self._first <= run.progress.iteration + 1 <= last
        if self._first <= run.progress.iteration <= last:
            path = self._folder / f"stage_{run.state.rank('pp'):02d}.json"
            try:
                path.write_text(json.dumps(to_chrome_trace(self._events)), encoding="utf-8")
            except OSError as error:
                log.warning("%s: %s; no more is traced", path, error.strerror)
                self._first, recorded = None, False
        run.recorder = self._events.append if recorded else None
