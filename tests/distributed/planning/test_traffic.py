"""The dry count of an iteration's traffic against what a meter counts of the same iteration."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron.core.communication import Meter
from megatron.core.config import OptimizerConfig, ParallelConfig, PrecisionConfig, TransformerConfig
from megatron.core.distributed import GradientReducer, ParameterBuffers, SharedGradients
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.models import GPTModel, ModelStage
from megatron.core.optimizer import Optimizer
from megatron.core.parallel_state import create_parallel_state, model_parallel
from megatron.core.parameter import Placement, named_parameters
from megatron.core.pipeline_parallel.engine import run_pipeline
from megatron.core.pipeline_parallel.lowering import lower
from megatron.core.pipeline_parallel.p2p import PipelineChannels, TensorSpec
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.core.tensor_parallel.layers import defer_weight_gradients
from megatron.core.weight_gradients import DeferredGradients
from megatron.planning.traffic import Iteration, Sent, iteration_traffic, place_parts
from tests.harness import run_ranks

GPT2 = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 8,
    "vocab_size": 101,
    "make_vocab_size_divisible_by": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
LLAMA = {
    **GPT2,
    "swiglu": True,
    "ffn_hidden_size": 24,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MICRO_BATCH, MICROBATCHES = 2, 4

Case = tuple[dict, dict, torch.dtype]


def metered_iteration(shape: dict, layout: dict, dtype: torch.dtype) -> tuple[dict, int, int]:
    """What this rank's meter counts of one iteration, its stage, and its place among its replicas."""
    meter = Meter()
    model, parallel = TransformerConfig(**shape), ParallelConfig(**layout)
    state = create_parallel_state(parallel, "cpu", meter)
    stage = state.rank("pp")
    placed = place_parts(model, parallel, MICROBATCHES, stage)
    chunks: list[GPTModel] = []
    for part in placed.parts:
        shares = part.last and not part.first and not placed.ends_apart and stage == 0
        tied = shares and not model.untie_embeddings_and_output_weights
        chunk = GPTModel(
            model,
            ModelStage(part.layers, pre_process=part.first, post_process=part.last),
            parallel=model_parallel(state, parallel),
            placement=Placement(dtype, torch.device("cpu")),
            word_embeddings=chunks[0].embedding.word_embeddings.weight if tied else None,
        )
        initialize_parameters(chunk, 0)
        chunks.append(chunk)
    store, reducer = stores(chunks, parallel, state.data_group)
    ends = state.embedding_group if placed.ends_apart else None
    shared = SharedGradients(store, state.group("tp"), ends)
    optimizer = Optimizer(
        store,
        OptimizerConfig(),
        PrecisionConfig(),
        model_group=state.model_group,
        data_group=state.data_group,
    )
    deferred = [DeferredGradients() for _ in chunks]
    if placed.schedule.splits_backward:
        for chunk, own in zip(chunks, deferred, strict=True):
            defer_weight_gradients(chunk, own)
    tokens = torch.arange(MICRO_BATCH * model.seq_length // state.size("cp")).view(MICRO_BATCH, -1)

    def forward(chunk: int, microbatch: int, hidden_states: torch.Tensor | None) -> torch.Tensor:
        stream = RandomStream.root(0).fold("microbatch", microbatch)
        return chunks[chunk](tokens=tokens, labels=tokens, hidden_states=hidden_states, stream=stream)

    length = model.seq_length // state.size("cp")
    length //= state.size("tp") if parallel.sequence_parallel else 1
    meter.take()
    reducer.zero_grad(MICROBATCHES)
    run_pipeline(
        lower(placed.schedule)[stage],
        schedule=placed.schedule,
        forward=forward,
        channels=PipelineChannels(
            state.group("pp"),
            state.pp_gradients,
            state.group("tp"),
            scatter_gather=parallel.scatter_gather_tensors_in_pipeline and not parallel.sequence_parallel,
        ),
        activation=TensorSpec((length, MICRO_BATCH, model.hidden_size), dtype, torch.device("cpu")),
        deferred=deferred,
    )
    reducer.finish()
    shared.sum()
    optimizer.step(1e-3, 0.0)
    store.wait_for_parameters()
    return meter.take(), stage, state.data_group.rank()


def stores(
    chunks: list[GPTModel], parallel: ParallelConfig, group: dist.ProcessGroup
) -> tuple[ParameterBuffers | FullyShardedStore, GradientReducer | FullyShardedStore]:
    """Where the parameters lie, and who sums their gradients."""
    strategy = parallel.data_parallel_sharding_strategy
    reduce_dtype = torch.bfloat16 if parallel.grad_reduce_in_bf16 else None
    if strategy == "optim_grads_params":
        units = [list(chunk.decoder.layers.values()) for chunk in chunks]
        store = FullyShardedStore(chunks, units, group, reduce_dtype=reduce_dtype)
        return store, store
    buffers = ParameterBuffers(
        [named for chunk in chunks for named in named_parameters(chunk)],
        bucket_size=parallel.ddp_bucket_size if parallel.overlap_grad_reduce else None,
        strategy=strategy,
        data_group=group,
    )
    overlap = parallel.overlap_grad_reduce
    return buffers, GradientReducer(buffers, group, overlap=overlap, reduce_dtype=reduce_dtype)


def check_cases(cases: list[Case]) -> None:
    for shape, layout, dtype in cases:
        found, stage, data_rank = metered_iteration(shape, layout, dtype)
        iteration = Iteration(MICRO_BATCH, MICROBATCHES, dist.get_world_size(), dtype.itemsize)
        wanted = iteration_traffic(
            TransformerConfig(**shape), ParallelConfig(**layout), iteration, stage=stage, data_rank=data_rank
        )
        # Tokens and losses are counted by the training loop, which isn't here.
        wanted = {key: sent for key, sent in wanted.items() if key[0] != "world"}
        counted = {
            key: Sent(traffic.calls, traffic.moved_bytes)
            for key, traffic in found.items()
            if traffic.calls and key[0] != "world"
        }
        assert counted == wanted, (layout, stage)
        assert counted


def tp(size: int = 2, **more) -> dict:
    return {"tensor_model_parallel_size": size, **more}


def pp(size: int = 2, **more) -> dict:
    return {"pipeline_model_parallel_size": size, **more}


def cp(size: int, kind: str, **more) -> dict:
    return {"context_parallel_size": size, "cp_comm_type": kind, **more}


SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
MLP = {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn", "layernorm")}
OPTIM = {"data_parallel_sharding_strategy": "optim"}
PARAMS = {"data_parallel_sharding_strategy": "optim_grads_params"}
GRADS = {"data_parallel_sharding_strategy": "optim_grads"}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 1500}
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64

TWO_RANKS: list[Case] = [
    (GPT2, {}, FP32),
    (GPT2, {}, BF16),
    (GPT2, {"grad_reduce_in_bf16": True}, FP32),
    (GPT2, OVERLAP, FP32),
    (GPT2, OPTIM, BF16),
    (LLAMA, {**OPTIM, **OVERLAP}, FP32),
    (LLAMA, GRADS, FP32),
    (GPT2, PARAMS, BF16),
    ({**LLAMA, **FULL}, {**PARAMS, "grad_reduce_in_bf16": True}, FP32),
    (GPT2, tp(), FP32),
    (LLAMA, tp(), BF16),
    (GPT2, tp(**SP), FP64),
    ({**LLAMA, "num_query_groups": 1, "add_qkv_bias": True}, tp(**SP), FP32),
    ({**LLAMA, "qk_layernorm": True}, tp(), FP32),
    ({**GPT2, **FULL}, tp(), FP32),
    ({**GPT2, **FULL, "hidden_dropout": 0.1}, tp(**SP), FP32),
    ({**LLAMA, **FULL, "distribute_saved_activations": True}, tp(), FP32),
    ({**LLAMA, **BLOCK}, tp(**SP), FP32),
    ({**GPT2, **MLP}, tp(), FP32),
    ({**LLAMA, **MLP}, tp(**SP), FP32),
    (GPT2, pp(), FP32),
    (LLAMA, pp(pipeline_schedule="gpipe"), BF16),
    (GPT2, pp(num_virtual_stages_per_pipeline_rank=2), FP32),
    (GPT2, pp(pipeline_schedule="zb-h1"), FP32),
    (GPT2, pp(pipeline_schedule="zb-v"), FP32),
    (GPT2, pp(decoder_first_pipeline_num_layers=1), FP32),
    (GPT2, cp(2, "p2p"), FP32),
    (LLAMA, cp(2, "all_gather"), BF16),
    (GPT2, cp(2, "a2a"), FP32),
    ({**LLAMA, "num_query_groups": 1}, cp(2, "a2a"), FP32),
    ({**LLAMA, **FULL}, cp(2, "p2p"), FP32),
    ({**GPT2, **FULL}, cp(2, "all_gather", **OPTIM), FP32),
    ({**GPT2, **MLP}, cp(2, "p2p"), FP32),
]

FOUR_RANKS: list[Case] = [
    (GPT2, {**OPTIM, **OVERLAP}, BF16),
    (GPT2, tp(4, **SP), FP32),
    (LLAMA, tp(4, **SP), FP32),
    (LLAMA, tp(**SP, **OPTIM), FP32),
    (GPT2, tp(**pp()), FP32),
    (GPT2, tp(**pp(scatter_gather_tensors_in_pipeline=False)), FP32),
    (GPT2, tp(**pp(**SP)), BF16),
    (GPT2, tp(**pp(num_virtual_stages_per_pipeline_rank=2)), FP32),
    (LLAMA, tp(**pp(pipeline_schedule="zb-v")), FP32),
    (GPT2, tp(**pp(pipeline_schedule="zb-h1", **SP)), FP32),
    (GPT2, pp(**OPTIM), FP32),
    (GPT2, pp(**GRADS), FP32),
    (GPT2, pp(**PARAMS), FP32),
    (LLAMA, pp(pipeline_schedule="gpipe", **PARAMS), FP32),
    (GPT2, pp(num_virtual_stages_per_pipeline_rank=2, **PARAMS), FP32),
    (LLAMA, tp(**SP, **PARAMS), FP32),
    (GPT2, pp(4), FP32),
    (GPT2, tp(**cp(2, "p2p", **SP)), FP32),
    (LLAMA, tp(**cp(2, "a2a")), FP32),
    (GPT2, cp(4, "all_gather"), FP32),
    (LLAMA, pp(**cp(2, "p2p")), FP32),
]


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_a_dry_count_is_what_the_meter_counts(world, cases):
    shape = dataclasses.replace(TransformerConfig(**GPT2), vocab_size=101)
    assert shape.padded_vocab_size(world) > 101  # padding travels with the weights
    run_ranks(world, check_cases, cases)
