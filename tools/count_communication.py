#!/usr/bin/env python3
"""Count what each rank of a training run sends in an iteration, without running it.

    python tools/count_communication.py --num-layers 24 ... --tensor-model-parallel-size 8 --world-size 64

Takes the flags of pretrain_gpt.py too. Those of the model, the layout and the batch count; a length of the
run, a learning rate and data may be left out. A run with --log-communication measures the same calls and
bytes; docs/communication.md says what they mean. Of a global batch that grows, the largest size is counted.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.tokenizers import build_tokenizer
from megatron.planning.traffic import Iteration, Traffic, iteration_traffic
from megatron.training.arguments import parse_arguments, resolve
from megatron.training.config import RunConfig
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser
from megatron.training.plan import batch_plans

LONG = "1000000000"
"""A length of the run that no schedule of the learning rate exceeds."""


def settings(argv: list[str], world_size: int | None) -> tuple[RunConfig, int]:
    """The resolved settings of a run, and its ranks.

    Raises:
        ValueError: if the flags don't fit each other or the world.
    """
    config = parse_arguments([*what_does_not_count(argv), *argv], "")
    tokens = config.model.vocab_size
    if tokens is None and config.tokenizer.tokenizer_type:
        tokens = build_tokenizer(config.tokenizer, None).vocab_size
    world = config.parallel.model_parallel_size if world_size is None else world_size
    return resolve(config, None, tokens, world), world


def what_does_not_count(argv: Sequence[str]) -> list[str]:
    """Flags that a run needs, that don't change what it sends, and that are not on a command line."""
    names = {word.partition("=")[0] for word in argv}
    filled = [] if "--lr" in names else ["--lr", "1"]
    if names.isdisjoint({"--train-iters", "--train-samples"}):
        in_samples = any(name.startswith("--lr-") and name.endswith("-samples") for name in names)
        filled += ["--train-samples" if in_samples else "--train-iters", LONG]
    if not any(name.endswith(("data-path", "data-args-path", "--mock-data")) for name in names):
        filled.append("--mock-data")
    return filled


def traffic_of_stages(config: RunConfig, world_size: int) -> tuple[Iteration, list[Traffic]]:
    """How the batch is worked through, and what a rank of each stage sends."""
    plan = batch_plans(config, world_size)[config.global_batch_size]
    wide = not (config.precision.bf16 or config.precision.fp16)
    iteration = Iteration(plan.micro_batch_size, plan.num_microbatches, world_size, 4 if wide else 2)
    stages = range(config.parallel.pipeline_model_parallel_size)
    return iteration, [
        iteration_traffic(config.model, config.parallel, iteration, stage=stage) for stage in stages
    ]


def table(stages: list[Traffic]) -> Iterator[str]:
    """Lines of a table; stages next to each other that send the same share theirs."""
    yield f"{'stage':>9}  {'axis':5}  {'kind':14}  {'calls':>9}  {'bytes':>19}"
    first = 0
    for traffic, run in itertools.groupby(stages):
        last = first + len(list(run)) - 1
        name = str(first) if first == last else f"{first}-{last}"
        for (axis, kind), sent in sorted(traffic.items()):
            yield f"{name:>9}  {axis:5}  {kind:14}  {sent.calls:>9,}  {sent.moved_bytes:>19,.0f}"
        if not traffic:
            yield f"{name:>9}  nothing"
        first = last + 1


def as_json(iteration: Iteration, stages: list[Traffic]) -> dict[str, Any]:
    """The same as values."""
    found = []
    for traffic in stages:
        axes: dict[str, dict[str, dict[str, float]]] = {}
        for (axis, kind), sent in sorted(traffic.items()):
            axes.setdefault(axis, {})[kind] = {"calls": sent.calls, "bytes": sent.moved_bytes}
        found.append(axes)
    return {
        "world_size": iteration.world_size,
        "micro_batch_size": iteration.micro_batch_size,
        "num_microbatches": iteration.num_microbatches,
        "stages": found,
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--world-size",
        metavar="INT",
        type=int,
        help="ranks of the job; default as many as one replica of the model needs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        print(parser.format_help())
        parse_arguments(["--help"], "The flags of pretrain_gpt.py, which are taken too:")
    own, argv = parser.parse_known_args()
    if own.world_size is not None and own.world_size < 1:
        parser.error(f"--world-size {own.world_size}: a job has at least 1 rank")
    config, world_size = settings(argv, own.world_size)
    iteration, stages = traffic_of_stages(config, world_size)
    if own.json:
        print(json.dumps(as_json(iteration, stages)))
        return
    parallel = config.parallel
    print(
        f"{world_size} ranks: tensor {parallel.tensor_model_parallel_size}, pipeline "
        f"{parallel.pipeline_model_parallel_size}, context {parallel.context_parallel_size}, data "
        f"{world_size // parallel.model_parallel_size}; {iteration.num_microbatches} micro-batches of "
        f"{iteration.micro_batch_size} x {config.model.seq_length} tokens. One rank of a stage sends:"
    )
    print("\n".join(table(stages)))


if __name__ == "__main__":
    run_as_program(main)
