"""Everything that one rank of a run holds, made once and passed down."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.core.communication import Meter
from megatron.core.distributed import SharedGradients
from megatron.core.optimizer import Optimizer, ParameterSchedule
from megatron.core.parallel_state import ParallelState
from megatron.core.parameter import NamedParameter
from megatron.core.pipeline_parallel.actions import Program
from megatron.core.pipeline_parallel.p2p import PipelineChannels, TensorSpec
from megatron.core.pipeline_parallel.timeline import TimelineEvent
from megatron.core.weight_gradients import DeferredGradients
from megatron.training.config import RunConfig
from megatron.training.data import MicrobatchReader
from megatron.training.layout import PipelinePlan
from megatron.training.metrics import Metrics
from megatron.training.parameters import Reducer, Store
from megatron.training.plan import BatchPlan
from megatron.training.progress import Progress
from megatron.training.task import Stage, Task


@dataclass
class Readers:
    """This rank's data; None where a split is empty, not asked for, or not read on this stage."""

    train: MicrobatchReader | None = None
    valid: MicrobatchReader | None = None
    test: MicrobatchReader | None = None
    has_valid: bool = False
    """Whether there is a validation split at all, on whichever stage."""
    has_test: bool = False
    """Whether there is a test split at all, on whichever stage."""


@dataclass(frozen=True)
class Chunk:
    """A part of the model that this rank holds."""

    stage: Stage
    model: nn.Module
    deferred: DeferredGradients
    """Weight gradients that it owes, under a schedule that splits the backward pass."""


@dataclass
class Run:
    """One rank's part of a run."""

    config: RunConfig
    task: Task
    state: ParallelState
    device: torch.device
    chunks: tuple[Chunk, ...]
    """The parts of the model on this rank: one, or several with virtual stages."""
    store: Store
    """Where the optimizer finds parameters and gradients."""
    reducer: Reducer
    """What gathers gradients and sums them over data-parallel ranks."""
    shared_gradients: SharedGradients
    optimizer: Optimizer
    schedule: ParameterSchedule
    batch_plan: BatchPlan
    activation: TensorSpec
    """What travels between stages: [s/cp, b, h], with sequence parallelism [s/(cp tp), b, h]."""
    pipeline: PipelinePlan
    """The schedule, and which layers each part of the model has."""
    channels: PipelineChannels
    """The process groups between stages."""
    training_program: Program
    """What this stage does in one training step."""
    evaluation_program: Program
    """What this stage does for one global batch of an evaluation."""
    progress: Progress = field(default_factory=Progress)
    readers: Readers = field(default_factory=Readers)
    metrics: Metrics = field(default_factory=lambda: Metrics(()))
    stop_reason: str | None = None
    """Set by a hook to end the run after this iteration."""
    resumed_iteration: int = 0
    """Iterations that the loaded checkpoint had done."""
    meter: Meter | None = None
    """Counts what this rank sends, with --log-communication."""
    recorder: Callable[[TimelineEvent], None] | None = None
    """Takes the timeline of this stage while an iteration is traced."""

    @property
    def parameters(self) -> tuple[NamedParameter, ...]:
        """Every parameter of this rank once."""
        return self.store.parameters

    @property
    def holds_loss(self) -> bool:
        """Whether this rank has the output layer and the losses."""
        return any(chunk.stage.last for chunk in self.chunks)

    def train_mode(self, training: bool) -> None:
        """Switch dropout on or off."""
        for chunk in self.chunks:
            chunk.model.train(training)

    @property
    def last_iteration(self) -> int:
        """Number of the run's last iteration; a last partial global batch is left out.

        Of a run that is counted in samples, those that are left count, since they may have been consumed with
        another global batch size.
        """
        training = self.config.training
        if training.train_iters is not None:
            return training.train_iters
        assert training.train_samples is not None, "a validated config has one of the two"
        left = max(training.train_samples - self.progress.consumed_samples, 0)
        return self.progress.iteration + left // self.batch_plan.global_batch_size
