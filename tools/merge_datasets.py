#!/usr/bin/env python3
"""Merge .bin/.idx datasets into one, which holds the documents of one after those of another.

    python tools/merge_datasets.py --input FOLDER --output-prefix PREFIX
    python tools/merge_datasets.py --prefixes A B C --output-prefix PREFIX

The files are the same bytes as if all the text had been preprocessed at once. They appear under their names
only when they are complete.
"""

import argparse
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.core.datasets.merging import check_merge, merge_datasets, prefixes_in
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser, add_flags, build


@dataclass(frozen=True)
class MergeConfig:
    """What to merge, and into what."""

    output_prefix: str
    """Path of the merged dataset without .bin or .idx."""
    input: str | None = None
    """Folder of which all datasets are merged, sorted by name."""
    prefixes: tuple[str, ...] | None = None
    """Paths of the datasets without .bin or .idx, in the order in which their documents are to come."""

    def __post_init__(self) -> None:
        if (self.input is None) == (self.prefixes is None):
            raise ValueError("give one of --input FOLDER and --prefixes A B C")


def main() -> None:
    """Merge, and say what came of it."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_flags(parser, MergeConfig)
    namespace = parser.parse_args()
    try:
        config = build(MergeConfig, namespace)
    except ValueError as error:
        parser.error(str(error))
    prefixes = prefixes_in(config.input) if config.input is not None else list(config.prefixes or ())
    inputs = check_merge(prefixes, config.output_prefix)
    size = sum(one.num_bytes for one in inputs)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # unwinds, so nothing is left behind
    Path(config.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    interval = 0.2 if sys.stderr.isatty() else 30.0
    start = time.perf_counter()
    with tqdm(total=size, unit="B", unit_scale=True, desc="merging", mininterval=interval) as bar:
        counts = merge_datasets(inputs, config.output_prefix, bar.update)
    seconds = time.perf_counter() - start
    print(f"merged, in this order: {' '.join(prefixes)}")
    print(
        f"{config.output_prefix}.bin and .idx: {counts.documents} documents, {counts.sequences} sequences, "
        f"{counts.tokens} tokens"
    )
    print(f"took {seconds:.1f} s, {size / 1e6 / seconds:.1f} MB/s")


if __name__ == "__main__":
    run_as_program(main)
