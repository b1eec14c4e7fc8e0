"""From settings to a run: model, buffers, optimizer, schedule, data."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.communication import all_gather
from megatron.core.distributed import SharedGradients, check_replicas, check_shares
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.optimizer import Optimizer
from megatron.core.parallel_state import ParallelState, model_parallel
from megatron.core.parameter import NamedParameter, Placement
from megatron.core.pipeline_parallel.lowering import lower
from megatron.core.pipeline_parallel.p2p import PipelineChannels, TensorSpec, open_channels
from megatron.core.tensor_parallel import defer_weight_gradients, initialize_parameters
from megatron.core.tokenizers import Tokenizer
from megatron.core.weight_gradients import DeferredGradients
from megatron.training.acceleration import accelerate
from megatron.training.config import RunConfig
from megatron.training.data import MicrobatchReader
from megatron.training.data_order import DataOrder
from megatron.training.initialize import Runtime
from megatron.training.layout import PipelinePlan, layer_text, pipeline_plan
from megatron.training.metrics import (
    ConsoleSink,
    JsonLinesSink,
    Metrics,
    Sink,
    TensorBoardOptions,
    TensorBoardSink,
)
from megatron.training.parameters import chunk_parameters, each_once, store_parameters
from megatron.training.plan import batch_plans, run_schedule, samples_asked_for
from megatron.training.run import Chunk, Division, EvaluationData, Readers, Run
from megatron.training.task import Batch, SplitDatasets, Stage, Task, parameter_dtype

log = logging.getLogger(__name__)


def build_run(
    config: RunConfig,
    task: Task,
    runtime: Runtime,
    resumed: RunConfig | None,
    dtype: torch.dtype | None = None,
) -> Run:
    """Model, gradient buffers, optimizer and schedule of this rank, with initial weights.

    Args:
        config: the resolved settings.
        task: what is trained.
        runtime: this rank's place and device.
        resumed: settings of the run that this one goes on with, whose schedule must agree; or None.
        dtype: number format in place of the one that the settings say: float64, to prove a layout exact.
    """
    state, dtype = runtime.state, dtype or parameter_dtype(config)
    divisions = _divisions(config, runtime)
    pipeline = divisions[config.global_batch_size].pipeline
    _log_stages(pipeline)
    chunks = _build_chunks(config, task, runtime, pipeline, dtype)
    models = [chunk.model for chunk in chunks]
    accelerate(models, runtime)
    parameters = each_once(chunk_parameters(models))
    initialize_parameters(parameters, config.training.seed)
    _log_parameter_counts(runtime, parameters)
    del parameters  # a store may put others in their place
    store, reducer = store_parameters(config, state, models, pipeline.schedule.splits_backward)
    optimizer = Optimizer(
        store,
        config.optimizer,
        config.precision,
        model_group=state.model_group,
        data_group=state.data_group,
    )
    _log_batch_sizes(config, divisions)
    log.info("> learning rate decay style: %s", config.schedule.lr_decay_style)
    channels = _channels(config, state)
    open_channels(channels, runtime.device)
    return Run(
        config=config,
        task=task,
        state=state,
        device=runtime.device,
        chunks=chunks,
        store=store,
        reducer=reducer,
        shared_gradients=SharedGradients(store, state.group("tp"), state.embedding_group),
        optimizer=optimizer,
        schedule=run_schedule(config, resumed),
        batch_sizes=config.batch_sizes,
        divisions=divisions,
        channels=channels,
        activation=_activation(config, state, dtype, runtime.device),
        meter=runtime.meter,
    )


def _divisions(config: RunConfig, runtime: Runtime) -> dict[int, Division]:
    """How this rank works through global batches, by their size."""
    stage = runtime.state.rank("pp")
    found = {}
    for size, plan in batch_plans(config, runtime.world_size).items():
        pipeline = pipeline_plan(config, plan.num_microbatches)
        training, evaluation = lower(pipeline.schedule), lower(pipeline.schedule, forward_only=True)
        found[size] = Division(plan, pipeline, training[stage], evaluation[stage])
    return found


def _log_batch_sizes(config: RunConfig, divisions: Mapping[int, Division]) -> None:
    steps = config.batch_sizes.steps
    if len(steps) == 1:
        count = divisions[config.global_batch_size].batch.num_microbatches
        log.info("setting number of microbatches to constant %d", count)
        return
    for consumed, size in steps:
        count = divisions[size].batch.num_microbatches
        log.info(
            " > from %d consumed samples on: global batch size %d, %d microbatches", consumed, size, count
        )


def _build_chunks(
    config: RunConfig, task: Task, runtime: Runtime, pipeline: PipelinePlan, dtype: torch.dtype
) -> tuple[Chunk, ...]:
    """This rank's parts of the model, uninitialised."""
    schedule, number = pipeline.schedule, runtime.state.rank("pp")
    parallel = model_parallel(runtime.state, config.parallel)
    chunks: list[Chunk] = []
    for index in range(schedule.chunks):
        part = schedule.part(number, index)
        stage = Stage(pipeline.layers[part], part == 0, part == schedule.last_part)
        others = [chunk.model for chunk in chunks]
        model = task.build_model(config, stage, parallel, Placement(dtype, runtime.device), others)
        deferred = DeferredGradients()
        if schedule.splits_backward:
            defer_weight_gradients(model, deferred)
        chunks.append(Chunk(stage, model, deferred))
    return tuple(chunks)


def _channels(config: RunConfig, state: ParallelState) -> PipelineChannels:
    """The groups over which this rank's stage hands tensors on."""
    parallel = config.parallel
    return PipelineChannels(
        state.group("pp"),
        state.pp_gradients,
        state.group("tp"),
        scatter_gather=parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel,
    )


def _activation(
    config: RunConfig, state: ParallelState, dtype: torch.dtype, device: torch.device
) -> TensorSpec:
    """What travels between stages."""
    shards = state.size("cp") * (state.size("tp") if config.parallel.sequence_parallel else 1)
    model = config.model
    shape = (model.seq_length // shards, config.training.micro_batch_size, model.hidden_size)
    return TensorSpec(shape, dtype, device)


def _log_stages(pipeline: PipelinePlan) -> None:
    """Print which layers each stage holds."""
    schedule = pipeline.schedule
    for stage in range(len(schedule.stages)):
        held = [pipeline.layers[schedule.part(stage, chunk)] for chunk in range(schedule.chunks)]
        log.info(" > pipeline stage %d holds %s", stage, layer_text(held))


def _log_parameter_counts(runtime: Runtime, parameters: list[NamedParameter]) -> None:
    """Print what every (tensor, pipeline) rank holds; all ranks of a replica together."""
    state = runtime.state
    own = torch.tensor(
        [state.rank("tp"), state.rank("pp"), sum(named.parameter.numel() for named in parameters)],
        device=runtime.device,
    )
    rows = all_gather(own, state.model_group)
    for tp_rank, pp_rank, count in sorted(rows.view(-1, 3).tolist()):
        log.info(
            " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d",
            tp_rank,
            pp_rank,
            count,
        )


def attach_data(run: Run, tokenizer: Tokenizer | None, saved: Mapping[str, Any] | None = None) -> None:
    """Build the datasets and this rank's readers, at the samples where ``run.progress`` stands.

    Args:
        run: the run.
        tokenizer: what the data was made with, if there is one.
        saved: what the checkpoint that the run goes on with says of its training data.

    Raises:
        ValueError: if there is no training data, or it is not that of the checkpoint's run.
    """
    datasets = run.task.build_datasets(run.config, tokenizer, samples_asked_for(run.config, run.progress))
    for line in datasets.description:
        log.info(" > %s", line)
    if datasets.train is None:
        raise ValueError(
            "there is no training data: give --data-path, --train-data-path or --mock-data, and a --split "
            "whose first share is above 0"
        )
    run.data_order = _data_order(run.config, datasets)
    run.data_order.follow(saved)
    run.readers = Readers(
        _reader(run, datasets.train, run.progress.consumed_samples), _evaluations(run, datasets)
    )


def _data_order(config: RunConfig, datasets: SplitDatasets) -> DataOrder:
    laid_out = dict(datasets.laid_out)
    if config.data.dataloader_type == "cyclic":  # a pass shuffles all samples together
        laid_out["samples of a pass"] = str(len(datasets.train))  # type: ignore[arg-type]
    return DataOrder(datasets.fingerprint, laid_out)


def _reader(
    run: Run, dataset: Dataset[dict[str, Tensor]], consumed: int, whole_batch: int | None = None
) -> MicrobatchReader | None:
    """This rank's reader of a dataset; None on a stage that reads no data."""
    if not any(run.task.reads_data(run.config, chunk.stage) for chunk in run.chunks):
        return None

    def own_tokens(batch: Batch) -> Batch:
        return run.task.own_tokens(batch, run.state.group("cp"))

    return MicrobatchReader(
        dataset,
        run.config,
        run.state,
        run.device,
        consumed,
        own_tokens,
        run.task.host_tensors,
        whole_batch,
    )


def _evaluations(run: Run, datasets: SplitDatasets) -> tuple[EvaluationData, ...]:
    evaluation, batch = run.config.evaluation, run.config.eval_global_batch_size
    if not evaluation.eval_iters:
        return ()
    past = run.progress.iteration // evaluation.eval_interval if evaluation.eval_interval else 0
    consumed = past * evaluation.eval_iters * batch
    whole = evaluation.full_validation
    found = []
    numbered: list[tuple[int | None, Dataset[dict[str, Tensor]]]] = []
    for number, (name, dataset) in enumerate(datasets.valid_sets):
        log.info(" > validation set %d: %s", number, name)
        numbered.append((number, dataset))
    if datasets.valid is not None:
        numbered.append((None, datasets.valid))
    for place, dataset in numbered:
        iterations = -(-len(dataset) // batch) if whole else evaluation.eval_iters  # type: ignore[arg-type]
        reader = _reader(run, dataset, consumed, batch if whole else None)
        found.append(EvaluationData("valid", place, iterations, whole, reader))
    if datasets.test is not None:
        reader = _reader(run, datasets.test, 0)
        found.append(EvaluationData("test", None, evaluation.eval_iters, False, reader))
    return tuple(found)


def attach_metrics(run: Run) -> None:
    """Open the sinks of the metrics, on the last rank alone."""
    world, logging_config = run.state.world_group, run.config.logging
    if world.rank() != world.size() - 1:
        return
    sinks: list[Sink] = [ConsoleSink()]
    if logging_config.metrics_file is not None:
        sinks.append(JsonLinesSink(logging_config.metrics_file))
    if logging_config.tensorboard_dir is not None:
        options = TensorBoardOptions(
            interval=logging_config.tensorboard_log_interval,
            timers=logging_config.log_timers_to_tensorboard,
            memory=logging_config.log_memory_to_tensorboard,
            validation_perplexity=logging_config.log_validation_ppl_to_tensorboard,
            loss_scale=logging_config.log_loss_scale_to_tensorboard,
            learning_rate=logging_config.log_learning_rate_to_tensorboard,
            world_size=logging_config.log_world_size_to_tensorboard,
        )
        board = TensorBoardSink(
            logging_config.tensorboard_dir, logging_config.tensorboard_queue_size, options
        )
        for section, values in run.config.to_json().items():
            board.text(section, "\n".join(f"    {name} = {value}" for name, value in values.items()))
        sinks.append(board)
    run.metrics = Metrics(sinks)


def verify_replicas(run: Run) -> None:
    """Refuse to train with replicas whose weights differ.

    Where weights are divided over the data-parallel ranks no two of these hold the same, but tensor-parallel
    ranks do.
    """
    if isinstance(run.store, FullyShardedStore):
        check_shares(run.store, run.state.group("tp"))
        return
    check_replicas(run.store, run.state.data_group, run.state.group("tp"))
