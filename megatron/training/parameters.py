"""Where the parameters, gradients and updates of a rank live: whole, or divided over data-parallel ranks."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megatron.core.distributed import GradientReducer, ParameterBuffers, default_bucket_size
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.parallel_state import ParallelState
from megatron.core.parameter import NamedParameter, named_parameters
from megatron.core.transformer import TransformerLayer
from megatron.training.config import RunConfig

Store = ParameterBuffers | FullyShardedStore
Reducer = GradientReducer | FullyShardedStore


def chunk_parameters(models: Sequence[nn.Module]) -> list[NamedParameter]:
    """The parameters of all chunks, one after another; what two of them use is there twice."""
    return [named for model in models for named in named_parameters(model)]


def each_once(parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    """The same, without what came before under the name of another chunk."""
    first: dict[int, NamedParameter] = {}
    for named in parameters:
        first.setdefault(id(named.parameter), named)
    return list(first.values())


def store_parameters(
    config: RunConfig, state: ParallelState, models: Sequence[nn.Module], splits_backward: bool
) -> tuple[Store, Reducer]:
    """Move the initialised parameters of this rank's chunks to where the optimizer works on them.

    Args:
        config: the resolved settings.
        state: the process groups.
        models: this rank's parts of the model, in their order.
        splits_backward: whether the schedule forms weight gradients apart from the rest of a backward pass.

    Returns:
        What the optimizer updates, and what gathers and sums the gradients for it.
    """
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    reduce_dtype = torch.bfloat16 if parallel.grad_reduce_in_bf16 else None
    if strategy == "optim_grads_params":
        store = FullyShardedStore(
            models,
            [list(_layers(model)) for model in models],
            state.data_group,
            average=parallel.ddp_average_in_collective,
            reduce_dtype=reduce_dtype,
            splits_backward=splits_backward,
        )
        return store, store
    buffers = ParameterBuffers(
        chunk_parameters(models),
        bucket_size=_bucket_size(config, state),
        strategy=strategy,
        data_group=state.data_group,
    )
    if parallel.overlap_param_gather:
        buffers.gather_during_forward(models)
    reducer = GradientReducer(
        buffers,
        state.data_group,
        overlap=parallel.overlap_grad_reduce,
        average=parallel.ddp_average_in_collective,
        reduce_dtype=reduce_dtype,
    )
    return buffers, reducer


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, TransformerLayer))


def _bucket_size(config: RunConfig, state: ParallelState) -> int | None:
    """Elements of a gradient bucket; None, one bucket, where no bucket is reduced or gathered by itself."""
    parallel = config.parallel
    one = parallel.data_parallel_sharding_strategy != "optim_grads"
    if one and not parallel.overlap_grad_reduce and not parallel.overlap_param_gather:
        return None
    return parallel.ddp_bucket_size or default_bucket_size(state.data_group.size())
