#!/usr/bin/env python3
"""Training steps of one rank against Hugging Face's GPT-2: tokens a second and peak memory, as ratios.

    python benchmarks/train_step.py [--case 30m-bf16] [--rounds 12] [--threads 2]

Both sides train the same shape on the same tokens: forward, backward, gradient clipping, AdamW. Ours is
the training loop's own step; theirs is what a user would write: fused AdamW, in bf16 autocast over float32
weights. No torch.compile on either side. Each side lives in a process of its own, and they take turns step
by step, so that a noisy machine hits both; the medians count. Memory is the peak resident set less what was
resident before the model was built.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.core.device import memory_statistics

VOCAB = 50304


@dataclass(frozen=True)
class Case:
    """One comparison, and the ratios that it is held to."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    micro_batch: int
    bf16: bool
    speed: float
    """Tokens a second, ours over theirs, at least."""
    memory: float | None = None
    """Peak memory, ours over theirs, at most."""


CASES = {
    "30m-bf16": Case(6, 384, 6, 256, 8, True, 1.2, 0.7),
    "30m-fp32": Case(6, 384, 6, 256, 8, False, 1.05),
    "124m-bf16": Case(12, 768, 12, 512, 2, True, 1.15),
}


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    """The same random tokens for both sides."""
    draws = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (case.micro_batch, case.seq_length + 1), generator=draws)
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(case.micro_batch, case.seq_length),
    }


def our_step(case: Case) -> Callable[[], float]:
    """The training loop's own step."""
    from megatron.training.arguments import parse_arguments, resolve
    from megatron.training.initialize import initialize
    from megatron.training.launcher import discover_world
    from megatron.training.setup import build_run
    from megatron.training.step import train_step
    from pretrain_gpt import GPTTask

    argv = (
        f"--num-layers {case.layers} --hidden-size {case.hidden} --num-attention-heads {case.heads} "
        f"--seq-length {case.seq_length} --micro-batch-size {case.micro_batch} "
        f"--global-batch-size {case.micro_batch} --vocab-size {VOCAB} --tokenizer-type NullTokenizer "
        "--mock-data --attention-dropout 0 --hidden-dropout 0 --train-iters 1000 --lr 1e-4 "
        "--lr-decay-style constant --clip-grad 1.0"
    ).split()
    if case.bf16:
        argv.append("--bf16")
    config = resolve(parse_arguments(argv, "benchmark"), None, VOCAB, 1)
    run = build_run(config, GPTTask(), initialize(config, discover_world({})), None)
    batch = batch_of(case)

    class SameBatch:
        def take(self, count: int) -> list[dict[str, torch.Tensor]]:
            return [batch] * count

    run.readers.train = SameBatch()  # type: ignore[assignment]
    return lambda: train_step(run).losses["lm loss"]


def their_step(case: Case) -> Callable[[], float]:
    """What a user would write around transformers' GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=case.seq_length,
        n_embd=case.hidden,
        n_layer=case.layers,
        n_head=case.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    tokens = batch_of(case)["tokens"]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return step


def serve(side: str, case: Case, threads: int, pipe: Connection) -> None:
    """Build one side, then time a step whenever asked."""
    torch.set_num_threads(threads)
    build = our_step if side == "ours" else their_step
    if side == "theirs":
        import transformers  # noqa: F401 - resident before the model counts
    before = memory_statistics(torch.device("cpu"))["allocated"]
    step = build(case)
    while pipe.recv():
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = memory_statistics(torch.device("cpu"))["max_allocated"] - before
        pipe.send((seconds, loss, peak))


def compare(name: str, rounds: int, threads: int) -> dict[str, float]:
    """Run both sides in turn; the figures of one case."""
    case = CASES[name]
    spawn = multiprocessing.get_context("spawn")
    pipes, workers = {}, []
    for side in ("ours", "theirs"):
        here, there = spawn.Pipe()
        worker = spawn.Process(target=serve, args=(side, case, threads, there), daemon=True)
        worker.start()
        pipes[side] = here
        workers.append(worker)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    peaks: dict[str, int] = {}
    for number in range(rounds + 2):
        for side, pipe in pipes.items():
            pipe.send(True)
            took, _, peaks[side] = pipe.recv()
            if number >= 2:  # the first two steps warm up
                seconds[side].append(took)
    for pipe, worker in zip(pipes.values(), workers, strict=True):
        pipe.send(False)
        worker.join()
    tokens = case.micro_batch * case.seq_length
    ours, theirs = (statistics.median(seconds[side]) for side in ("ours", "theirs"))
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "ours_tokens_per_second": tokens / ours,
        "theirs_tokens_per_second": tokens / theirs,
        "speed_ratio": statistics.median(ratios),
        "ours_peak_mb": peaks["ours"] / 1e6,
        "theirs_peak_mb": peaks["theirs"] / 1e6,
        "memory_ratio": peaks["ours"] / peaks["theirs"],
    }


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; default all")
    parser.add_argument("--rounds", type=int, default=12, help="steps that count, of each side")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    for name in arguments.case or CASES:
        found, case = compare(name, arguments.rounds, arguments.threads), CASES[name]
        if arguments.json:
            print(json.dumps({"case": name, **found}))
            continue
        ours, theirs = found["ours_tokens_per_second"], found["theirs_tokens_per_second"]
        our_peak, their_peak = found["ours_peak_mb"], found["theirs_peak_mb"]
        limit = f" (at most {case.memory}x)" if case.memory else ""
        print(
            f"{name}: {ours:.0f} against {theirs:.0f} tokens/s, {found['speed_ratio']:.2f}x (at least "
            f"{case.speed}x); peak {our_peak:.0f} against {their_peak:.0f} MB, "
            f"{found['memory_ratio']:.2f}x{limit}"
        )


if __name__ == "__main__":
    main()
