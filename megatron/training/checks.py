"""What must fit together across the sections of a run's settings.

All of it is checked before any process group is made, on every rank alike. A message names the flags, the
numbers, and what would be valid.
"""

import math
from dataclasses import replace

from megatron.core.config import ParallelConfig, TransformerConfig
from megatron.core.datasets.data_paths import split_blends
from megatron.core.datasets.prefix import check_prefix
from megatron.core.datasets.split import parse_split
from megatron.training.batch_size import in_steps
from megatron.training.config import RunConfig
from megatron.training.layout import model_chunks, pipeline_plan, schedule_name

UNKNOWN_VOCABULARY = (
    "the size of the vocabulary is not known: give --tokenizer-type and its files (--vocab-file and "
    "--merge-file alone mean GPT2BPETokenizer), or, for data of ready-made token ids, --vocab-size"
)


def validate(config: RunConfig, world_size: int) -> None:
    """Refuse settings that cannot make a run of ``world_size`` ranks; resolved or not.

    Raises:
        ValueError: for the first thing that does not fit.
    """
    _check_lengths(config)
    _check_tensor_parallel(config.model, config.parallel.tensor_model_parallel_size)
    _check_saved_activations(config.model, config.parallel)
    _check_sequence(config.model, config.parallel)
    _check_stages(config)
    _check_world(config, world_size)
    _check_batch(config, world_size // config.parallel.model_parallel_size)
    _check_pipeline(config, world_size)
    _check_sharding(config)
    _check_data(config)


def check_vocabulary(config: RunConfig) -> None:
    """Refuse settings of which no vocabulary follows; without --use-checkpoint-args, which may hold one.

    Raises:
        ValueError: naming the flags that would give one.
    """
    if config.model.vocab_size is None and config.tokenizer.tokenizer_type is None:
        raise ValueError(UNKNOWN_VOCABULARY)


def check_data_files(config: RunConfig) -> None:
    """Look for the files of all datasets before anything is built, which may take long.

    Raises:
        ValueError: naming the first prefix without its two files, and what was probably meant.
    """
    blends = split_blends(config.data, validation_sets=config.evaluation.multiple_validation_sets)
    if not config.data.mock_data:
        for prefix in dict.fromkeys(
            prefix for blend in blends.values() if blend for prefix in blend.prefixes
        ):
            check_prefix(prefix)


def divisors(number: int) -> str:
    """The whole numbers that divide ``number``, as text."""
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


def _check_lengths(config: RunConfig) -> None:
    """The run has one length, and iteration- and sample-valued flags do not mix."""
    training, schedule = config.training, config.schedule
    if (training.train_iters is None) == (training.train_samples is None):
        given = "neither is given" if training.train_iters is None else "both are given"
        raise ValueError(f"give either --train-iters or --train-samples: {given}")
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(schedule, f"{stem}_{other}")
        if value:
            name = stem.replace("_", "-")
            raise ValueError(
                f"--{name}-{other} {value} does not go with --train-{unit}: give --{name}-{unit}, or count "
                f"the run by --train-{other}"
            )


def _check_world(config: RunConfig, world_size: int) -> None:
    parallel = config.parallel
    model_size = parallel.model_parallel_size
    if world_size % model_size:
        tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        context = parallel.context_parallel_size
        factors = f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}"
        factors += f" x --context-parallel-size {context}" if context > 1 else ""
        multiples = (world_size // model_size * model_size, (world_size // model_size + 1) * model_size)
        start = " or ".join(str(size) for size in multiples if size)
        raise ValueError(
            f"world size {world_size} is not a multiple of {factors} = {model_size}: start {start} ranks, or "
            f"choose sizes whose product is one of {divisors(world_size)}"
        )


def _check_tensor_parallel(model: TransformerConfig, tensor: int) -> None:
    heads, groups = model.num_attention_heads, model.num_kv_groups
    if heads % tensor:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide by --tensor-model-parallel-size {tensor}: give a "
            f"tensor-parallel size of {divisors(heads)}, or a multiple of {tensor} heads"
        )
    if groups % tensor and tensor % groups:
        sizes = [
            one
            for one in range(1, heads + 1)
            if heads % one == 0 and (groups % one == 0 or one % groups == 0)
        ]
        raise ValueError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tensor}: one must divide the "
            f"other; give a tensor-parallel size of {', '.join(map(str, sizes))}"
        )
    if model.ffn_size % tensor:
        raise ValueError(
            f"--ffn-hidden-size {model.ffn_size} does not divide by --tensor-model-parallel-size {tensor}: "
            f"give a multiple of {tensor}, such as {-(-model.ffn_size // tensor) * tensor}"
        )


def _check_saved_activations(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """Layer inputs divide along the hidden dim; under sequence parallelism they are divided already."""
    tensor = parallel.tensor_model_parallel_size
    divided = model.distribute_saved_activations and not parallel.sequence_parallel
    if divided and model.hidden_size % tensor:
        raise ValueError(
            f"--distribute-saved-activations: --hidden-size {model.hidden_size} does not divide by "
            f"--tensor-model-parallel-size {tensor}: leave it out, or give a multiple of {tensor}"
        )


def _check_sequence(model: TransformerConfig, parallel: ParallelConfig) -> None:
    """A sequence divides over the ranks that share it."""
    length, tensor, context = (
        model.seq_length,
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
    )
    multiple = 2 * context if context > 1 else 1
    why = f"2 x --context-parallel-size {context}" if context > 1 else ""
    if parallel.sequence_parallel and tensor > 1:
        # Each rank's part of the sequence is divided over the tensor-parallel ranks once more.
        multiple = math.lcm(multiple, context * tensor)
        own = f"--tensor-model-parallel-size {tensor} (--sequence-parallel)"
        why = f"{why} and by --context-parallel-size x {own}" if why else own
    if length % multiple:
        near = sorted({max(length // multiple, 1) * multiple, (length // multiple + 1) * multiple})
        raise ValueError(
            f"--seq-length {length} does not divide by {why}: give a multiple of {multiple}, such as "
            f"{' or '.join(map(str, near))}"
        )
    heads = model.num_attention_heads // tensor
    if context > 1 and parallel.cp_comm_type == "a2a" and heads % context:
        raise ValueError(
            f"--cp-comm-type a2a deals the {heads} heads of a tensor-parallel rank (--num-attention-heads "
            f"{model.num_attention_heads} / --tensor-model-parallel-size {tensor}) over "
            f"--context-parallel-size {context}, which does not divide them: give a size of "
            f"{divisors(heads)}, or --cp-comm-type p2p"
        )


def _check_stages(config: RunConfig) -> None:
    """Every stage gets a layer, or what counts as one."""
    parallel, layers = config.parallel, config.model.num_layers
    stages = parallel.pipeline_model_parallel_size
    accounted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    most = layers + accounted
    if stages > most and parallel.pipeline_model_parallel_layout is None:
        counted = f" and {accounted} more that are counted as layers" if accounted else ""
        raise ValueError(
            f"--pipeline-model-parallel-size {stages} is more than --num-layers {layers}{counted}: every "
            f"stage needs a layer, so give at most {most} stages"
        )


def _check_pipeline(config: RunConfig, world_size: int) -> None:
    """Layers, stages, chunks and micro-batches make a schedule, whatever the size of a global batch."""
    replicas = world_size // config.parallel.model_parallel_size
    sized = with_batch_size(config, replicas)
    for size in (*sized.batch_sizes.sizes, sized.eval_global_batch_size):
        pipeline_plan(config, size // (config.training.micro_batch_size * replicas))


def _check_sharding(config: RunConfig) -> None:
    """What is divided over data-parallel ranks goes with the rest."""
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if strategy != "optim_grads_params":
        return
    if schedule_name(config).startswith("zb-"):
        raise ValueError(
            f"--data-parallel-sharding-strategy {strategy} does not go with --pipeline-schedule "
            f"{schedule_name(config)}, which forms weight gradients apart from the backward pass: give 1f1b "
            "or interleaved, or --data-parallel-sharding-strategy optim_grads"
        )
    tied = not config.model.untie_embeddings_and_output_weights
    if tied and parallel.pipeline_model_parallel_size == 1 and model_chunks(config) > 1:
        raise ValueError(
            f"--data-parallel-sharding-strategy {strategy} cannot divide tied embeddings whose two ends are "
            f"in different chunks of one stage: leave out what asks for {model_chunks(config)} chunks, or "
            "give --untie-embeddings-and-output-weights"
        )


def with_batch_size(config: RunConfig, replicas: int) -> RunConfig:
    """The settings with their global batch size: as given, the largest step, or a micro-batch a replica.

    Raises:
        ValueError: if --global-batch-size is not the largest size of --step-batch-size-schedule.
    """
    training = config.training
    size = training.global_batch_size
    if training.step_batch_size_schedule is not None:
        sizes = in_steps(training.step_batch_size_schedule, config.model.seq_length).sizes
        if size not in (None, max(sizes)):
            raise ValueError(
                f"--global-batch-size {size} is not the largest of --step-batch-size-schedule "
                f"{training.step_batch_size_schedule!r}, {max(sizes)}: leave it out"
            )
        size = max(sizes)
    size = size or training.micro_batch_size * replicas
    return replace(config, training=replace(training, global_batch_size=size))


def _check_batch(config: RunConfig, replicas: int) -> None:
    micro, batch = config.training.micro_batch_size, config.training.global_batch_size
    at_once = micro * replicas
    if batch is not None and batch % at_once:
        near = sorted({max(batch // at_once, 1) * at_once, (batch // at_once + 1) * at_once})
        ways = [f"--global-batch-size {' or '.join(map(str, near))}"]
        if batch % replicas == 0:
            ways.append(f"--micro-batch-size {divisors(batch // replicas)}")
        raise ValueError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x data-parallel "
            f"size {replicas} = {at_once}: give {', or one of '.join(ways)}"
        )
    sizes = with_batch_size(config, replicas).batch_sizes.sizes
    bad = [size for size in sizes if size % at_once]
    if bad:
        flag = "rampup" if config.training.rampup_batch_size is not None else "step"
        rest = "batch-size" if flag == "rampup" else "batch-size-schedule"
        raise ValueError(
            f"--{flag}-{rest}: the global batch sizes {', '.join(map(str, bad))} are not multiples of "
            f"--micro-batch-size {micro} x data-parallel size {replicas} = {at_once}"
        )
    evaluation = config.evaluation.eval_global_batch_size
    if evaluation is not None and evaluation % at_once:
        raise ValueError(
            f"--eval-global-batch-size {evaluation} is not a multiple of --micro-batch-size {micro} x "
            f"data-parallel size {replicas} = {at_once}"
        )
    samples = config.training.train_samples
    if samples is not None and samples < sizes[0]:
        raise ValueError(f"--train-samples {samples} is less than one global batch: give at least {sizes[0]}")


def _check_data(config: RunConfig) -> None:
    """There is training data, and its description can be read; whether the files are there is found later."""
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        raise ValueError("there is nothing to train on: give --data-path, --train-data-path or --mock-data")
    split_blends(data, validation_sets=config.evaluation.multiple_validation_sets)
    if data.split is not None:
        parse_split(data.split)
