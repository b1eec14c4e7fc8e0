"""The story of a run: settings, set-up, iterations, end."""

import contextlib
import datetime
import logging
import os
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_arguments, refuse_misfits, resolve
from megatron.training.checkpointing import (
    agree_on_source,
    check_save_folder,
    check_source,
    find_source,
    load_run,
)
from megatron.training.checks import check_data_files
from megatron.training.console import configure
from megatron.training.effects import flags_without_replicas
from megatron.training.failure import end_interrupted_rank, end_rank, part_of_usage, together
from megatron.training.hooks import (
    CheckpointHook,
    EvaluationHook,
    ExitHook,
    GarbageCollectionHook,
    Hook,
    LoggingHook,
    TraceHook,
)
from megatron.training.initialize import Runtime, discover_world, initialize
from megatron.training.patience import wait_for_ranks
from megatron.training.progress import StepOutcome
from megatron.training.run import Run
from megatron.training.setup import attach_data, attach_metrics, build_run, verify_replicas
from megatron.training.step import train_step
from megatron.training.task import Task

log = logging.getLogger(__name__)


def pretrain(task: Task, argv: Sequence[str], description: str) -> None:
    """Train ``task`` as the flags in ``argv`` say; every rank of the job calls this.

    Raises:
        ValueError: if the settings, the data or a checkpoint are wrong; nothing has been changed then.
    """
    config = parse_arguments(argv, description)
    world = discover_world(os.environ)
    configure(world.rank, world.world_size)
    refuse_misfits(config, world.world_size)
    if world.rank == 0:
        for note in flags_without_replicas(config, world.world_size):
            log.warning("%s", note)
    check_save_folder(config.checkpoint)
    source = find_source(config.checkpoint)
    with part_of_usage():
        tokenizer = (
            build_tokenizer(config.tokenizer, config.model.vocab_size)
            if config.tokenizer.tokenizer_type
            else None
        )
        config = resolve(
            config,
            checkpoint_config=source.config if source else None,
            tokenizer_vocab_size=tokenizer.vocab_size if tokenizer else None,
            world_size=world.world_size,
        )
    check_data_files(config)
    if source is not None:
        check_source(source, config)
    runtime = initialize(config, world)
    agree_on_source(source, runtime.state.world_group, runtime.device)
    resumed = source.config if source is not None and source.resumes else None
    run = build_run(config, task, runtime, resumed)
    if source is not None:
        load_run(run, source)
    verify_replicas(run)
    saved_data = source.manifest.state.get("data") if source is not None and source.resumes else None
    together(
        lambda: attach_data(run, tokenizer, saved_data),
        runtime.state.world_group,
        runtime.device,
        before_meeting=lambda: _wait_for_indices(runtime),
    )
    together(lambda: attach_metrics(run), runtime.state.world_group, runtime.device)
    hooks = together(lambda: build_hooks(run), runtime.state.world_group, runtime.device)
    train(run, hooks)


def _wait_for_indices(runtime: Runtime) -> None:
    """Building the order of samples may outlast any collective, on one node and not on another."""
    if runtime.store is not None:
        wait_for_ranks(runtime.store, runtime.world_size, "laying out the order of samples")


def build_hooks(run: Run) -> list[Hook]:
    """The hooks of a run, in the order in which they are called."""
    config = run.config
    hooks: list[Hook] = [
        LoggingHook(run),
        EvaluationHook(config.evaluation.eval_interval),
        ExitHook(config.training),
        CheckpointHook(config.checkpoint),
    ]
    if config.logging.trace_dir is not None:
        hooks.append(TraceHook(run))
    if config.training.manual_gc:
        hooks.append(GarbageCollectionHook(config.training.manual_gc_interval))
    return hooks


def train(run: Run, hooks: Sequence[Hook]) -> None:
    """Iterate until the last iteration, or until a hook stops the run."""
    if run.progress.iteration >= run.last_iteration:
        log.info("nothing left to train: iteration %d of %d", run.progress.iteration, run.last_iteration)
    with contextlib.closing(run.metrics):  # whatever ends the run, its figures are written
        for hook in hooks:
            hook.before_training(run)
        log.info("[before the start of training step] datetime: %s", _now())
        while run.progress.iteration < run.last_iteration and run.stop_reason is None:
            start = time.perf_counter()
            outcome = train_step(run)
            _advance(run, outcome)
            elapsed = time.perf_counter() - start
            for hook in hooks:
                hook.after_step(run, outcome, elapsed)
        log.info("[after training is done] datetime: %s", _now())
        for hook in reversed(hooks):
            hook.after_training(run)
    if run.stop_reason is not None:
        log.info("%s", run.stop_reason)


def _advance(run: Run, outcome: StepOutcome) -> None:
    """Count an iteration: consumed samples move on always, the schedules with successful updates only."""
    samples = outcome.global_batch_size
    run.progress.iteration += 1
    run.progress.consumed_samples += samples
    if outcome.updated:
        run.progress.schedule_samples += samples
    else:
        run.progress.skipped_iterations += 1


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")


def main(task: Task, description: str) -> None:
    """Run :func:`pretrain` as a program: exit code 0, or one line about what is wrong and a code above 0.

    How a rank that fails ends, and which one says why: :mod:`megatron.training.failure`.
    """
    try:
        try:
            pretrain(task, sys.argv[1:], description)
        except Exception as error:  # noqa: BLE001 - every failure must end this rank, whatever it is
            end_rank(error)
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:  # also one that comes up while another rank's end is being reported
        end_interrupted_rank()
