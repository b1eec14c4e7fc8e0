#!/usr/bin/env python3
"""Build the index files of a training job before it starts, on one machine without a GPU.

    python tools/prepare_cache.py --num-layers 24 ... --data-path PREFIX --train-iters 100000 --world-size 64

Takes the flags of pretrain_gpt.py, @files of them too, and of its own --world-size: the ranks that the job
will have, on which the global batch size may depend (default: as many as one replica of the model needs). A
job of the same flags finds every index that it needs and builds none.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.datasets import DatasetSplits
from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.index_cache import IndexArrays
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.arguments import parse_arguments, refuse_misfits, resolve
from megatron.training.checkpointing import check_source, find_source
from megatron.training.config import RunConfig
from megatron.training.console import configure, run_as_program
from megatron.training.flags import FlagParser
from megatron.training.gpt_data import gpt_datasets
from megatron.training.plan import samples_asked_for
from megatron.training.progress import Progress


def job_to_come(argv: list[str], world_size: int | None) -> tuple[RunConfig, Tokenizer | None, Progress]:
    """The resolved settings of a job, its tokenizer, and how far it has come in its checkpoint.

    Raises:
        ValueError: if the job could not start with these flags.
    """
    config = parse_arguments(argv, "")
    world = config.parallel.model_parallel_size if world_size is None else world_size
    configure(rank=0, world_size=1)
    refuse_misfits(config, world)
    source = find_source(config.checkpoint)
    kind = config.tokenizer.tokenizer_type
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size) if kind else None
    config = resolve(
        config,
        checkpoint_config=source.config if source else None,
        tokenizer_vocab_size=tokenizer.vocab_size if tokenizer else None,
        world_size=world,
    )
    if source is None:
        return config, tokenizer, Progress()
    check_source(source, config)
    resumed = source.manifest.state["progress"] if source.resumes else Progress().to_json()
    return config, tokenizer, Progress.from_json(resumed)


def folders_of(dataset: Any) -> Iterator[tuple[bool, Path | None]]:
    """Whether each index of a dataset is a blend's, and the folder that keeps it."""
    indices = dataset.indices
    blended = isinstance(dataset, BlendedDataset)
    yield blended, indices.folder if isinstance(indices, IndexArrays) else None
    if blended:
        for part in dataset.datasets:
            yield from folders_of(part)


def report(splits: DatasetSplits, seconds: float) -> Iterator[str]:
    """Where the indices lie now.

    Raises:
        ValueError: if one that takes long to build is kept nowhere.
    """
    datasets = [splits.train, splits.valid, splits.test, *(dataset for _, dataset in splits.valid_sets)]
    found = {place for dataset in datasets if dataset is not None for place in folders_of(dataset)}
    if (False, None) in found:
        raise ValueError(
            "the index files are kept nowhere, so each process of the job will build its own: give "
            "--data-cache-path a folder that the job can read"
        )
    if (True, None) in found:
        yield "the order of a blend is not kept without --data-cache-path: each process works it out"
    folders = [path for _, path in found if path is not None]
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    places = ", ".join(sorted({str(folder.parent) for folder in folders}))
    yield f"{len(folders)} indices ({size / 1e6:.1f} MB) in {places}, after {seconds:.1f} s"


def main() -> None:
    """Build what is not there yet, and say what there is."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--world-size",
        metavar="INT",
        type=int,
        help="ranks of the job to come; default as many as one replica of the model needs",
    )
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        print(parser.format_help())
        parse_arguments(["--help"], "The flags of pretrain_gpt.py, which are taken too:")
    own, argv = parser.parse_known_args()
    if own.world_size is not None and own.world_size < 1:
        parser.error(f"--world-size {own.world_size}: a job has at least 1 rank")
    config, tokenizer, progress = job_to_come(argv, own.world_size)
    start = time.perf_counter()
    splits = gpt_datasets(config, tokenizer, samples_asked_for(config, progress))
    for line in splits.description:
        print(f" > {line}")
    print("\n".join(report(splits, time.perf_counter() - start)))


if __name__ == "__main__":
    run_as_program(main)
