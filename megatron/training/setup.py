"""From settings to a run: model, buffers, optimizer, schedule, data."""

import logging

import torch
import torch.distributed as dist

from megatron.core.distributed import (
    GradientReducer,
    ParameterBuffers,
    SharedGradients,
    check_replicas,
    default_bucket_size,
)
from megatron.core.optimizer import Optimizer
from megatron.core.parallel_state import ParallelState, model_parallel
from megatron.core.parameter import NamedParameter, Placement, named_parameters
from megatron.core.pipeline_parallel.lowering import lower
from megatron.core.pipeline_parallel.p2p import TensorSpec, open_channels
from megatron.core.pipeline_parallel.partition import layer_ranges
from megatron.core.tensor_parallel import initialize_parameters
from megatron.core.tokenizers import Tokenizer
from megatron.training.acceleration import accelerate
from megatron.training.config import RunConfig
from megatron.training.data import MicrobatchReader
from megatron.training.initialize import Runtime
from megatron.training.metrics import (
    ConsoleSink,
    JsonLinesSink,
    Metrics,
    Sink,
    TensorBoardOptions,
    TensorBoardSink,
)
from megatron.training.plan import batch_plan, run_schedule
from megatron.training.run import Readers, Run
from megatron.training.step import pipeline_channels, pipeline_schedule
from megatron.training.task import SplitDatasets, Stage, Task, parameter_dtype

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
    splits = layer_ranges(config.model.num_layers, state.size("pp"))
    stage = Stage(splits[state.rank("pp")], state.is_first_stage, state.is_last_stage)
    for number, layers in enumerate(splits):
        log.info(" > pipeline stage %d holds layers %d to %d", number, layers.start, layers.stop - 1)
    model = task.build_model(
        config, stage, model_parallel(state, config.parallel), Placement(dtype, runtime.device)
    )
    accelerate(model, runtime)
    initialize_parameters(model, config.training.seed)
    parameters = list(named_parameters(model))
    _log_parameter_counts(runtime, parameters)
    buffers = ParameterBuffers(parameters, bucket_size=_bucket_size(config, state))
    optimizer = Optimizer(
        buffers,
        config.optimizer,
        config.precision,
        model_group=state.model_group,
        data_group=state.data_group,
    )
    plan = batch_plan(config, runtime.world_size)
    log.info("setting number of microbatches to constant %d", plan.num_microbatches)
    log.info("> learning rate decay style: %s", config.schedule.lr_decay_style)
    order = pipeline_schedule(config, state, plan)
    open_channels(pipeline_channels(config, state), runtime.device)
    model_config = config.model
    return Run(
        config=config,
        task=task,
        state=state,
        device=runtime.device,
        stage=stage,
        model=model,
        parameters=parameters,
        buffers=buffers,
        reducer=GradientReducer(buffers, state.data_group, overlap=config.parallel.overlap_grad_reduce),
        shared_gradients=SharedGradients(buffers, state.group("tp"), state.embedding_group),
        optimizer=optimizer,
        schedule=run_schedule(config, resumed),
        batch_plan=plan,
        training_program=lower(order)[state.rank("pp")],
        evaluation_program=lower(order, forward_only=True)[state.rank("pp")],
        activation=TensorSpec(
            (model_config.seq_length, plan.micro_batch_size, model_config.hidden_size), dtype, runtime.device
        ),
    )


def _bucket_size(config: RunConfig, state: ParallelState) -> int | None:
    """Elements of a gradient bucket; None, one bucket, where reduction does not overlap the backward pass."""
    if not config.parallel.overlap_grad_reduce:
        return None
    return config.parallel.ddp_bucket_size or default_bucket_size(state.size("dp"))


def _log_parameter_counts(runtime: Runtime, parameters: list[NamedParameter]) -> None:
    """Print what every (tensor, pipeline) rank holds; all ranks of a replica together."""
    state = runtime.state
    own = torch.tensor(
        [state.rank("tp"), state.rank("pp"), sum(named.parameter.numel() for named in parameters)],
        device=runtime.device,
    )
    rows = own.new_empty(state.model_group.size() * 3)
    dist.all_gather_single(rows, own, group=state.model_group)
    for tp_rank, pp_rank, count in sorted(rows.view(-1, 3).tolist()):
        log.info(
            " > number of parameters on (tensor, pipeline) model parallel rank (%d, %d): %d",
            tp_rank,
            pp_rank,
            count,
        )


def samples_asked_for(run: Run) -> tuple[int, int, int]:
    """Samples of training, validation and test that a run will have read at its end, at most."""
    last, batch, evaluation = run.last_iteration, run.batch_plan.global_batch_size, run.config.evaluation
    training = run.config.training.train_samples
    if training is None:
        training = run.progress.consumed_samples + max(last - run.progress.iteration, 0) * batch
    evaluations = last // evaluation.eval_interval + 1 if evaluation.eval_interval else 1
    per_evaluation = evaluation.eval_iters * batch
    return training, evaluations * per_evaluation, per_evaluation


def attach_data(run: Run, tokenizer: Tokenizer | None) -> None:
    """Build the datasets and this rank's readers, at the samples where ``run.progress`` stands."""
    datasets = run.task.build_datasets(run.config, tokenizer, samples_asked_for(run))
    for line in datasets.description:
        log.info(" > %s", line)
    if datasets.train is None:
        raise ValueError(
            "there is no training data: give --data-path, --train-data-path or --mock-data, and a --split "
            "whose first share is above 0"
        )
    run.readers = Readers(has_valid=datasets.valid is not None, has_test=datasets.test is not None)
    if run.task.reads_data(run.config, run.stage):
        _attach_readers(run, datasets)


def _attach_readers(run: Run, datasets: SplitDatasets) -> None:
    evaluation, done = run.config.evaluation, run.progress.iteration
    past = done // evaluation.eval_interval if evaluation.eval_interval else 0
    valid_samples = past * evaluation.eval_iters * run.batch_plan.global_batch_size

    def reader(dataset: object, consumed: int) -> MicrobatchReader | None:
        if dataset is None:
            return None
        return MicrobatchReader(dataset, run.config, run.state, run.device, consumed)  # type: ignore[arg-type]

    run.readers.train = reader(datasets.train, run.progress.consumed_samples)
    run.readers.valid = reader(datasets.valid, valid_samples)
    run.readers.test = reader(datasets.test, 0)


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
    """Refuse to train with replicas whose weights differ."""
    check_replicas(run.buffers, run.state.data_group, run.state.group("tp"))
