"""Whole training runs inside a test: the loop and all that is under it, on ranks of ``tests.harness``."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.datasets import IndexedDatasetBuilder
from megatron.core.parallel_state import create_parallel_state
from megatron.core.tokenizers import build_tokenizer
from megatron.training.arguments import parse_arguments, resolve
from megatron.training.checkpointing import check_source, find_source, load_run, owned_weights
from megatron.training.hooks import Hook
from megatron.training.initialize import Runtime
from megatron.training.progress import StepOutcome
from megatron.training.run import Run
from megatron.training.setup import attach_data, build_run
from megatron.training.training import build_hooks, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pretrain_gpt import GPTTask

VOCAB = 101
"""A vocabulary that no tensor-parallel size divides; its last id, 100, ends documents."""


def write_corpus(prefix: Path, documents: int = 60, seed: int = 0) -> str:
    """An indexed dataset of random documents of 1 to 40 tokens that end in EOD; its prefix."""
    draws = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            # A skewed distribution, so that there is something to learn.
            body = np.minimum(draws.geometric(0.08, size=draws.integers(1, 40)), VOCAB - 2)
            builder.add_document(np.append(body, VOCAB - 1))
        builder.finalize()
    return str(prefix)


GPT2_SHAPE = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32").split()
LLAMA_SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --swiglu --ffn-hidden-size 96 "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
).split()
SHAPES = {"gpt2": GPT2_SHAPE, "llama": LLAMA_SHAPE}


def flags(prefix: str, shape: list[str], *more: str) -> list[str]:
    """The command line of a small, exact run: 20 iterations, no dropout, EODs masked."""
    common = (
        f"--data-path {prefix} --split 90,10,0 --tokenizer-type NullTokenizer --vocab-size {VOCAB} "
        "--make-vocab-size-divisible-by 8 --num-workers 0 --eod-mask-loss --attention-dropout 0 "
        "--hidden-dropout 0 --global-batch-size 8 --micro-batch-size 1 --train-iters 20 --lr 1e-2 "
        "--lr-decay-style constant --clip-grad 1.0 --eval-iters 0 --log-interval 1000 --seed 7"
    ).split()
    return [*shape, *common, *more]


@dataclass
class Recorder(Hook):
    """Keeps the outcome of every iteration."""

    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    consumed: dict[int, int] = field(default_factory=dict)

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        self.outcomes[run.progress.iteration] = outcome
        self.consumed[run.progress.iteration] = run.progress.consumed_samples


@dataclass
class Record:
    """What one rank saw of a run."""

    outcomes: dict[int, StepOutcome]
    consumed: dict[int, int]
    weights: dict[str, torch.Tensor]
    """Main weights by name, this rank's true rows only, as (piece start, rows) pairs joined by the test."""

    @property
    def losses(self) -> list[float]:
        return [outcome.losses["lm loss"] for outcome in self.outcomes.values()]

    @property
    def norms(self) -> list[float]:
        return [outcome.grad_norm for outcome in self.outcomes.values()]


def start(argv: list[str], dtype: torch.dtype | None = None) -> Run:
    """Set up a run on the ranks that are already there."""
    config = parse_arguments(argv, "test")
    source = find_source(config.checkpoint)
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size)
    config = resolve(
        config,
        checkpoint_config=source.config if source else None,
        tokenizer_vocab_size=tokenizer.vocab_size,
        world_size=dist.get_world_size(),
    )
    if source is not None:
        check_source(source, config)
    runtime = Runtime(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        device=torch.device("cpu"),
        state=create_parallel_state(config.parallel, "cpu"),
    )
    resumed = source.config if source is not None and source.resumes else None
    run = build_run(config, GPTTask(), runtime, resumed, dtype=dtype)
    if source is not None:
        load_run(run, source)
    saved_data = source.manifest.state.get("data") if source is not None and source.resumes else None
    attach_data(run, tokenizer, saved_data)
    return run


def train_run(argv: list[str], dtype: torch.dtype | None = None) -> Record:
    """Train as ``argv`` says on the ranks that are already there."""
    run = start(argv, dtype)
    recorder = Recorder()
    train(run, [recorder, *build_hooks(run)])
    return Record(recorder.outcomes, recorder.consumed, whole_weights(run))


def train_runs(command_lines: list[list[str]], dtype: torch.dtype | None = None) -> list[Record]:
    """Several runs, one after the other, on the same ranks."""
    return [train_run(argv, dtype) for argv in command_lines]


def whole_weights(run: Run) -> dict[str, torch.Tensor]:
    """Every weight of the whole model in float64, put together from all ranks, on each of them."""
    own = [
        (
            tensor.name,
            tensor.global_shape,
            [(box.offset, box.shape, part.clone()) for box, part in tensor.shards],
        )
        for tensor in owned_weights(run.store)
    ]
    gathered: list = [None] * run.state.world_group.size()
    dist.all_gather_object(gathered, own, group=run.state.world_group)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, boxes in (entry for rank in gathered for entry in rank):
        target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        for offset, extent, part in boxes:
            target[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))] = part
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole
