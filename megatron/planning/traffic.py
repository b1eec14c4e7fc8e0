"""What one rank sends in a training iteration, counted without running it.

The same calls and bytes that ``--log-communication`` measures, by the convention of
:mod:`megatron.core.communication`: bytes that one rank sends where collectives run on a ring. Each formula is
derived in docs/communication.md.

Letters: s sequence, b micro-batch, m micro-batches, h hidden, t, p, d, c tensor, pipeline, data and context
ranks, e bytes of an element of weights and activations. An *activation* is what one rank and micro-batch has
between two layers, whole over tp: A = s/c b h e bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.config import ParallelConfig, TransformerConfig
from megatron.core.pipeline_parallel.actions import Schedule
from megatron.core.pipeline_parallel.partition import count_chunks, deal_layers
from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from megatron.planning.flat_buckets import (
    FlatBucket,
    divided_bucket,
    flat_buckets,
    summed_over_ends,
    summed_over_tp,
)
from megatron.planning.parameters import LocalParameter, Part, part_parameters

LOSS_BLOCK_BYTES = 2**27
"""Logits that the output layer and its loss handle at a time."""


@dataclass(frozen=True)
class Iteration:
    """How a global batch is worked through."""

    micro_batch_size: int
    """Sequences of a micro-batch (b)."""
    num_microbatches: int
    """Micro-batches of each pipeline (m)."""
    world_size: int
    """Ranks of the job."""
    element_bytes: int = 2
    """Bytes of an element of weights and activations (e): 2 in bf16 and fp16, 4 in float32."""


@dataclass(frozen=True)
class Sent:
    """What one rank sends of one kind on one axis in an iteration."""

    calls: int = 0
    """Collectives, or tensors sent."""
    moved_bytes: float = 0.0


Traffic = dict[tuple[str, str], Sent]
"""By axis (tp, pp, dp, cp, world) and kind (all_reduce, all_gather, reduce_scatter, all_to_all, send)."""


class _Tally:
    """Adds calls up. Bytes are given for the whole tensor; of which a ring sends a share."""

    def __init__(self) -> None:
        self.traffic: Traffic = {}

    def add(self, axis: str, kind: str, calls: int, moved_bytes: float) -> None:
        """Count calls that send so many bytes each."""
        if not calls:
            return
        before = self.traffic.get((axis, kind), Sent())
        self.traffic[axis, kind] = Sent(before.calls + calls, before.moved_bytes + calls * moved_bytes)

    def reduce(self, axis: str, ranks: int, calls: int, whole: float) -> None:
        """All-reduces of a tensor of so many bytes: 2 (n - 1)/n of it."""
        if ranks > 1:
            self.add(axis, "all_reduce", calls, 2 * (ranks - 1) * whole / ranks)

    def gather(self, axis: str, ranks: int, calls: int, whole: float) -> None:
        """All-gathers to so many bytes: (n - 1)/n of them."""
        if ranks > 1:
            self.add(axis, "all_gather", calls, (ranks - 1) * whole / ranks)

    def scatter(self, axis: str, ranks: int, calls: int, whole: float) -> None:
        """Reduce-scatters of so many bytes: (n - 1)/n of them."""
        if ranks > 1:
            self.add(axis, "reduce_scatter", calls, (ranks - 1) * whole / ranks)


@dataclass(frozen=True)
class Placed:
    """The parts of the model that one stage holds, and where all parts are."""

    schedule: Schedule
    stage: int
    parts: tuple[Part, ...]
    """One for each chunk."""

    @property
    def ends_apart(self) -> bool:
        """Whether embeddings and loss are on different stages."""
        return self.schedule.place(0)[0] != self.schedule.place(self.schedule.last_part)[0]


def place_parts(
    model: TransformerConfig, parallel: ParallelConfig, num_microbatches: int, stage: int
) -> Placed:
    """Which layers a stage holds, as the flags deal them.

    Raises:
        ValueError: if the flags don't fit each other.
    """
    stages = parallel.pipeline_model_parallel_size
    chunks = count_chunks(
        model.num_layers,
        stages,
        layers_per_chunk=parallel.num_layers_per_virtual_pipeline_stage,
        chunks=parallel.num_virtual_stages_per_pipeline_rank,
        layout=parallel.pipeline_model_parallel_layout,
    )
    name = parallel.pipeline_schedule or ("interleaved" if (chunks or 1) > 1 else "1f1b")
    if chunks is None:
        chunks = SCHEDULE_CHUNKS[name].start
    schedule = build_schedule(
        name,
        stages=stages,
        microbatches=num_microbatches,
        chunks=chunks,
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage
        if name == "interleaved"
        else None,
    )
    ranges = deal_layers(
        model.num_layers,
        stages,
        chunks,
        schedule.placement,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split,
        layout=parallel.pipeline_model_parallel_layout,
    )
    numbers = [schedule.part(stage, chunk) for chunk in range(chunks)]
    parts = tuple(Part(ranges[part], part == 0, part == schedule.last_part) for part in numbers)
    return Placed(schedule, stage, parts)


def iteration_traffic(
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    *,
    stage: int = 0,
    data_rank: int = 0,
) -> Traffic:
    """What a rank sends in one training iteration in which every token counts.

    Tokens that a loss mask leaves out spare some bytes of the loss under tensor parallelism. Evaluation,
    checkpoints and the checks at the start of a run send more.

    Args:
        model: its shape; every value resolved.
        parallel: the layout.
        iteration: how the global batch is worked through.
        stage: the rank's pipeline stage.
        data_rank: its place among the ranks that hold the same parameters (data and context parallel). It
            matters only where optimizer state is divided, for what shared parameters the rank's slice has.

    Returns:
        Calls and bytes by axis and kind. All tensor-parallel ranks of a stage send the same.

    Raises:
        ValueError: if the flags don't fit each other, or the world does not divide by them.
    """
    if iteration.world_size % parallel.model_parallel_size:
        raise ValueError(
            f"world size {iteration.world_size} does not divide by tensor x pipeline x context size "
            f"{parallel.model_parallel_size}"
        )
    placed = place_parts(model, parallel, iteration.num_microbatches, stage)
    tally = _Tally()
    for part in placed.parts:
        _count_layers(tally, model, parallel, iteration, len(part.layers))
        _count_ends(tally, model, parallel, iteration, part)
    _count_boundaries(tally, model, parallel, iteration, placed)
    _count_gradients(tally, model, parallel, iteration, placed, data_rank)
    _count_agreement(tally, parallel, iteration)
    return tally.traffic


def _activation(model: TransformerConfig, parallel: ParallelConfig, iteration: Iteration) -> int:
    """A = s/c b h e."""
    tokens = model.seq_length // parallel.context_parallel_size * iteration.micro_batch_size
    return tokens * model.hidden_size * iteration.element_bytes


def _recomputed_layers(model: TransformerConfig, layers: int) -> tuple[int, int]:
    """Of a chunk's layers those that run forward again, and in how many units."""
    if model.recompute_granularity != "full":
        return 0, 0
    count = model.recompute_num_layers or 1
    if model.recompute_method == "block":
        return min(count, layers), min(count, layers)
    return layers, -(-layers // count)


def _count_layers(
    tally: _Tally,
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    layers: int,
) -> None:
    """Layers' own traffic: two linear pairs over tp, attention over cp."""
    t, m = parallel.tensor_model_parallel_size, iteration.num_microbatches
    whole = _activation(model, parallel, iteration)
    again, units = _recomputed_layers(model, layers)
    modules = model.recompute_modules or ("core_attn",)
    mlp_again = model.recompute_granularity == "selective" and "mlp" in modules
    # Pairs of a column- and a row-parallel product: two a layer, and those that run forward again.
    pairs = m * 2 * layers
    pairs_again = m * (2 * again + layers * mlp_again)
    if parallel.sequence_parallel:
        tally.gather("tp", t, 3 * pairs + pairs_again, whole)
        tally.scatter("tp", t, 2 * pairs + pairs_again, whole)
    else:
        tally.reduce("tp", t, 2 * pairs + pairs_again, whole)
        if model.distribute_saved_activations:
            tally.gather("tp", t, m * units, whole)
    _count_attention(tally, model, parallel, iteration, m * layers, m * again)


def _count_attention(
    tally: _Tally,
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    layers: int,
    again: int,
) -> None:
    """Attention over context-parallel ranks, once forward and backward, and ``again`` forward."""
    c, t = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if c == 1:
        return
    head = model.seq_length // c * iteration.micro_batch_size * model.head_dim * iteration.element_bytes
    queries, keys = model.num_attention_heads // t, max(model.num_kv_groups // t, 1)
    if parallel.cp_comm_type == "p2p":
        tally.add("cp", "send", (c - 1) * (3 * layers + again), 2 * keys * head)
    elif parallel.cp_comm_type == "all_gather":
        tally.gather("cp", c, 2 * layers + again, c * 2 * keys * head)
        tally.scatter("cp", c, layers, c * 2 * keys * head)
    else:
        there = (queries + 2 * math.lcm(keys, c)) * head  # queries, keys and values, or their gradients
        for heads in (there, queries * head):
            tally.add("cp", "all_to_all", 2 * layers + again, (c - 1) * heads / c)


def _count_ends(
    tally: _Tally,
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    part: Part,
) -> None:
    """Embeddings before a part's layers, output layer and loss after them."""
    t, m = parallel.tensor_model_parallel_size, iteration.num_microbatches
    whole = _activation(model, parallel, iteration)
    if part.first and parallel.sequence_parallel:
        tally.scatter("tp", t, m, whole)
        tally.gather("tp", t, m, whole)
    elif part.first:
        tally.reduce("tp", t, m, whole)
    if not part.last:
        return
    tokens = model.seq_length // parallel.context_parallel_size * iteration.micro_batch_size
    logits = tokens * (model.padded_vocab_size(t) // t) * iteration.element_bytes
    block = -(-tokens // max(-(-logits // LOSS_BLOCK_BYTES), 1))
    blocks = -(-tokens // block)
    # For each token its largest logit, then a sum of exponentials and the label's logit.
    wide = max(iteration.element_bytes, 4)
    tally.reduce("tp", t, m * blocks, tokens * wide / blocks)
    tally.reduce("tp", t, m * blocks, 2 * tokens * wide / blocks)
    if parallel.sequence_parallel:
        tally.gather("tp", t, m, whole)
        tally.scatter("tp", t, m, whole)
    else:
        tally.reduce("tp", t, m * blocks, whole / blocks)


def _count_boundaries(
    tally: _Tally,
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    placed: Placed,
) -> None:
    """Activations to the stage of the next part, gradients to that of the one before."""
    t, m = parallel.tensor_model_parallel_size, iteration.num_microbatches
    whole = _activation(model, parallel, iteration)
    sliced = parallel.sequence_parallel or (
        parallel.scatter_gather_tensors_in_pipeline and whole // iteration.element_bytes % t == 0
    )
    # A gradient comes back over every boundary that an activation crosses, so as many arrive as leave.
    tally.add("pp", "send", m * _neighbours_elsewhere(placed), whole / t if sliced else whole)
    if sliced and not parallel.sequence_parallel:
        tally.gather("tp", t, m * _neighbours_elsewhere(placed), whole)


def _neighbours_elsewhere(placed: Placed) -> int:
    """Parts next to those of a stage that are on other stages."""
    schedule = placed.schedule
    found = 0
    for chunk in range(schedule.chunks):
        part = schedule.part(placed.stage, chunk)
        for beside in (part - 1, part + 1):
            if 0 <= beside <= schedule.last_part:
                found += schedule.place(beside)[0] != placed.stage
    return found


def _count_gradients(
    tally: _Tally,
    model: TransformerConfig,
    parallel: ParallelConfig,
    iteration: Iteration,
    placed: Placed,
    data_rank: int,
) -> None:
    """Sums of gradients over the ranks that hold the same parameters, and what they gather of weights."""
    ranks = iteration.world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    )
    strategy = sharding_strategy(parallel)
    wide = max(iteration.element_bytes, 4)
    reduced = 2 if parallel.grad_reduce_in_bf16 else wide
    groups = [
        part_parameters(model, parallel, part, tied_elsewhere=placed.ends_apart) for part in placed.parts
    ]
    if strategy == "optim_grads_params":
        buckets = _count_divided_weights(tally, iteration, placed, groups, (ranks, data_rank, reduced))
    else:
        own = (ranks, data_rank) if strategy != "no_shard" else (1, 0)
        buckets = flat_buckets(_each_once(groups), _bucket_size(parallel, ranks), *own)
        for bucket in buckets:
            if strategy == "no_shard":
                tally.reduce("dp", ranks, 1, bucket.size * reduced)
                continue
            times = iteration.num_microbatches if strategy == "optim_grads" else 1
            tally.scatter("dp", ranks, times, bucket.size * reduced)
            tally.gather("dp", ranks, 1, bucket.size * iteration.element_bytes)
        if strategy == "optim_grads":
            tally.reduce("dp", ranks, 1, 2 * 8)  # did all reduce the buckets in one order?
    t = parallel.tensor_model_parallel_size
    if over_tp := summed_over_tp(buckets):
        tally.reduce("tp", t, 1, over_tp * wide)
    if over_ends := summed_over_ends(buckets):
        tally.reduce("pp", 2, 1, over_ends * wide)


def _count_divided_weights(
    tally: _Tally,
    iteration: Iteration,
    placed: Placed,
    groups: list[list[list[LocalParameter]]],
    share: tuple[int, int, int],
) -> list[FlatBucket]:
    """ZeRO-3: gather each layer before its forward and backward, and scatter its gradient.

    What is in no layer is gathered for a forward, and kept until the next backward of its chunk has ended.

    Args:
        tally: where to count.
        iteration: how the batch is worked through.
        placed: the stage, with the order of its passes.
        groups: parameters of each chunk.
        share: data-parallel ranks, this one, and bytes of an element of a gradient that travels.

    Returns:
        What the rank updates.
    """
    ranks, data_rank, reduced = share
    buckets: list[FlatBucket] = []
    for chunk, (before, *layers, after) in enumerate(groups):
        units = [divided_bucket(layer, ranks, data_rank) for layer in layers]
        root = divided_bucket([*before, *after], ranks, data_rank)
        gathers, backwards, whole = 0, 0, False
        for action in placed.schedule.stages[placed.stage]:
            if action.chunk == chunk:
                gathers += not whole
                whole = action.kind == "forward"
                backwards += action.kind != "forward"
        for unit in units:
            tally.gather("dp", ranks, 2 * backwards, unit.size * iteration.element_bytes)
            tally.scatter("dp", ranks, backwards, unit.size * reduced)
        if root.size:
            tally.gather("dp", ranks, gathers, root.size * iteration.element_bytes)
            tally.scatter("dp", ranks, backwards, root.size * reduced)
        buckets += [*units, root]
    return buckets


def _each_once(groups: list[list[list[LocalParameter]]]) -> list[LocalParameter]:
    """The parameters of all chunks, one after another."""
    return [parameter for chunk in groups for group in chunk for parameter in group]


def _count_agreement(tally: _Tally, parallel: ParallelConfig, iteration: Iteration) -> None:
    """What ranks tell each other, in float64: tokens that count, with waits for data; losses; the norm."""
    world = iteration.world_size
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    tally.reduce("world", world, 1, 3 * 8)
    tally.reduce("world", world, 1, 8)
    tally.reduce("world", model, 1, 3 * 8)
    divided = sharding_strategy(parallel) != "no_shard"
    tally.reduce("dp", world // model, 1, (3 if divided else 1) * 8)


def sharding_strategy(parallel: ParallelConfig) -> str:
    """What data-parallel ranks divide among them, whichever flag says so."""
    if parallel.data_parallel_sharding_strategy == "no_shard" and parallel.use_distributed_optimizer:
        return "optim"
    return parallel.data_parallel_sharding_strategy


def _bucket_size(parallel: ParallelConfig, ranks: int) -> int | None:
    """Elements of a bucket; None for a single one, where no bucket is reduced or gathered by itself."""
    overlaps = parallel.overlap_grad_reduce or parallel.overlap_param_gather
    if not overlaps and sharding_strategy(parallel) != "optim_grads":
        return None
    return parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * ranks)


def total(traffics: Iterable[Traffic]) -> Traffic:
    """What several ranks, or several iterations, send together."""
    found: Traffic = {}
    for traffic in traffics:
        for key, sent in traffic.items():
            before = found.get(key, Sent())
            found[key] = Sent(before.calls + sent.calls, before.moved_bytes + sent.moved_bytes)
    return found
