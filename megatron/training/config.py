"""The typed settings of a run: the library's sections and the training loop's, under one frozen root."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.config import (
    DataConfig,
    FimConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
    TokenizerConfig,
    TransformerConfig,
    flag,
)
from megatron.training.batch_size import BatchSizes, constant, in_steps, ramped_up


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length of the run, and how it may end early."""

    micro_batch_size: int = flag()
    """Samples of one forward pass of one model replica."""
    global_batch_size: int | None = None
    """Samples of one update, a multiple of --micro-batch-size times the data-parallel size; default that
    product."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: raise the global batch size from START to --global-batch-size by INCREMENT,
    each size for an equal part of SAMPLES."""
    step_batch_size_schedule: str | None = None
    """Global batch sizes by consumed tokens, such as '0:768 250B:1536'; --global-batch-size is then the
    largest."""
    train_iters: int | None = None
    """Iterations of the whole run, those before a resume included; either this or --train-samples."""
    train_samples: int | None = None
    """Samples of the whole run; either this or --train-iters."""
    seed: int = 1234
    """Seed of initial weights, dropout and the order of samples."""
    exit_interval: int | None = None
    """Save and end when the iteration divides by this."""
    exit_duration_in_mins: int | None = None
    """Save and end after so many minutes."""
    exit_signal_handler: bool = False
    """Save and end on SIGTERM."""
    check_for_nan_in_loss_and_grad: bool = flag(True, off="--no-check-for-nan-in-loss-and-grad")
    """Do not end the run at a NaN or infinite loss or gradient: the update is skipped, as with
    --skip-nan-iterations."""
    manual_gc: bool = False
    """Collect Python garbage at fixed iterations only, on all ranks at once."""
    manual_gc_interval: int = 0
    """Iterations between two garbage collections with --manual-gc; 0 never collects."""

    def __post_init__(self) -> None:
        for name in (
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "seed",
            "exit_interval",
            "exit_duration_in_mins",
        ):
            _at_least(1, self, name)
        _at_least(0, self, "manual_gc_interval")
        if self.rampup_batch_size is not None and self.step_batch_size_schedule is not None:
            raise ValueError("--rampup-batch-size and --step-batch-size-schedule exclude each other")
        if self.seed >= 2**32:
            raise ValueError(f"--seed {self.seed}: must be at most {2**32 - 1}")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved where, and what a run starts from."""

    save: str | None = None
    """Folder that checkpoints are written to."""
    save_interval: int | None = None
    """Iterations between checkpoints; the last iteration is saved in any case."""
    save_optim: bool = flag(True, off="--no-save-optim")
    """Save no optimizer state."""
    save_rng: bool = flag(True, off="--no-save-rng")
    """Save no random state."""
    load: str | None = None
    """Folder of checkpoints to resume from."""
    ckpt_step: int | None = None
    """Iteration to load; default the latest."""
    load_optim: bool = flag(True, off="--no-load-optim")
    """Do not load optimizer state: moments start from zero."""
    load_rng: bool = flag(True, off="--no-load-rng")
    """Do not load random state."""
    finetune: bool = False
    """Take weights only: iteration 0, new optimizer state, new schedule, new data order."""
    pretrained_checkpoint: str | None = None
    """Folder of checkpoints whose weights a run starts from when --load is not given or still empty."""
    use_checkpoint_args: bool = False
    """Take the shape of the model from the checkpoint."""
    exit_on_missing_checkpoint: bool = False
    """End the run when --load holds no checkpoint, even where it equals --save."""

    def __post_init__(self) -> None:
        _at_least(1, self, "save_interval")
        _at_least(0, self, "ckpt_step")
        if self.save_interval is not None and self.save is None:
            raise ValueError(f"--save-interval {self.save_interval} is given without --save FOLDER")
        for name in ("ckpt_step", "exit_on_missing_checkpoint"):
            if getattr(self, name) not in (None, False) and self.load is None:
                raise ValueError(f"{_spelling(name)} is given without --load FOLDER")
        if self.load is None and self.pretrained_checkpoint is None:
            for name in ("finetune", "use_checkpoint_args"):
                if getattr(self, name):
                    raise ValueError(
                        f"{_spelling(name)} needs --load FOLDER or --pretrained-checkpoint FOLDER"
                    )


@dataclass(frozen=True)
class EvaluationConfig:
    """When the model is tried on validation and test data."""

    eval_interval: int | None = None
    """Iterations between validations; by default only after training."""
    eval_iters: int = 100
    """Global batches of one evaluation, the final ones included; 0 evaluates nothing."""
    eval_global_batch_size: int | None = None
    """Samples of one global batch of an evaluation; default --global-batch-size."""
    full_validation: bool = False
    """Evaluate on every validation sample once, instead of the next --eval-iters global batches."""
    multiple_validation_sets: bool = False
    """Evaluate each dataset of --valid-data-path by itself, instead of a mixture of all."""

    def __post_init__(self) -> None:
        _at_least(1, self, "eval_interval")
        _at_least(0, self, "eval_iters")
        _at_least(1, self, "eval_global_batch_size")


@dataclass(frozen=True)
class LoggingConfig:
    """What a run reports, and where."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_throughput: bool = False
    """Add TFLOP/s per device to the log line."""
    log_communication: bool = False
    """Record the collectives, bytes and waiting time of every axis in the metrics file and TensorBoard."""
    trace_dir: str | None = None
    """Folder for measured timelines of the pipeline, one file for each stage of the first replica, in
    Chrome's trace format."""
    trace_iterations: int = 3
    """Iterations that --trace-dir records, from the run's second one on."""
    log_params_norm: bool = False
    """Log the L2 norm of all parameters."""
    metrics_file: str | None = None
    """File that gets one JSON object per iteration and per evaluation, in full precision."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard event files."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard scalars."""
    tensorboard_queue_size: int = 1000
    """TensorBoard events that may wait to be written."""
    log_timers_to_tensorboard: bool = False
    """Write iteration time and throughput to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = False
    """Write memory use to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = flag(True, off="--no-log-loss-scale-to-tensorboard")
    """Do not write the loss scale to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = flag(True, off="--no-log-learning-rate-to-tensorboard")
    """Do not write the learning rate to TensorBoard."""
    log_world_size_to_tensorboard: bool = False
    """Write the number of ranks to TensorBoard."""

    def __post_init__(self) -> None:
        for name in (
            "log_interval",
            "tensorboard_log_interval",
            "tensorboard_queue_size",
            "trace_iterations",
        ):
            _at_least(1, self, name)


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on. Made once, at the start, and kept in each checkpoint."""

    model: TransformerConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    data: DataConfig
    fim: FimConfig
    tokenizer: TokenizerConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig

    @property
    def global_batch_size(self) -> int:
        """Samples of one update, of a resolved config."""
        assert self.training.global_batch_size is not None, "the config is not resolved"
        return self.training.global_batch_size

    @property
    def eval_global_batch_size(self) -> int:
        """Samples of one global batch of an evaluation, of a resolved config."""
        return self.evaluation.eval_global_batch_size or self.global_batch_size

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples of every update of a resolved config.

        Raises:
            ValueError: if the flags make no series of sizes.
        """
        training = self.training
        if training.step_batch_size_schedule is not None:
            return in_steps(training.step_batch_size_schedule, self.model.seq_length)
        if training.rampup_batch_size is not None:
            return ramped_up(training.rampup_batch_size, self.global_batch_size)
        return constant(self.global_batch_size)

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a NaN or infinite loss or gradient costs one update instead of ending the run."""
        return self.optimizer.skip_nan_iterations

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Plain values, section by section; :meth:`from_json` reads them back."""
        return {
            section: {
                name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
            }
            for section, values in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Mapping[str, Any]]) -> "RunConfig":
        """The config that :meth:`to_json` wrote. A setting that is not there has its default.

        Raises:
            ValueError: for a setting that this version does not know, or that is required and missing.
        """
        sections = config_sections()
        unknown = sorted(set(values) - set(sections))
        if unknown:
            raise ValueError(
                f"saved config has unknown sections {', '.join(unknown)}: a newer version wrote it"
            )
        built = {
            name: _section_from_json(name, kind, values.get(name, {})) for name, kind in sections.items()
        }
        return cls(**built)


def config_sections() -> dict[str, type]:
    """The sections of :class:`RunConfig`: attribute name to dataclass, in the order of ``--help``."""
    return typing.get_type_hints(RunConfig)


def _section_from_json(section: str, kind: type, values: Mapping[str, Any]) -> Any:
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ValueError(
            f"saved config has settings that this version does not know: {section}.{', '.join(unknown)}"
        )
    try:
        return kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
    except TypeError as error:
        raise ValueError(f"saved config, section {section}: {error}") from None


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(least: int, section: object, name: str) -> None:
    value = getattr(section, name)
    if value is not None and value < least:
        raise ValueError(f"{_spelling(name)} {value}: must be at least {least}")
