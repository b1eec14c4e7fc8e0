"""Flags that are given without effect, since another flag that they belong to says otherwise.

Launch scripts carry such flags along, so a run starts with them and says so.
"""

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from megatron.core.config import ParallelConfig, TokenizerConfig, TransformerConfig
from megatron.training.config import RunConfig, config_sections
from megatron.training.flags import Flag, flags_of
from megatron.training.layout import model_chunks, schedule_name


@dataclass(frozen=True)
class _Rule:
    """When some flags of one section have no effect."""

    section: str
    """Attribute of :class:`RunConfig`."""
    fields: str
    """Their fields, separated by spaces."""
    idle: Callable[[RunConfig], bool]
    """Whether they have no effect."""
    condition: str
    """The same in words, after "has no effect"."""


_ADAM: Final = "adam_beta1 adam_beta2 adam_eps"
_DYNAMIC_SCALE: Final = "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
_TENSORBOARD: Final = (
    "tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard "
    "log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_loss_scale_to_tensorboard "
    "log_learning_rate_to_tensorboard log_world_size_to_tensorboard"
)
_OF_REPLICAS: Final = (
    "overlap_grad_reduce",
    "use_distributed_optimizer",
    "data_parallel_sharding_strategy",
    "overlap_param_gather",
    "ddp_average_in_collective",
    "grad_reduce_in_bf16",
)
_RESUMING: Final = "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"


def _has_one_dataset(config: RunConfig) -> bool:
    data = config.data
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return not any(path and len(path) > 1 for path in paths)


def _shards(config: RunConfig) -> bool:
    parallel = config.parallel
    return parallel.use_distributed_optimizer or parallel.data_parallel_sharding_strategy != "no_shard"


def _has_no_warmup(config: RunConfig) -> bool:
    schedule = config.schedule
    return not (schedule.lr_warmup_iters or schedule.lr_warmup_samples or schedule.lr_warmup_fraction)


def _has_one_chunk(config: RunConfig) -> bool:
    """Whether each stage holds one part of the model, as far as flags say it and make sense together."""
    if type(config.model) is not TransformerConfig:
        return False  # the checkpoint says how many layers there are
    try:
        return model_chunks(config) == 1
    except ValueError:  # refused later, by all ranks
        return False


_MODEL: Final = (
    _Rule(
        "model",
        "rotary_base rotary_percent",
        lambda config: config.model.position_embedding_type != "rope",
        "without --position-embedding-type rope",
    ),
    _Rule(
        "model",
        "max_position_embeddings",
        lambda config: config.model.position_embedding_type != "learned_absolute",
        "without --position-embedding-type learned_absolute, but to bound --seq-length",
    ),
    _Rule(
        "data",
        "reset_position_ids",
        lambda config: config.model.position_embedding_type == "none",
        "with --position-embedding-type none",
    ),
    _Rule(
        "model",
        "num_query_groups",
        lambda config: not config.model.group_query_attention,
        "without --group-query-attention",
    ),
    _Rule(
        "model",
        "add_qkv_bias",
        lambda config: config.model.add_bias_linear,
        "without --disable-bias-linear",
    ),
)

_UPDATES: Final = (
    _Rule(
        "precision",
        f"{_DYNAMIC_SCALE} max_consecutive_skips",
        lambda config: not config.precision.fp16 and config.precision.loss_scale is None,
        "without --fp16",
    ),
    _Rule(
        "precision",
        _DYNAMIC_SCALE,
        lambda config: config.precision.loss_scale is not None,
        "with --loss-scale, which is constant",
    ),
    _Rule(
        "optimizer", _ADAM, lambda config: config.optimizer.optimizer != "adam", "without --optimizer adam"
    ),
    _Rule(
        "optimizer",
        "sgd_momentum",
        lambda config: config.optimizer.optimizer != "sgd",
        "without --optimizer sgd",
    ),
    _Rule(
        "schedule",
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style",
        lambda config: config.schedule.lr_decay_style != "WSD",
        "without --lr-decay-style WSD",
    ),
    _Rule(
        "schedule",
        "min_lr",
        lambda config: config.schedule.lr_decay_style == "constant",
        "with --lr-decay-style constant",
    ),
    _Rule(
        "schedule",
        "lr_decay_iters lr_decay_samples",
        lambda config: (
            config.schedule.lr_decay_style == "constant" and config.schedule.lr_warmup_fraction is None
        ),
        "with --lr-decay-style constant, but to bound the warm-up",
    ),
    _Rule("schedule", "lr_warmup_init", _has_no_warmup, "without a warm-up, such as --lr-warmup-iters"),
    _Rule(
        "schedule",
        "weight_decay",
        lambda config: config.schedule.weight_decay_incr_style != "constant",
        "with --start-weight-decay and --end-weight-decay",
    ),
    _Rule("schedule", _RESUMING, lambda config: config.checkpoint.load is None, "without --load"),
    _Rule(
        "schedule",
        _RESUMING,
        lambda config: config.checkpoint.load is not None and config.checkpoint.finetune,
        "with --finetune, which begins a schedule of its own",
    ),
    _Rule(
        "parallel",
        "ddp_bucket_size",
        lambda config: not (config.parallel.overlap_grad_reduce or _shards(config)),
        "without --overlap-grad-reduce or a distributed optimizer",
    ),
    _Rule(
        "parallel",
        "overlap_param_gather",
        lambda config: not _shards(config),
        "without --use-distributed-optimizer",
    ),
    _Rule(
        "parallel",
        "overlap_grad_reduce overlap_param_gather ddp_bucket_size",
        lambda config: config.parallel.data_parallel_sharding_strategy == "optim_grads_params",
        "with --data-parallel-sharding-strategy optim_grads_params, which gathers and reduces layer by layer",
    ),
)

_LAYOUT: Final = (
    _Rule(
        "parallel",
        "sequence_parallel",
        lambda config: config.parallel.tensor_model_parallel_size == 1,
        "without --tensor-model-parallel-size above 1",
    ),
    _Rule(
        "parallel",
        "cp_comm_type",
        lambda config: config.parallel.context_parallel_size == 1,
        "without --context-parallel-size above 1",
    ),
    _Rule(
        "parallel",
        "scatter_gather_tensors_in_pipeline",
        lambda config: (
            min(config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size) == 1
            or config.parallel.sequence_parallel
        ),
        "without tensor and pipeline parallelism, or with --sequence-parallel, which always sends slices",
    ),
    _Rule(
        "parallel",
        "microbatch_group_size_per_virtual_pipeline_stage",
        lambda config: schedule_name(config) != "interleaved",
        "without the interleaved schedule",
    ),
    _Rule(
        "parallel",
        "num_layers_per_virtual_pipeline_stage",
        _has_one_chunk,
        "where it makes one chunk a stage: that is no interleaved schedule",
    ),
    _Rule(
        "parallel",
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        lambda config: config.parallel.pipeline_model_parallel_size == 1 and _has_one_chunk(config),
        "with one pipeline stage, which holds everything",
    ),
    _Rule(
        "model",
        "recompute_method recompute_num_layers",
        lambda config: config.model.recompute_granularity == "selective",
        "with selective recomputation, which goes by --recompute-modules",
    ),
    _Rule(
        "model",
        "distribute_saved_activations",
        lambda config: config.parallel.tensor_model_parallel_size == 1 or config.parallel.sequence_parallel,
        "without tensor parallelism, or with --sequence-parallel, which divides them anyway",
    ),
)

_RUN: Final = (
    _Rule(
        "logging",
        "trace_iterations",
        lambda config: config.logging.trace_dir is None,
        "without --trace-dir",
    ),
    _Rule(
        "logging",
        "log_communication",
        lambda config: config.logging.metrics_file is None and config.logging.tensorboard_dir is None,
        "without --metrics-file or --tensorboard-dir",
    ),
    _Rule(
        "data",
        "mid_level_dataset_surplus",
        _has_one_dataset,
        "without a blend of several datasets",
    ),
    _Rule(
        "data",
        "mmap_bin_files",
        lambda config: config.data.mock_data,
        "with --mock-data, which reads no files",
    ),
    _Rule(
        "fim",
        "fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token "
        "fim_middle_token fim_suffix_token fim_pad_token fim_eod_token",
        lambda config: not config.fim.fim_data,
        "without --fim-data",
    ),
    _Rule(
        "checkpoint",
        "save_optim save_rng",
        lambda config: config.checkpoint.save is None,
        "without --save",
    ),
    _Rule(
        "checkpoint",
        "load_optim load_rng",
        lambda config: config.checkpoint.load is None,
        "without --load",
    ),
    _Rule(
        "checkpoint",
        "load_optim load_rng",
        lambda config: config.checkpoint.load is not None and config.checkpoint.finetune,
        "with --finetune, which takes weights only",
    ),
    _Rule(
        "evaluation",
        "eval_interval eval_global_batch_size full_validation multiple_validation_sets",
        lambda config: config.evaluation.eval_iters == 0,
        "with --eval-iters 0",
    ),
    _Rule(
        "training",
        "manual_gc_interval",
        lambda config: not config.training.manual_gc,
        "without --manual-gc",
    ),
    _Rule(
        "logging",
        _TENSORBOARD,
        lambda config: config.logging.tensorboard_dir is None,
        "without --tensorboard-dir",
    ),
)


def flags_without_effect(config: RunConfig, given: Collection[str]) -> list[str]:
    """A line for the flags of each kind that are given and have no effect.

    Args:
        config: the settings of a command line, not yet resolved.
        given: fields whose flags are on it. Of a switch only what differs from its default counts.
    """
    lines = tokenizer_flags_without_effect(config.tokenizer, given)
    for rule in (*_MODEL, *_UPDATES, *_LAYOUT, *_RUN):
        if type(config.model) is not TransformerConfig and rule in _MODEL:
            continue  # the checkpoint says what the model is
        section = config_sections()[rule.section]
        names = rule.fields.split()
        flags = [
            flag
            for flag in flags_of(section)
            if flag.dest in names
            and flag.dest in given
            and _asks_for_something(flag, getattr(getattr(config, rule.section), flag.dest))
        ]
        if flags and rule.idle(config):
            lines.append(_line(flags, rule.condition))
    return lines


def flags_without_replicas(config: RunConfig, world_size: int) -> list[str]:
    """The same of what only several data-parallel ranks can do, once the number of ranks is known.

    The ranks of a sequence count, since they hold the same parameters. A ZeRO-3 of one rank divides nothing
    either, but does gather and reduce layer by layer.
    """
    parallel = config.parallel
    model_size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if world_size != model_size or parallel.data_parallel_sharding_strategy == "optim_grads_params":
        return []
    flags = [
        flag
        for flag in flags_of(ParallelConfig)
        if flag.dest in _OF_REPLICAS and getattr(parallel, flag.dest) != flag.default
    ]
    condition = f"with one replica of the model on world size {world_size}: there is nobody to share with"
    return [_line(flags, condition)] if flags else []


def tokenizer_flags_without_effect(
    config: TokenizerConfig, given: Collection[str] | None = None
) -> list[str]:
    """The same of a tokenizer's flags alone.

    Args:
        config: the settings.
        given: fields whose flags are on the command line; by default those that differ from their defaults.
    """
    flags = [
        flag
        for flag in flags_of(TokenizerConfig)
        if flag.dest not in config.reads
        and getattr(config, flag.dest) != flag.default
        and (given is None or flag.dest in given)
    ]
    kind = config.tokenizer_type
    files = [flag.spellings[0] for flag in flags_of(TokenizerConfig) if flag.dest in config.files]
    reads = f", which reads {' and '.join(files)}" if files else ", which reads no file"
    with_what = f"with --tokenizer-type {kind}{reads}" if kind else "without --tokenizer-type"
    return [_line(flags, with_what)] if flags else []


def settle_tokenizer(namespace: argparse.Namespace) -> list[str]:
    """Take the tokenizer that two files can only be meant for; a line about it."""
    if namespace.tokenizer_type is not None or None in (namespace.vocab_file, namespace.merge_file):
        return []
    namespace.tokenizer_type = "GPT2BPETokenizer"
    return ["--tokenizer-type is not given: GPT2BPETokenizer is taken, for --vocab-file and --merge-file"]


def _asks_for_something(flag: Flag, value: Any) -> bool:
    return "switch" not in flag.type or value != flag.default


def _line(flags: list[Flag], condition: str) -> str:
    spellings = ", ".join(flag.spellings[0] for flag in flags)
    return f"{spellings} {'has' if len(flags) == 1 else 'have'} no effect {condition}"
