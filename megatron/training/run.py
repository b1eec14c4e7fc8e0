"""Everything that one rank of a run holds, made once and passed down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

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
from megatron.training.batch_size import BatchSizes
from megatron.training.config import RunConfig
from megatron.training.data import MicrobatchReader
from megatron.training.data_order import DataOrder
from megatron.training.layout import PipelinePlan
from megatron.training.metrics import Metrics
from megatron.training.parameters import Reducer, Store
from megatron.training.plan import BatchPlan, last_iteration
from megatron.training.progress import Progress
from megatron.training.task import Stage, Task


@dataclass(frozen=True)
class EvaluationData:
    """A dataset that the model is tried on."""

    split: Literal["valid", "test"]
    number: int | None
    """Of several validation datasets, which; None where there is one of them."""
    iterations: int
    """Global batches of one evaluation."""
    whole: bool
    """Whether an evaluation reads all of it, from its beginning."""
    reader: MicrobatchReader | None
    """None on a stage that reads no data."""


@dataclass
class Readers:
    """This rank's data."""

    train: MicrobatchReader | None = None
    """None on a stage that reads no data."""
    evaluation: tuple[EvaluationData, ...] = ()
    """Validation, then test, without those that are empty or not asked for; the same on all ranks."""


@dataclass(frozen=True)
class Chunk:
    """A part of the model that this rank holds."""

    stage: Stage
    model: nn.Module
    deferred: DeferredGradients
    """Weight gradients that it owes, under a schedule that splits the backward pass."""


@dataclass(frozen=True)
class Division:
    """How this rank works through global batches of one size."""

    batch: BatchPlan
    pipeline: PipelinePlan
    """The schedule, and which layers each part of the model has."""
    training_program: Program
    """What this stage does in one training step."""
    evaluation_program: Program
    """What this stage does for one global batch of an evaluation."""


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
    batch_sizes: BatchSizes
    """The global batch size, by consumed samples."""
    divisions: Mapping[int, Division]
    """How this rank works, by the size of the global batch: every size of the run and of its evaluations."""
    activation: TensorSpec
    """What travels between stages: [s/cp, b, h], with sequence parallelism [s/(cp tp), b, h]."""
    channels: PipelineChannels
    """The process groups between stages."""
    progress: Progress = field(default_factory=Progress)
    readers: Readers = field(default_factory=Readers)
    data_order: DataOrder = field(default_factory=DataOrder)
    """What the order of training samples depends on."""
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
    def division(self) -> Division:
        """How the next global batch of training is worked through."""
        return self.divisions[self.batch_sizes.at(self.progress.consumed_samples)]

    @property
    def evaluation_division(self) -> Division:
        """How a global batch of an evaluation is worked through."""
        return self.divisions[self.config.eval_global_batch_size]

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
        """Number of the run's last iteration; a last partial global batch is left out."""
        return last_iteration(self.config, self.progress)
