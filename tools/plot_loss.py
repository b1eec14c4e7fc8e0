#!/usr/bin/env python3
"""Draw the loss curve of a run from its --metrics-file.

python tools/plot_loss.py metrics.jsonl --output loss.png [--loss lm_loss] [--mark 100 "resumed, pipeline 2"]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser


def read_curves(path: str, loss: str) -> dict[str, dict[int, float]]:
    """Iteration -> loss, for ``train`` and each evaluated split; of two records of one the later counts.

    Raises:
        ValueError: if a line is no record, or none has the loss.
    """
    curves: dict[str, dict[int, float]] = {"train": {}}
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a metrics record ({error})") from None
        if not isinstance(record, dict) or "iteration" not in record:
            raise ValueError(f"{path}:{number}: not a metrics record, which says its iteration")
        if loss in record:
            curves.setdefault(record.get("split", "train"), {})[record["iteration"]] = float(record[loss])
    if not any(curves.values()):
        raise ValueError(f"{path} holds no record with {loss!r}")
    return curves


def number(flag: str, text: str) -> float:
    """The value of a flag that takes a number and a text.

    Raises:
        ValueError: if it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{flag} {text}: wants a number, then a text") from None


def main() -> None:
    """Read the curves and write the picture."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("metrics", help="what a run wrote with --metrics-file")
    parser.add_argument("--output", required=True, help="picture to write: .png, .svg or .pdf")
    parser.add_argument("--loss", default="lm_loss", help="which loss")
    parser.add_argument(
        "--mark", nargs=2, action="append", default=[], metavar=("ITERATION", "TEXT"), help="an event to show"
    )
    parser.add_argument("--reference", nargs=2, metavar=("VALUE", "TEXT"), help="a level to show")
    arguments = parser.parse_args()
    curves = read_curves(arguments.metrics, arguments.loss)
    marks = [(number("--mark", iteration), text) for iteration, text in arguments.mark]

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    output = Path(arguments.output)
    kinds = figure.canvas.get_supported_filetypes()
    if output.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"--output {output}: give a name that ends in one of {', '.join(sorted(kinds))}")
    for split, points in curves.items():
        x = sorted(points)
        style = {"linewidth": 1.2} if split == "train" else {"marker": "o", "linewidth": 1.5}
        axes.plot(x, [points[iteration] for iteration in x], label=split, **style)  # type: ignore[arg-type]
    for iteration, text in marks:
        axes.axvline(iteration, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            text,
            (iteration, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9,
        )
    if arguments.reference:
        axes.axhline(
            number("--reference", arguments.reference[0]),
            color="grey",
            linestyle="--",
            linewidth=1,
            label=arguments.reference[1],
        )
    axes.set(xlabel="iteration", ylabel=f"{arguments.loss.replace('_', ' ')} (nats a token)")
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    print(f"wrote {output}")


if __name__ == "__main__":
    run_as_program(main)
