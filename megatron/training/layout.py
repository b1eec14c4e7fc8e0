"""How a model lies over pipeline stages: its schedule, its chunks, and which layers each part of it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.config import ScheduleName
from megatron.core.pipeline_parallel.actions import Schedule
from megatron.core.pipeline_parallel.partition import count_chunks, deal_layers
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.training.config import RunConfig


@dataclass(frozen=True)
class PipelinePlan:
    """Who holds what, and in what order it runs."""

    schedule: Schedule
    layers: tuple[range, ...]
    """Global numbers of the layers of each part of the model, in its order."""


def pipeline_plan(config: RunConfig, num_microbatches: int) -> PipelinePlan:
    """The schedule and the division of layers that the flags ask for.

    Args:
        config: settings, resolved or not.
        num_microbatches: micro-batches of one replica for one update.

    Raises:
        ValueError: if layers, stages, chunks and micro-batches do not fit together.
    """
    parallel = config.parallel
    name = schedule_name(config)
    schedule = build_schedule(
        name,
        stages=parallel.pipeline_model_parallel_size,
        microbatches=num_microbatches,
        chunks=model_chunks(config),
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage
        if name == "interleaved"
        else None,
    )
    layers = deal_layers(
        config.model.num_layers,
        parallel.pipeline_model_parallel_size,
        schedule.chunks,
        schedule.placement,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split,
        layout=parallel.pipeline_model_parallel_layout,
    )
    return PipelinePlan(schedule, tuple(layers))


def layer_text(chunks: Sequence[range]) -> str:
    """The layers of a stage's chunks in words: ``layers 0 to 3, 8 to 11``, ``layer 2`` or ``no layer``."""
    full = [layers for layers in chunks if layers]
    texts = [
        f"{layers.start} to {layers.stop - 1}" if len(layers) > 1 else str(layers.start) for layers in full
    ]
    if not full:
        return "no layer"
    return ("layer " if sum(map(len, full)) == 1 else "layers ") + ", ".join(texts)


def schedule_name(config: RunConfig) -> ScheduleName:
    """``--pipeline-schedule``, or what stands for it: 1f1b, with several chunks a stage interleaved."""
    if config.parallel.pipeline_schedule is not None:
        return config.parallel.pipeline_schedule
    return "interleaved" if model_chunks(config) > 1 else "1f1b"


def model_chunks(config: RunConfig) -> int:
    """Parts of the model that each stage holds.

    Raises:
        ValueError: if the flags that say so contradict each other.
    """
    parallel = config.parallel
    given = count_chunks(
        config.model.num_layers,
        parallel.pipeline_model_parallel_size,
        layers_per_chunk=parallel.num_layers_per_virtual_pipeline_stage,
        chunks=parallel.num_virtual_stages_per_pipeline_rank,
        layout=parallel.pipeline_model_parallel_layout,
    )
    return given or (2 if parallel.pipeline_schedule == "zb-v" else 1)
