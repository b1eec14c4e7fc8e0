"""How a job is split over ranks."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.field import flag


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout and process groups."""

    tensor_model_parallel_size: int = flag(1, aliases=("--tensor-parallel-size",))
    """Ranks that share every layer (tensor parallelism)."""
    pipeline_model_parallel_size: int = flag(1, aliases=("--pipeline-parallel-size",))
    """Stages that the layers are dealt over (pipeline parallelism)."""
    context_parallel_size: int = 1
    """Ranks that share every sequence (context parallelism); only 1 for now."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order in which a stage runs its micro-batches."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; by default nccl with GPUs and gloo without."""
    distributed_timeout_minutes: float = 10
    """Minutes after which a collective that a rank doesn't join ends the job."""
    overlap_grad_reduce: bool = False
    """Start each bucket's gradient reduction as soon as the backward pass has filled it."""
    ddp_bucket_size: int | None = None
    """Elements of one gradient bucket; by default max(40,000,000, 1,000,000 x data-parallel size)."""
    deterministic_mode: bool = False
    """Choose only deterministic kernels, at some cost in speed."""

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.distributed_timeout_minutes <= 0:
            raise ValueError(
                f"--distributed-timeout-minutes {self.distributed_timeout_minutes}: must be above 0"
            )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one replica of the model takes."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )
