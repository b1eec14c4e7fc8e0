"""From a command line to the settings of a run: parsing, and filling in what follows from other settings."""

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config import ParallelConfig, TransformerConfig, flag
from megatron.core.datasets.data_paths import read_path_files
from megatron.core.datasets.split import DEFAULT_MOCK_SPLIT, DEFAULT_SPLIT
from megatron.training.checks import UNKNOWN_VOCABULARY, check_vocabulary, validate, with_batch_size
from megatron.training.config import RunConfig, config_sections
from megatron.training.effects import flags_without_effect, settle_tokenizer
from megatron.training.flags import (
    FlagParser,
    add_flags,
    build,
    flag_text,
    flags_among,
    flags_of,
    launched_rank,
    missing_flags,
    stop_with_error,
)
from megatron.training.foreign_flags import (
    FOREIGN_VALUES,
    FOREIGN_WORDS,
    add_foreign_flags,
    family_refusal,
    judge_foreign_flags,
)
from megatron.training.layout import model_chunks, schedule_name
from megatron.training.plan import run_schedule

log = logging.getLogger(__name__)

_TRAINING_FIELDS = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "label_smoothing",
        "init_method_std",
        "make_vocab_size_divisible_by",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
        "attention_backend",
    }
)
"""Fields of the model section that do not say what the model is: the command line may change them."""

_ALWAYS_GIVEN = tuple(
    name for name in sorted(_TRAINING_FIELDS) if "recompute" in name or "activations" in name
)
"""Those that the command line decides even by leaving them out."""


@dataclass(frozen=True)
class _PartialModel(TransformerConfig):
    """The model flags of a command line with --use-checkpoint-args; the checkpoint has the rest."""

    given: tuple[str, ...] = flag((), cli=False)
    """Fields whose flags were given."""

    def __post_init__(self) -> None:
        """Check nothing: the whole is checked once the checkpoint has filled it up."""


@dataclass(frozen=True)
class OlderSpellings:
    """Flags that say what another flag says too."""

    use_rotary_position_embeddings: bool = False
    """The same as --position-embedding-type rope."""
    add_position_embedding: bool = flag(True, off="--no-position-embedding")
    """No learned positions: --position-embedding-type none, unless rotary ones are asked for."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""


def flag_sections() -> list[type]:
    """The dataclasses whose fields are the flags of a run, in the order of ``--help``."""
    return [*config_sections().values(), OlderSpellings]


def parse_arguments(argv: Sequence[str], description: str) -> RunConfig:
    """The settings that a command line gives, not yet resolved.

    What cannot be run ends the program with one line from rank 0 and exit code 2. Flags that have no meaning
    here, or no effect beside the others, cost a line on rank 0.

    Args:
        argv: the command line without the program's name.
        description: first line of ``--help``.
    """
    parser = _make_parser(description)
    namespace, unknown = parser.parse_known_args(argv)
    notes = _judge_strange_flags(parser, namespace, unknown)
    try:
        given = _given_fields(parser, argv)
        _settle_position_embedding(namespace)
        _settle_recomputation(namespace)
        _refuse_sharding_and_none(namespace, given)
        notes += settle_tokenizer(namespace)
        config = _build_sections(namespace, given)
        config = replace(config, data=read_path_files(config.data))
    except ValueError as error:
        parser.error(str(error))
    if launched_rank() == 0:
        for note in (*notes, *flags_without_effect(config, given)):
            log.warning("%s", note)
    return config


def _judge_strange_flags(
    parser: FlagParser, namespace: argparse.Namespace, unknown: Sequence[str]
) -> list[str]:
    """A line for each flag that is not ours and can be ignored; any other ends the program."""
    strange = flags_among(unknown)
    families = [word for word in strange if family_refusal(word)]
    verdict = judge_foreign_flags(namespace, families)
    problems = [
        FOREIGN_WORDS.get(word) or parser.describe_unknown(word) for word in strange if word not in families
    ]
    problems = [*dict.fromkeys(problems), *verdict.refusals]
    if problems:
        parser.error("; ".join(problems))
    return list(verdict.notes)


def _given_fields(parser: FlagParser, argv: Sequence[str]) -> frozenset[str]:
    """The fields whose flags are on the command line; ``parser`` loses its defaults over it."""
    not_given = object()
    names = [flag.dest for section in flag_sections() for flag in flags_of(section)]
    parser.set_defaults(**dict.fromkeys(names, not_given))
    seen, _ = parser.parse_known_args(argv)
    return frozenset(name for name in names if getattr(seen, name) is not not_given)


def refuse_misfits(config: RunConfig, world_size: int) -> None:
    """End the program, as :func:`parse_arguments` does, where settings cannot make a run of so many ranks.

    All ranks find the same, so none has to wait for another to know it. With --use-checkpoint-args the model
    is not known yet, and :func:`resolve` finds what does not fit.
    """
    if config.checkpoint.use_checkpoint_args:
        return
    try:
        validate(config, world_size)
        check_vocabulary(config)
    except ValueError as error:
        stop_with_error(f"error: {error}")


def resolve(
    config: RunConfig,
    checkpoint_config: RunConfig | None,
    tokenizer_vocab_size: int | None,
    world_size: int,
) -> RunConfig:
    """The settings with every value filled in that follows from others; a pure function.

    Args:
        config: what :func:`parse_arguments` gave.
        checkpoint_config: the settings in the checkpoint that the run starts from, if there is one.
        tokenizer_vocab_size: true size of the tokenizer's vocabulary, if there is a tokenizer.
        world_size: ranks of the job.

    Raises:
        ValueError: if a value can't be worked out, or the settings do not fit together.
    """
    model = config.model
    if config.checkpoint.use_checkpoint_args:
        model = _model_of_checkpoint(model, checkpoint_config)
    config = replace(config, model=model)
    validate(config, world_size)
    data = config.data
    replicas = world_size // config.parallel.model_parallel_size
    splits = data.split is None and not data.train_data_path
    default_split = DEFAULT_MOCK_SPLIT if data.mock_data else DEFAULT_SPLIT
    skip = config.optimizer.skip_nan_iterations or not config.training.check_for_nan_in_loss_and_grad
    resolved = replace(
        config,
        parallel=_fill_parallel(config),
        model=_fill_model(model, tokenizer_vocab_size),
        training=with_batch_size(config, replicas).training,
        data=replace(data, split=default_split) if splits else data,
        optimizer=replace(config.optimizer, skip_nan_iterations=skip),
    )
    run_schedule(resolved, saved=None)  # refuses lengths that make no schedule
    return resolved


def _make_parser(description: str) -> FlagParser:
    parser = FlagParser(description=description)
    for section in flag_sections():
        add_flags(parser, section, FOREIGN_VALUES)
    add_foreign_flags(parser)
    return parser


def _settle_position_embedding(namespace: argparse.Namespace) -> None:
    """Let the older spellings of the kind of positions have their say, whatever the order of flags."""
    kind = namespace.position_embedding_type
    if namespace.use_rotary_position_embeddings:
        if kind == "none":
            raise ValueError(
                "--use-rotary-position-embeddings and --position-embedding-type none exclude each other"
            )
        namespace.position_embedding_type = "rope"
    elif not namespace.add_position_embedding and kind == "learned_absolute":
        namespace.position_embedding_type = "none"


def _settle_recomputation(namespace: argparse.Namespace) -> None:
    """Let the older spelling of selective recomputation have its say."""
    if not namespace.recompute_activations:
        return
    if namespace.recompute_granularity == "full":
        raise ValueError("--recompute-activations and --recompute-granularity full exclude each other")
    namespace.recompute_granularity = "selective"


def _refuse_sharding_and_none(namespace: argparse.Namespace, given: frozenset[str]) -> None:
    """Refuse a strategy that divides nothing beside an optimizer that is divided, where both are given."""
    asked = namespace.use_distributed_optimizer and "data_parallel_sharding_strategy" in given
    if asked and namespace.data_parallel_sharding_strategy == "no_shard":
        raise ValueError(
            "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard contradict each "
            "other: leave one out"
        )


def _build_sections(namespace: argparse.Namespace, given: frozenset[str]) -> RunConfig:
    """Build every section.

    Raises:
        ValueError: naming every required flag that is missing, or the first value that is refused.
    """
    sections = config_sections()
    partial = namespace.use_checkpoint_args
    missing = [
        spelling
        for name, cls in sections.items()
        if not (partial and name == "model")
        for spelling in missing_flags(cls, namespace)
    ]
    if missing:
        raise ValueError(f"required flags are missing: {', '.join(missing)}")
    built: dict[str, Any] = {name: build(cls, namespace) for name, cls in sections.items() if name != "model"}
    model = _partial_model(namespace, given) if partial else build(TransformerConfig, namespace)
    return RunConfig(model=model, **built)


def _partial_model(namespace: argparse.Namespace, given: frozenset[str]) -> _PartialModel:
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    shape = given & names
    if namespace.use_rotary_position_embeddings or not namespace.add_position_embedding:
        shape |= {"position_embedding_type"}
    values = {name: getattr(namespace, name, None) for name in names}
    return _PartialModel(**values, given=tuple(sorted(shape)))  # type: ignore[arg-type]


def _model_of_checkpoint(model: TransformerConfig, checkpoint_config: RunConfig | None) -> TransformerConfig:
    """The checkpoint's model, with what the command line may change; before the first save, the latter's.

    Raises:
        ValueError: if a flag asks for another model than the checkpoint's, or is needed for want of one.
    """
    assert isinstance(model, _PartialModel), "the flags were parsed with --use-checkpoint-args"
    if checkpoint_config is None:
        return _whole_model(model)
    saved = checkpoint_config.model
    changed: dict[str, Any] = {}
    for name in (*_ALWAYS_GIVEN, *model.given):
        if name in _TRAINING_FIELDS:
            changed[name] = getattr(model, name)
        elif getattr(model, name) != getattr(saved, name):
            there, here = (flag_text(TransformerConfig, name, getattr(one, name)) for one in (saved, model))
            raise ValueError(
                f"--use-checkpoint-args: the checkpoint has {there}, the command line {here}; leave the flag "
                "out"
            )
    return replace(saved, **changed)


def _whole_model(model: _PartialModel) -> TransformerConfig:
    fields = flags_of(TransformerConfig)
    missing = [one.spellings[0] for one in fields if one.required and getattr(model, one.dest) is None]
    if missing:
        raise ValueError(
            "--use-checkpoint-args: there is no checkpoint yet to take the model from, and these flags are "
            f"missing: {', '.join(missing)}"
        )
    return TransformerConfig(**{one.dest: getattr(model, one.dest) for one in fields})


def _fill_parallel(config: RunConfig) -> ParallelConfig:
    parallel = config.parallel
    sharding = parallel.data_parallel_sharding_strategy
    if parallel.use_distributed_optimizer and sharding == "no_shard":
        sharding = "optim"
    return replace(
        parallel,
        pipeline_schedule=schedule_name(config),
        num_virtual_stages_per_pipeline_rank=model_chunks(config),
        num_layers_per_virtual_pipeline_stage=None,
        use_distributed_optimizer=sharding != "no_shard",
        data_parallel_sharding_strategy=sharding,
    )


def _fill_model(model: TransformerConfig, tokenizer_vocab_size: int | None) -> TransformerConfig:
    if model.vocab_size is None and tokenizer_vocab_size is None:
        raise ValueError(UNKNOWN_VOCABULARY)
    if None not in (model.vocab_size, tokenizer_vocab_size) and model.vocab_size != tokenizer_vocab_size:
        raise ValueError(
            f"the vocabulary has {model.vocab_size} tokens by --vocab-size (or the checkpoint) and "
            f"{tokenizer_vocab_size} by the tokenizer; leave --vocab-size out, or give the right tokenizer"
        )
    recompute, selective = (model.recompute_granularity == kind for kind in ("full", "selective"))
    return replace(
        model,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_dim,
        max_position_embeddings=model.num_positions,
        vocab_size=model.vocab_size if model.vocab_size is not None else tokenizer_vocab_size,
        recompute_method=(model.recompute_method or "uniform") if recompute else None,
        recompute_num_layers=(model.recompute_num_layers or 1) if recompute else None,
        recompute_modules=(model.recompute_modules or ("core_attn",)) if selective else None,
    )
