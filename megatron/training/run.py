"""Everything that one rank of a run holds, made once and passed down."""

from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.core.distributed import GradientReducer, ParameterBuffers, SharedGradients
from megatron.core.optimizer import Optimizer, ParameterSchedule
from megatron.core.parallel_state import ParallelState
from megatron.core.parameter import NamedParameter
from megatron.core.pipeline_parallel.actions import Program
from megatron.core.pipeline_parallel.p2p import TensorSpec
from megatron.training.config import RunConfig
from megatron.training.data import MicrobatchReader
from megatron.training.metrics import Metrics
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


@dataclass
class Run:
    """One rank's part of a run."""

    config: RunConfig
    task: Task
    state: ParallelState
    device: torch.device
    stage: Stage
    model: nn.Module
    parameters: list[NamedParameter]
    buffers: ParameterBuffers
    reducer: GradientReducer
    shared_gradients: SharedGradients
    optimizer: Optimizer
    schedule: ParameterSchedule
    batch_plan: BatchPlan
    activation: TensorSpec
    """What travels between stages: [s, b, h]."""
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
