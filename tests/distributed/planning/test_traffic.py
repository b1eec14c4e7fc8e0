"""The dry count of an iteration's traffic against what a meter counts of a training step."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.communication import Meter
from megatron.core.parallel_state import create_parallel_state
from megatron.planning.traffic import Iteration, Sent, iteration_traffic
from megatron.training.run import Run
from megatron.training.step import train_step
from tests import training_harness
from tests.harness import run_ranks

GPT2 = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 2 "
    "--global-batch-size 16"
)
LLAMA = (
    f"{GPT2} --swiglu --ffn-hidden-size 24 --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
ONE_GROUP = LLAMA.replace("--num-query-groups 2", "--num-query-groups 1")

Case = tuple[str, str, torch.dtype]
"""Flags of a shape, flags of a layout, format of weights and activations."""


def metered_step(argv: list[str], dtype: torch.dtype) -> tuple[Run, dict[tuple[str, str], Sent]]:
    """A run whose first training step has been made, and what this rank's meter has counted of it."""
    meter = Meter()
    metered = partial(create_parallel_state, meter=meter)
    with mock.patch.object(training_harness, "create_parallel_state", metered):
        run = training_harness.start(argv, dtype)
    meter.take()
    train_step(run)
    run.store.wait_for_parameters()
    counted = {key: Sent(one.calls, one.moved_bytes) for key, one in meter.take().items()}
    return run, counted


def check_cases(prefix: str, cases: list[Case]) -> None:
    for shape, layout, dtype in cases:
        argv = training_harness.flags(prefix, shape.split(), *layout.split())
        argv.remove("--eod-mask-loss")  # every token is to count
        run, counted = metered_step(argv, dtype)
        plan, state = run.division.batch, run.state
        iteration = Iteration(
            plan.micro_batch_size, plan.num_microbatches, dist.get_world_size(), dtype.itemsize
        )
        wanted = iteration_traffic(
            run.config.model,
            run.config.parallel,
            iteration,
            stage=state.rank("pp"),
            data_rank=state.data_group.rank(),
        )
        assert counted == wanted, (layout, state.rank("pp"))
        assert counted


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
MLP = "--recompute-granularity selective --recompute-modules mlp core_attn layernorm"
TP, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
SP = f"{TP} --sequence-parallel"
PP, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
CP, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
OPTIM = "--use-distributed-optimizer"
GRADS = "--data-parallel-sharding-strategy optim_grads"
PARAMS = "--data-parallel-sharding-strategy optim_grads_params"
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 1500"
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64

TWO_RANKS: list[Case] = [
    (GPT2, "", FP32),
    (GPT2, "--grad-reduce-in-bf16", FP32),
    (GPT2, OVERLAP, BF16),
    (GPT2, OPTIM, BF16),
    (LLAMA, f"{OPTIM} {OVERLAP} --overlap-param-gather", FP32),
    (LLAMA, GRADS, FP32),
    (GPT2, PARAMS, BF16),
    (f"{LLAMA} {FULL}", f"{PARAMS} --grad-reduce-in-bf16", FP32),
    (GPT2, TP, FP32),
    (LLAMA, TP, BF16),
    (GPT2, SP, FP64),
    (f"{ONE_GROUP} --add-qkv-bias", SP, FP32),
    (f"{LLAMA} --qk-layernorm", TP, FP32),
    (f"{GPT2} {FULL}", TP, FP32),
    (f"{GPT2} {FULL} --hidden-dropout 0.1", SP, FP32),
    (f"{LLAMA} {FULL} --distribute-saved-activations", TP, FP32),
    (f"{LLAMA} {BLOCK}", SP, FP32),
    (f"{GPT2} {MLP}", TP, FP32),
    (f"{LLAMA} {MLP}", SP, FP32),
    (GPT2, PP, FP32),
    (LLAMA, f"{PP} --pipeline-schedule gpipe", BF16),
    (GPT2, VPP, FP32),
    (GPT2, f"{PP} --pipeline-schedule zb-h1", FP32),
    (GPT2, f"{PP} --pipeline-schedule zb-v", FP32),
    (GPT2, f"{PP} --decoder-first-pipeline-num-layers 1", FP32),
    (GPT2, CP, FP32),
    (LLAMA, f"{CP} --cp-comm-type all_gather", BF16),
    (GPT2, f"{CP} --cp-comm-type a2a", FP32),
    (ONE_GROUP, f"{CP} --cp-comm-type a2a", FP32),
    (f"{LLAMA} {FULL}", CP, FP32),
    (f"{GPT2} {FULL}", f"{CP} --cp-comm-type all_gather {OPTIM}", FP32),
    (f"{GPT2} {MLP}", CP, FP32),
]

FOUR_RANKS: list[Case] = [
    (GPT2, f"{OPTIM} {OVERLAP}", BF16),
    (GPT2, f"{TP4} --sequence-parallel", FP32),
    (LLAMA, f"{TP4} --sequence-parallel", FP32),
    (LLAMA, f"{SP} {OPTIM}", FP32),
    (LLAMA, f"{SP} {PARAMS}", FP32),
    (GPT2, f"{TP} {PP}", FP32),
    (GPT2, f"{TP} {PP} --no-scatter-gather-tensors-in-pipeline", FP32),
    (GPT2, f"{SP} {PP}", BF16),
    (GPT2, f"{TP} {VPP}", FP32),
    (GPT2, f"{TP} {PP} --pipeline-schedule zb-v", FP32),
    (GPT2, f"{SP} {PP} --pipeline-schedule zb-h1", FP32),
    (GPT2, f"{PP} {OPTIM}", FP32),
    (GPT2, f"{PP} {GRADS}", FP32),
    (GPT2, f"{PP} {PARAMS}", FP32),
    (LLAMA, f"{PP} --pipeline-schedule gpipe {PARAMS}", FP32),
    (GPT2, f"{VPP} {PARAMS}", FP32),
    (GPT2, PP4, FP32),
    (GPT2, f"{SP} {CP}", FP32),
    (LLAMA, f"{TP} {CP} --cp-comm-type a2a", FP32),
    (GPT2, f"{CP4} --cp-comm-type all_gather", FP32),
    (LLAMA, f"{PP} {CP}", FP32),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, TWO_RANKS),
        (4, FOUR_RANKS[::4]),
        pytest.param(4, FOUR_RANKS, marks=pytest.mark.nightly),
    ],
)
def test_a_dry_count_is_what_the_meter_counts(tmp_path, world, cases):
    run_ranks(world, check_cases, training_harness.write_corpus(tmp_path / "corpus"), cases)
