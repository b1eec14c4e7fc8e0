#!/usr/bin/env python3
"""Say what a .bin/.idx dataset holds, whether it is sound, and how it differs from another.

    python tools/inspect_dataset.py PREFIX [PREFIX ...] [--histogram lengths.png]
    python tools/inspect_dataset.py PREFIX --document 7 --tokenizer-type ...
    python tools/inspect_dataset.py PREFIX --verify --vocab-size 50257
    python tools/inspect_dataset.py PREFIX --compare OTHER

The unigram entropy is the loss of a model that knows how frequent each token is and nothing else: a trained
model must do better. The exit code is 0 if the datasets are sound and equal.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from tqdm import tqdm

from megatron.core.config import TokenizerConfig
from megatron.core.datasets import IndexedDataset
from megatron.core.datasets.inspection import check_tokens, first_difference
from megatron.core.datasets.statistics import (
    ValueCounts,
    document_lengths,
    length_summary,
    log_histogram,
    sequence_lengths,
    token_counts,
    unigram_entropy,
)
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.console import run_as_program
from megatron.training.effects import settle_tokenizer
from megatron.training.flags import FlagParser, add_flags, build

Report = dict[str, Any]


@dataclass(frozen=True)
class InspectConfig:
    """What to find out."""

    histogram: str | None = None
    """Picture to write of how long documents and sequences are: .png, .svg or .pdf."""
    index_only: bool = False
    """Leave the tokens themselves unread: no distinct tokens and no entropy, but at once for any size."""
    document: int | None = None
    """Print this document, from 0: its text with a tokenizer's flags, else its ids, a sequence a line."""
    verify: bool = False
    """Check all of both files, and each token against the vocabulary of --vocab-size or the tokenizer."""
    compare: str | None = None
    """Prefix of another dataset: say whether they are equal, or the first difference."""
    vocab_size: int | None = None
    """Size of the vocabulary; also NullTokenizer's."""
    json: bool = False
    """Print one JSON object for each prefix."""

    @property
    def asks(self) -> bool:
        """Whether something other than the figures of each dataset is asked for."""
        return self.verify or self.document is not None or self.compare is not None


def check_picture(output: str) -> None:
    """Check that a picture can be written in the format that its name asks for.

    Raises:
        ValueError: if not, with the formats that are known.
    """
    kinds = Figure().canvas.get_supported_filetypes()
    if Path(output).suffix[1:].lower() not in kinds:
        raise ValueError(f"--histogram {output}: give a name that ends in one of {', '.join(sorted(kinds))}")


@contextmanager
def progress(task: str, dataset: IndexedDataset) -> Iterator[Callable[[int], Any]]:
    """A bar over the bytes of a dataset, where the work takes more than some seconds."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    size = dataset.num_tokens * dataset.dtype.itemsize
    with tqdm(total=size, unit="B", unit_scale=True, desc=task, mininterval=interval, delay=2) as bar:
        yield bar.update


def figures(dataset: IndexedDataset, config: InspectConfig) -> Report:
    """The numbers of one dataset; draws the histogram."""
    dataset.verify()
    documents, sequences = document_lengths(dataset), sequence_lengths(dataset)
    files = [Path(dataset.prefix + suffix) for suffix in (".bin", ".idx")]
    report: Report = {
        "dtype": dataset.dtype.name,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "bytes": {path.suffix: path.stat().st_size for path in files},
        "empty_documents": int(documents.counts[documents.values == 0].sum()),
        "document_lengths": length_summary(documents),
        "sequence_lengths": length_summary(sequences),
    }
    if config.histogram is not None:
        draw_lengths({"documents": documents, "sequences": sequences}, dataset.prefix, Path(config.histogram))
        report["histogram"] = config.histogram
    if dataset.dtype.kind != "f" and not config.index_only:
        with progress("reading", dataset) as advance:
            counts = token_counts(dataset, advance)
        report["distinct_tokens"] = len(counts.values)
        report["unigram_entropy_nats"] = unigram_entropy(counts)
    return report


def draw_lengths(lengths: dict[str, ValueCounts], title: str, output: Path) -> None:
    """Write a picture of the lengths, on a logarithmic scale."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, counts in lengths.items():
        edges, heights = log_histogram(counts)
        label = f"{counts.total:,} {name}" + (f", {counts.mean:,.1f} tokens each" if counts.total else "")
        filled = name == "documents"
        axes.stairs(heights, edges, label=label, fill=filled, alpha=0.4 if filled else 1, linewidth=1.5)
    axes.set(xscale="log", xlabel="length (tokens)", ylabel="how many", title=title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    try:
        figure.savefig(partial, dpi=150, format=output.suffix[1:].lower())
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
        plt.close(figure)


def document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> Report:
    """One document: its ids, and its text if there is a tokenizer.

    Raises:
        ValueError: if there is no such document.
    """
    if not 0 <= number < dataset.num_documents:
        raise ValueError(f"--document {number}: {dataset.prefix} has {dataset.num_documents}, counted from 0")
    first, stop = dataset.document_indices[number : number + 2].tolist()
    sequences = [dataset.get(sequence).tolist() for sequence in range(first, stop)]
    report: Report = {"document": number, "ids": sequences}
    if tokenizer is not None:
        report["text"] = tokenizer.decode([token for sequence in sequences for token in sequence])
    return report


def verified(dataset: IndexedDataset, vocab_size: int | None, tokenizer: Tokenizer | None) -> Report:
    """Check all of a dataset.

    Raises:
        ValueError: for the first fault.
    """
    dataset.verify()
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    eod = tokenizer.eod if tokenizer is not None and tokenizer.has_eod else None
    with progress("checking", dataset) as advance:
        ends = check_tokens(dataset, vocab_size, eod, advance)
    return {"sound": True, "vocabulary": vocab_size, "ends": None if ends is None else asdict(ends)}


def compared(dataset: IndexedDataset, other: str) -> Report:
    """Whether a dataset is equal to another, and how it is not."""
    there = IndexedDataset(other)
    dataset.verify()
    there.verify()
    with progress("comparing", dataset) as advance:
        difference = first_difference(dataset, there, advance)
    return {"other": other, "equal": difference is None, "difference": difference}


def lines(report: Report) -> Iterator[str]:
    """A report in words."""
    if "sound" in report:
        vocabulary, ends = report["vocabulary"], report["ends"]
        against = "not negative" if vocabulary is None else f"within the vocabulary of {vocabulary}"
        yield f"  sound: header, sizes, order of sequences and documents; all tokens {against}"
        if ends is not None:
            yield (
                f"  end-of-document: at the end of {ends['ended']} of {ends['documents']} documents that are "
                f"not empty, and {ends['inside']} times elsewhere"
            )
    if "equal" in report:
        yield f"  equal to {report['other']}" if report["equal"] else f"  differs: {report['difference']}"
    if "document" in report:
        yield f"  document {report['document']}:"
        yield report.get("text", "\n".join(" ".join(map(str, ids)) for ids in report["ids"]))
    for name in ("dtype", "documents", "empty_documents", "sequences", "tokens", "distinct_tokens"):
        if name in report:
            yield f"  {name.replace('_', ' ')}: {report[name]}"
    if "bytes" in report:
        yield "  bytes: " + ", ".join(f"{size} in {suffix}" for suffix, size in report["bytes"].items())
    for name in ("document_lengths", "sequence_lengths"):
        if name in report:
            summary = ", ".join(f"{key} {value:.10g}" for key, value in report[name].items())
            yield f"  {name.replace('_', ' ')}: {summary or 'none'}"
    if "unigram_entropy_nats" in report:
        yield f"  unigram entropy (nats): {report['unigram_entropy_nats']:.4f}"
    if "histogram" in report:
        yield f"  wrote {report['histogram']}"


def inspect(prefix: str, config: InspectConfig, tokenizer: Tokenizer | None) -> Report:
    """All that is asked of one dataset."""
    dataset = IndexedDataset(prefix)
    report: Report = {"prefix": prefix}
    if config.verify:
        report |= verified(dataset, config.vocab_size, tokenizer)
    if config.compare is not None:
        report |= compared(dataset, config.compare)
    if config.document is not None:
        report |= document(dataset, config.document, tokenizer)
    if config.histogram is not None or not config.asks:
        report |= figures(dataset, config)
    return report


def main() -> None:
    """Print a block of lines, or a JSON object, for each prefix."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("prefix", nargs="+", help="path of a dataset without .bin or .idx")
    for section in (InspectConfig, TokenizerConfig):
        add_flags(parser, section)
    namespace = parser.parse_args()
    for note in settle_tokenizer(namespace):
        print(note, file=sys.stderr)
    config, tokenizer_config = build(InspectConfig, namespace), build(TokenizerConfig, namespace)
    if config.histogram is not None and len(namespace.prefix) > 1:
        parser.error(f"--histogram {config.histogram}: is one picture; give one prefix")
    if config.histogram is not None:
        check_picture(config.histogram)
    known = tokenizer_config.tokenizer_type is not None
    tokenizer = build_tokenizer(tokenizer_config, config.vocab_size) if known else None
    unequal = False
    for prefix in namespace.prefix:
        report = inspect(prefix, config, tokenizer)
        unequal |= report.get("equal") is False
        print(json.dumps(report) if config.json else "\n".join([f"{prefix}:", *lines(report)]))
    if unequal:
        raise SystemExit(1)


if __name__ == "__main__":
    run_as_program(main)
