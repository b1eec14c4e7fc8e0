#!/usr/bin/env python3
"""Training steps of two CPU ranks against what a user would write with PyTorch's own parallelism.

    python benchmarks/parallel_step.py [--only dp,tp] [--precision bf16] [--rounds 8] [--json]

Every case splits one model over two gloo ranks of one thread each. Our side is the training loop's own step.
The other is a plain GPT (full logits, PyTorch's cross entropy) under DistributedDataParallel,
``parallelize_module``, ``torch.distributed.pipelining`` or ``fully_shard``; or, in the cases called ``-own``,
our module under those, which compares engines alone. Both sides: the same shape and batch, gradients clipped,
fused AdamW; no torch.compile.

Each side has its own two processes. Both are started once and take turns step by step, so that a noisy
machine hits both alike; a step takes as long as its slower rank, and medians count. ``waits`` is the share of
a step in which the main thread of a rank doesn't run: it waits for the other rank (communication that is not
hidden, pipeline bubbles), or for a core that a thread of the communication library holds. On two idle cores
that is what splitting costs.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from parallel_sides.cases import CASES, WORLD, Case, case_of


def serve(case: Case, side: str, bf16: bool, rank: int, folder: str, pipe: Connection) -> None:
    """Be one rank of one side: build, then time a step whenever asked."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{side}", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    from parallel_sides import our_sides, torch_sides

    torch.manual_seed(0)
    step = {**torch_sides.SIDES, **our_sides.SIDES}[side](case, bf16)
    while pipe.recv():
        start, busy = time.perf_counter(), time.thread_time()
        loss = step()
        seconds = time.perf_counter() - start
        pipe.send((seconds, 1 - (time.thread_time() - busy) / seconds, loss))
    dist.destroy_process_group()


@dataclass
class Timed:
    """One step of one side."""

    seconds: float
    waits: float
    loss: float


class Side:
    """The two processes of one side."""

    def __init__(self, case: Case, side: str, bf16: bool, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._workers = [], []
        for rank in range(WORLD):
            here, there = spawn.Pipe()
            worker = spawn.Process(target=serve, args=(case, side, bf16, rank, folder, there), daemon=True)
            worker.start()
            there.close()
            self._pipes.append(here)
            self._workers.append(worker)

    def step(self) -> Timed:
        """One step on both ranks."""
        for pipe in self._pipes:
            pipe.send(True)
        seconds, waits, losses = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return Timed(max(seconds), statistics.mean(waits), max(losses))

    def close(self) -> None:
        """End both."""
        for pipe in self._pipes:
            pipe.send(False)
        for worker in self._workers:
            worker.join()


def compare(case: Case, bf16: bool, rounds: int, warmup: int) -> dict[str, float]:
    """Both sides of a case in turn; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": Side(case, "ours", bf16, folder), "theirs": Side(case, case.theirs, bf16, folder)}
        steps: dict[str, list[Timed]] = {"ours": [], "theirs": []}
        for number in range(warmup + rounds):
            for which in sorted(sides, reverse=bool(number % 2)):
                timed = sides[which].step()
                if number >= warmup:
                    steps[which].append(timed)
        for side in sides.values():
            side.close()
    pairs = zip(steps["ours"], steps["theirs"], strict=True)
    figures = {"speed_ratio": statistics.median(b.seconds / a.seconds for a, b in pairs)}
    for which, timed in steps.items():
        seconds = statistics.median(one.seconds for one in timed)
        figures[f"{which}_tokens_per_second"] = case.tokens / seconds
        figures[f"{which}_waits"] = statistics.median(one.waits for one in timed)
        figures[f"{which}_loss"] = timed[-1].loss
    return figures


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"cases, apart by commas, of: {','.join(CASES)}; default all")
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both", help="default both")
    parser.add_argument("--rounds", type=int, default=8, help="steps that count, of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--tiny", action="store_true", help="a toy shape: only to see that all runs")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))}: no such case; there are {','.join(CASES)}")
    formats = {"fp32": (False,), "bf16": (True,), "both": (False, True)}[arguments.precision]
    for name in names:
        case = case_of(name, tiny=arguments.tiny)
        for bf16 in formats:
            if bf16 and case.own:
                continue
            found = compare(case, bf16, arguments.rounds, arguments.warmup)
            precision = "bf16" if bf16 else "fp32"
            if arguments.json:
                print(json.dumps({"case": name, "precision": precision, **found}), flush=True)
                continue
            print(
                f"{name} {precision}: {found['ours_tokens_per_second']:.0f} against "
                f"{found['theirs_tokens_per_second']:.0f} tokens/s ({case.theirs}), "
                f"{found['speed_ratio']:.2f}x (at least {case.at_least}x); waits {found['ours_waits']:.0%} "
                f"against {found['theirs_waits']:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
