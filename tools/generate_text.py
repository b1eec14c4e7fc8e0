#!/usr/bin/env python3
"""Continue texts with a trained checkpoint, saved in whatever layout.

    python tools/generate_text.py --load checkpoints --prompt "Call me" "The whale" --top-p 0.9

The model and the tokenizer come from the checkpoint's own settings. Started by torchrun, all ranks share
every layer (tensor parallel), for models too large for one device.
"""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron.core.checkpoint import open_checkpoint
from megatron.core.config import ParallelConfig, TokenizerConfig, flag
from megatron.core.models import GPTModel, ModelStage
from megatron.core.parallel_state import model_parallel
from megatron.core.parameter import Placement, named_parameters
from megatron.core.tensor_parallel import RandomStream
from megatron.core.tokenizers import build_tokenizer
from megatron.inference import SamplingOptions, generate
from megatron.training.checkpointing import load_weights
from megatron.training.config import RunConfig
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser, add_flags, build
from megatron.training.initialize import discover_world, start_process_groups

_PATHS = ("vocab_file", "merge_file", "tokenizer_model")


@dataclass(frozen=True)
class GenerateOptions:
    """What to continue, and with which checkpoint."""

    load: str
    """Folder of checkpoints."""
    ckpt_step: int | None = None
    """Iteration to take; default the latest."""
    prompt: tuple[str, ...] = flag(("",), nargs="+")
    """Texts to continue; an empty one starts after an end-of-document."""
    echo: bool = True
    """Print the prompt ahead of its continuation."""


def main() -> None:
    """Load the checkpoint, continue every prompt, print from rank 0."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser, GenerateOptions)
    add_flags(parser, SamplingOptions)
    group = parser.add_argument_group(
        "TokenizerConfig", "Where the tokenizer's files have moved since training."
    )
    for name in _PATHS:
        group.add_argument(_spelling(name), default=None, help="in place of the checkpoint's own setting")
    arguments = parser.parse_args()
    options, sampling = build(GenerateOptions, arguments), build(SamplingOptions, arguments)

    world = discover_world(os.environ)
    layout = ParallelConfig(tensor_model_parallel_size=world.world_size)
    runtime = start_process_groups(layout, world)
    everyone, device = runtime.state.world_group, runtime.device
    checkpoint = open_checkpoint(Path(options.load), everyone, device, options.ckpt_step)
    config = RunConfig.from_json(checkpoint.manifest.state["config"])
    tokenizer = build_tokenizer(moved(config.tokenizer, arguments), config.model.vocab_size)

    whole = ModelStage(range(config.model.num_layers), pre_process=True, post_process=True)
    parallel = model_parallel(runtime.state, layout)
    model = GPTModel(config.model, whole, parallel=parallel, placement=Placement(torch.float32, device))
    load_weights(checkpoint, list(named_parameters(model)), everyone, device)
    model.eval()

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(tokens=tokens.to(device), stream=RandomStream.root(sampling.seed))
        return logits[-1]  # [s, b, v] -> [b, v]

    for text in options.prompt:
        prompt = tokenizer.encode(text) if text else [tokenizer.eod]
        new = generate(
            next_logits,
            prompt,
            sampling,
            context_length=config.model.seq_length,
            eod=tokenizer.eod if tokenizer.has_eod else None,
        )
        if world.rank == 0:
            print((text if options.echo else "") + tokenizer.decode(new))
            print("---")


def moved(config: TokenizerConfig, arguments: argparse.Namespace) -> TokenizerConfig:
    """The checkpoint's tokenizer settings with the paths that the command line gives.

    Raises:
        ValueError: for a path that this kind of tokenizer does not take.
    """
    names = config.files
    given = {name: getattr(arguments, name) for name in _PATHS if getattr(arguments, name)}
    for name in given:
        if name not in names:
            wanted = " and ".join(map(_spelling, names)) or "no file"
            kind = config.tokenizer_type
            raise ValueError(f"{_spelling(name)}: the checkpoint has a {kind}, which takes {wanted}")
    return replace(config, **given)


def _spelling(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    run_as_program(main)
