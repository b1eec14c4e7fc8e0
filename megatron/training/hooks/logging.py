"""The line about iterations, and the records of every iteration."""

import datetime
import logging
from dataclasses import replace

from megatron.core.communication import Meter
from megatron.core.device import memory_statistics
from megatron.planning.flops import training_flops
from megatron.training.console import PROGRESS
from megatron.training.hooks.base import Hook
from megatron.training.metrics import IterationRecord, LogLine
from megatron.training.progress import LossWindow, StepOutcome
from megatron.training.run import Run

progress_log = logging.getLogger(PROGRESS)


class LoggingHook(Hook):
    """Hands every iteration's figures to the metrics, and prints a line every so many iterations."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.logging
        self._window = LossWindow()
        self._window_seconds = 0.0
        self._window_samples = 0
        model = run.config.model
        # Of one sample; a global batch has as many times that.
        self._flops = training_flops(model, 1, model.padded_vocab_size(run.state.size("tp")))
        self._tokens = model.seq_length

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Record the iteration; print a line at the interval, and after the run's first iteration."""
        for remark in outcome.remarks:
            progress_log.warning(" iteration %d: %s", run.progress.iteration, remark)
        communication = None if run.meter is None else _figures(run.meter)
        params_norm = run.optimizer.params_norm() if self._config.log_params_norm else None
        record = replace(
            self._record(run, outcome, elapsed_seconds), params_norm=params_norm, communication=communication
        )
        run.metrics.iteration(record)
        self._window.add(outcome)
        self._window_seconds += elapsed_seconds
        self._window_samples += outcome.global_batch_size
        first = run.progress.iteration == run.resumed_iteration + 1
        if first or run.progress.iteration % self._config.log_interval == 0:
            line = self._line(run, record)
            progress_log.info("%s", line.format(datetime.datetime.now()))
            self._window, self._window_seconds, self._window_samples = LossWindow(), 0.0, 0

    def _per_device(self, run: Run, samples: int, seconds: float) -> float:
        return samples * self._flops / (seconds * 1e12 * run.state.world_group.size())

    def _record(self, run: Run, outcome: StepOutcome, seconds: float) -> IterationRecord:
        return IterationRecord(
            iteration=run.progress.iteration,
            consumed_samples=run.progress.consumed_samples,
            losses=outcome.losses,
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros,
            params_norm=None,
            learning_rate=outcome.learning_rate,
            weight_decay=outcome.weight_decay,
            loss_scale=outcome.loss_scale,
            skipped=not outcome.updated,
            nan=outcome.has_nan,
            global_batch_size=outcome.global_batch_size,
            elapsed_ms=seconds * 1000,
            data_ms=outcome.data_seconds * 1000,
            tokens_per_second=outcome.global_batch_size * self._tokens / seconds,
            tflops_per_device=self._per_device(run, outcome.global_batch_size, seconds),
            memory=memory_statistics(run.device),
            world_size=run.state.world_group.size(),
        )

    def _line(self, run: Run, record: IterationRecord) -> LogLine:
        window = self._window
        mean_seconds = self._window_seconds / window.iterations
        return LogLine(
            iteration=record.iteration,
            train_iters=run.last_iteration,
            consumed_samples=record.consumed_samples,
            elapsed_ms=mean_seconds * 1000,
            throughput=self._per_device(run, self._window_samples, self._window_seconds)
            if self._config.log_throughput
            else None,
            learning_rate=record.learning_rate,
            global_batch_size=record.global_batch_size,
            losses=window.means(),
            loss_scale=record.loss_scale,
            grad_norm=record.grad_norm,
            num_zeros=record.num_zeros,
            params_norm=record.params_norm,
            skipped=window.skipped,
            nan=window.nan,
        )


def _figures(meter: Meter) -> dict[str, dict[str, float]]:
    """What this rank has sent in the iteration, by axis and kind."""
    found: dict[str, dict[str, float]] = {}
    for (axis, kind), traffic in sorted(meter.take().items()):
        figures = found[f"{axis}/{kind}"] = {"calls": traffic.calls, "bytes": traffic.moved_bytes}
        if traffic.exposed_seconds is not None:
            figures["exposed_ms"] = traffic.exposed_seconds * 1000
    return found
