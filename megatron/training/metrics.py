"""Where the figures of a run go: log line, TensorBoard, JSON lines.

Hooks hand records to one :class:`Metrics`; each sink writes them in its own form. Only the last rank has any.
"""

import datetime
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from megatron.training.console import PROGRESS

progress_log = logging.getLogger(PROGRESS)


@dataclass(frozen=True)
class IterationRecord:
    """The figures of one iteration, at full precision."""

    iteration: int
    consumed_samples: int
    losses: dict[str, float]
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    learning_rate: float
    """What this iteration's update used."""
    weight_decay: float
    """What this iteration's update used."""
    loss_scale: float
    skipped: bool
    nan: bool
    global_batch_size: int
    elapsed_ms: float
    data_ms: float
    """Of the elapsed time: waiting for data, the mean over the ranks that read any."""
    tokens_per_second: float
    tflops_per_device: float
    memory: dict[str, int]
    """Bytes: allocated, max_allocated, reserved, max_reserved."""
    world_size: int
    communication: dict[str, dict[str, float]] | None = None
    """With --log-communication what this rank sent: ``calls``, ``bytes`` and ``exposed_ms`` by axis and kind,
    such as ``tp/all_reduce``."""


@dataclass(frozen=True)
class EvaluationRecord:
    """The losses of one evaluation."""

    iteration: int
    consumed_samples: int
    split: str
    """``valid`` or ``test``."""
    losses: dict[str, float]
    final: bool
    """Whether it was made after the last iteration."""
    number: int | None = None
    """Of several validation datasets, which."""

    @property
    def suffix(self) -> str:
        """What tells one of several validation datasets apart."""
        return "" if self.number is None else f"-{self.number}"


class Sink(Protocol):
    """One place that figures go to."""

    def iteration(self, record: IterationRecord) -> None:
        """Take the figures of an iteration."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Take the losses of an evaluation."""

    def close(self) -> None:
        """Write out what is still held."""


class Metrics:
    """All sinks of this rank."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def iteration(self, record: IterationRecord) -> None:
        """Hand the figures of an iteration to every sink."""
        for sink in self._sinks:
            sink.iteration(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Hand the losses of an evaluation to every sink."""
        for sink in self._sinks:
            sink.evaluation(record)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def perplexity(loss: float) -> float:
    """``exp(loss)``, the loss capped at 20 as in Megatron-LM."""
    return math.exp(min(20.0, loss))


class JsonLinesSink:
    """``--metrics-file``: one JSON object a line; floats at full precision, NaN and infinities as strings."""

    def __init__(self, path: str) -> None:
        """Open ``path`` to append to it, and make its folder if need be.

        Raises:
            ValueError: if it cannot be written to.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open for the whole run
        except OSError as error:
            raise ValueError(
                f"--metrics-file {path}: {error.strerror}; give a file in a folder of yours"
            ) from None

    def iteration(self, record: IterationRecord) -> None:
        """Write an iteration record."""
        self._write(
            {
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                **_json_losses(record.losses),
                "grad_norm": record.grad_norm,
                **({} if record.num_zeros is None else {"num_zeros": record.num_zeros}),
                **({} if record.params_norm is None else {"params_norm": record.params_norm}),
                "learning_rate": record.learning_rate,
                "weight_decay": record.weight_decay,
                "loss_scale": record.loss_scale,
                "skipped": int(record.skipped),
                "nan": int(record.nan),
                "global_batch_size": record.global_batch_size,
                "tokens_per_second": record.tokens_per_second,
                "elapsed_ms": record.elapsed_ms,
                "data_ms": record.data_ms,
                "tflops_per_device": record.tflops_per_device,
                "peak_memory_bytes": record.memory["max_allocated"],
                **({} if record.communication is None else {"communication": record.communication}),
            }
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write an evaluation record."""
        first = next(iter(record.losses.values()))
        self._write(
            {
                "iteration": record.iteration,
                "split": record.split,
                **({} if record.number is None else {"dataset": record.number}),
                **_json_losses(record.losses),
                "ppl": perplexity(first),
            }
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        finite = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")


def _json_losses(losses: dict[str, float]) -> dict[str, float]:
    return {name.replace(" ", "_"): value for name, value in losses.items()}


class ConsoleSink:
    """Validation lines in Megatron-LM's format; the line about iterations is the logging hook's."""

    def iteration(self, record: IterationRecord) -> None:
        """Nothing: one iteration alone makes no line."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Print the losses of an evaluation between two rules."""
        where = f"iteration {record.iteration}"
        if record.final:
            where += f" on {'validation' if record.split == 'valid' else 'test'} set"
        text = f" validation loss{record.suffix} at {where} | "
        for name, value in record.losses.items():
            text += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
        rule = "-" * (len(text) + 1)
        progress_log.info("%s\n%s\n%s", rule, text, rule)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class TensorBoardOptions:
    """What goes to TensorBoard beyond the losses."""

    interval: int = 1
    timers: bool = False
    memory: bool = False
    validation_perplexity: bool = False
    loss_scale: bool = True
    learning_rate: bool = True
    world_size: bool = False


class TensorBoardSink:
    """Scalars under Megatron-LM's names."""

    def __init__(self, folder: str, queue_size: int, options: TensorBoardOptions) -> None:
        """Open an event file in ``folder``.

        Raises:
            ValueError: if it cannot be written to.
        """
        try:
            self._writer = SummaryWriter(log_dir=folder, max_queue=queue_size)
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {folder}: {error.strerror}; give a folder of yours"
            ) from None
        self._options = options

    def text(self, name: str, value: str) -> None:
        """Write a text, such as the arguments of the run."""
        self._writer.add_text(name, value)

    def iteration(self, record: IterationRecord) -> None:
        """Write the scalars of an iteration, every so many iterations."""
        options = self._options
        if record.iteration % options.interval:
            return
        scalars: dict[str, float | None] = {"batch-size": record.global_batch_size, **record.losses}
        if options.learning_rate:
            scalars["learning-rate"] = record.learning_rate
        if options.loss_scale:
            scalars["loss-scale"] = record.loss_scale
        if options.world_size:
            scalars["world-size"] = record.world_size
        scalars |= {
            "grad-norm": record.grad_norm,
            "num-zeros": record.num_zeros,
            "params-norm": record.params_norm,
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.iteration)
                self._writer.add_scalar(f"{name} vs samples", value, record.consumed_samples)
        if options.timers:
            self._writer.add_scalar("iteration-time", record.elapsed_ms / 1000, record.iteration)
            self._writer.add_scalar("data-time", record.data_ms / 1000, record.iteration)
            self._writer.add_scalar("throughput", record.tflops_per_device, record.iteration)
        for kind, figures in (record.communication or {}).items():
            for name, value in figures.items():
                self._writer.add_scalar(f"communication/{kind}-{name}", value, record.iteration)
        if options.memory:
            for name, value in record.memory.items():
                self._writer.add_scalar(f"mem-{name.replace('_', '-')}-bytes", value, record.iteration)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write the losses of an evaluation."""
        if record.split != "valid":
            return
        for name, value in record.losses.items():
            scalars = {f"{name} validation{record.suffix}": value}
            if self._options.validation_perplexity:
                scalars[f"{name} validation{record.suffix} ppl"] = perplexity(value)
            for key, scalar in scalars.items():
                self._writer.add_scalar(key, scalar, record.iteration)
                self._writer.add_scalar(f"{key} vs samples", scalar, record.consumed_samples)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


@dataclass(frozen=True)
class LogLine:
    """The figures of one line about iterations; losses and time are means since the line before."""

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    throughput: float | None
    learning_rate: float
    global_batch_size: int
    losses: dict[str, float]
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    skipped: int
    nan: int

    def format(self, now: datetime.datetime) -> str:
        """The line in Megatron-LM's format (scripts parse it)."""
        fields = [
            f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.elapsed_ms:.1f}",
        ]
        if self.throughput is not None:
            fields.append(f"throughput per GPU (TFLOP/s/GPU): {self.throughput:.1f}")
        fields.append(f"learning rate: {self.learning_rate:.6E}")
        fields.append(f"global batch size: {self.global_batch_size:5d}")
        fields += [f"{name}: {value:.6E}" for name, value in self.losses.items() if value >= 0]
        fields.append(f"loss scale: {self.loss_scale:.1f}")
        if self.grad_norm is not None:
            fields.append(f"grad norm: {self.grad_norm:.3f}")
        if self.num_zeros is not None:
            fields.append(f"num zeros: {self.num_zeros}")
        if self.params_norm is not None:
            fields.append(f"params norm: {self.params_norm:.3f}")
        fields.append(f"number of skipped iterations: {self.skipped:3d}")
        fields.append(f"number of nan iterations: {self.nan:3d}")
        return " | ".join(fields) + " |"
