"""How a job is split over ranks."""

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.field import flag

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout and process groups."""

    tensor_model_parallel_size: int = flag(1, aliases=("--tensor-parallel-size",))
    """Ranks that share every layer (tensor parallelism)."""
    pipeline_model_parallel_size: int = flag(1, aliases=("--pipeline-parallel-size",))
    """Stages that the layers are dealt over (pipeline parallelism)."""
    context_parallel_size: int = 1
    """Ranks that share every sequence (context parallelism)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How ranks of a sequence see each other's keys and values: passed round a ring (p2p), gathered, or by
    exchanging sequence shards for heads (a2a)."""
    sequence_parallel: bool = False
    """Split norms, dropout and the residual stream over the tensor-parallel ranks, along the sequence."""
    pipeline_schedule: ScheduleName | None = None
    """Order in which a stage runs its micro-batches; default 1f1b, or interleaved with several chunks."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one model chunk: each stage then holds several chunks (interleaved schedule)."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks of each stage: the same as --num-layers-per-virtual-pipeline-stage, counted otherwise."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, aliases=("--microbatch-group-size-per-vp-stage",)
    )
    """Micro-batches that a stage runs through one chunk before it turns to the next; default the number of
    stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage; the others share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embeddings as a layer when layers are dealt over stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and the loss as a layer when layers are dealt over stages."""
    pipeline_model_parallel_layout: str | None = None
    """What each stage (and chunk) holds, such as "Et*3|(tt|)*29,m|L": E embeddings, t a layer, L the loss, |
    the end of a stage; n times with *n or (...)*n."""
    scatter_gather_tensors_in_pipeline: bool = flag(True, off="--no-scatter-gather-tensors-in-pipeline")
    """Send whole activations between stages instead of one slice by each tensor-parallel rank."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication library; by default nccl with GPUs and gloo without."""
    distributed_timeout_minutes: float = 10
    """Minutes after which a collective that a rank doesn't join ends the job."""
    overlap_grad_reduce: bool = False
    """Start each bucket's gradient reduction as soon as the backward pass has filled it."""
    ddp_bucket_size: int | None = None
    """Elements of one gradient bucket; by default max(40,000,000, 1,000,000 x data-parallel size)."""
    use_distributed_optimizer: bool = False
    """Divide optimizer state over the data-parallel ranks: --data-parallel-sharding-strategy optim."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "no_shard"
    )
    """What is divided over the data-parallel ranks: nothing, optimizer state (ZeRO-1), also gradients
    (ZeRO-2), also parameters (ZeRO-3)."""
    overlap_param_gather: bool = False
    """With a distributed optimizer: gather each bucket's parameters while the next forward pass runs."""
    ddp_average_in_collective: bool = False
    """Average gradients in the collective instead of summing what is already divided; the same numbers."""
    grad_reduce_in_bf16: bool = False
    """Reduce gradients over data-parallel ranks in bfloat16: half the traffic, less exact."""
    deterministic_mode: bool = False
    """Choose only deterministic kernels, at some cost in speed."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "ddp_bucket_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
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
