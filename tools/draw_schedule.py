#!/usr/bin/env python3
"""Draw what the stages of a pipeline do when: planned from a schedule, or measured by a training run.

    python tools/draw_schedule.py --schedule zb-h1 --stages 4 --microbatches 8 --out zb-h1.png
    python tools/draw_schedule.py --trace TRACE_DIR --out measured.svg

A .json opens in chrome://tracing or https://ui.perfetto.dev. Times are of one micro-batch through all of a
stage; each of its chunks takes its share.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import (
    TimelineEvent,
    from_chrome_trace,
    split_steps,
    summarize,
    to_chrome_trace,
)
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser

COLOURS = {
    "forward": ("forward", "#3b76c0"),
    "backward": ("backward", "#2f9e77"),
    "backward_input": ("backward, input", "#2f9e77"),
    "backward_weight": ("backward, weights", "#e09f3e"),
}
PICTURES = (".png", ".svg")
DOTS_PER_INCH = 150
WIDTHS = (15.0, 40.0)
"""Inches; wider the more actions there are."""
WIDTH_OF_SHORTEST = 0.17
"""Inches for an action as short as the median one of its kind that is shortest: room for two digits."""


def planned(arguments: argparse.Namespace) -> tuple[str, list[TimelineEvent]]:
    """Title and events of the schedule that the flags name.

    Raises:
        ValueError: if there is no such schedule, or a time is no time.
    """
    missing = [name for name in ("stages", "microbatches") if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"--schedule {arguments.schedule} wants --{' and --'.join(missing)}, too")
    forward = duration("--forward-ms", arguments.forward_ms)
    backward = duration("--backward-ms", arguments.backward_ms)
    weights = backward / 2 if arguments.weight_ms is None else duration("--weight-ms", arguments.weight_ms)
    if weights > backward:
        raise ValueError(f"--weight-ms {weights:g} is a part of --backward-ms {backward:g}, not more")
    if arguments.schedule not in SCHEDULE_CHUNKS:
        raise ValueError(f"--schedule {arguments.schedule}: there is {', '.join(SCHEDULE_CHUNKS)}")
    chunks = SCHEDULE_CHUNKS[arguments.schedule].start if arguments.chunks is None else arguments.chunks
    schedule = build_schedule(
        arguments.schedule,
        stages=arguments.stages,
        microbatches=arguments.microbatches,
        chunks=chunks,
        group_size=arguments.group_size,
    )
    result = simulate(
        schedule,
        forward_time=forward / chunks,
        backward_input_time=(backward - weights) / chunks,
        backward_weight_time=weights / chunks,
        transfer_time=duration("--comm-ms", arguments.comm_ms),
    )
    counts = [(arguments.stages, "stage"), (arguments.microbatches, "micro-batch"), (chunks, "chunk")]
    words = [f"{count} {noun}{plural(count, noun)}" for count, noun in counts if noun != "chunk" or count > 1]
    return f"{arguments.schedule}: {', '.join(words)}", list(result.events)


def plural(count: int, noun: str) -> str:
    """The ending of a noun."""
    if count == 1:
        return ""
    return "es" if noun.endswith("ch") else "s"


def duration(flag: str, value: float) -> float:
    """The value of a flag that takes milliseconds.

    Raises:
        ValueError: if it is negative or no number.
    """
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{flag} {value}: wants milliseconds, at least 0")
    return value


def measured(path: Path, number: int) -> tuple[str, list[TimelineEvent]]:
    """Title and events of one step of a run, times from its start; of several ranks of a stage the first.

    Raises:
        ValueError: if the path holds no timelines, or no such step.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--trace {path} holds no .json")
    events: list[TimelineEvent] = []
    for file in files:
        try:
            found = from_chrome_trace(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        if {event.stage for event in found}.isdisjoint(event.stage for event in events):
            events += found
    steps = split_steps(events)
    if not -len(steps) <= number < len(steps):
        raise ValueError(f"--step {number}: {path} has {len(steps)} steps, counted from 0")
    step = steps[number]
    zero = min(event.start_ms for event in step)
    shifted = [
        TimelineEvent(
            event.stage, event.kind, event.chunk, event.microbatch, event.start_ms - zero, event.end_ms - zero
        )
        for event in step
    ]
    return f"measured, step {number % len(steps)} of {len(steps)}", shifted


def title(what: str, events: list[TimelineEvent]) -> str:
    """Two lines: what it is, and what it costs."""
    summary = summarize(events)
    peaks = list(summary.peak_activations.values())
    chunks = 1 + max(event.chunk for event in events)
    each = "micro-batches" if chunks == 1 else f"micro-batches in one of {chunks} chunks"
    listed = " ".join(map(str, peaks)) if len(peaks) <= 16 else f"{min(peaks)} to {max(peaks)}"
    return (
        f"{what}\n{summary.makespan_ms:.5g} ms, bubble {summary.bubble:.1%} of the ideal time, "
        f"peak activations by stage {listed} ({each})"
    )


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Colour of a kind, the paler the later the chunk."""
    paler = 0.6 * chunk / max(chunks - 1, 2)
    red, green, blue = (channel + (1 - channel) * paler for channel in to_rgb(COLOURS[kind][1]))
    return red, green, blue


def draw(what: str, events: list[TimelineEvent]) -> Figure:
    """One row a stage, a box an action."""
    actions = [event for event in events if event.is_action]
    stages = sorted({action.stage for action in actions})
    chunks = 1 + max(action.chunk for action in actions)
    width = picture_width(actions)
    figure, axes = plt.subplots(figsize=(width, 1.7 + 0.42 * len(stages)), layout="constrained")
    found = {(action.kind, action.chunk) for action in actions}
    boxes = [(kind, chunk) for kind in COLOURS for chunk in range(chunks) if (kind, chunk) in found]
    for kind, chunk in boxes:
        for stage in stages:
            spans = [
                (action.start_ms, action.end_ms - action.start_ms)
                for action in actions
                if (action.kind, action.chunk, action.stage) == (kind, chunk, stage)
            ]
            colour = shade(kind, chunk, chunks)
            axes.broken_barh(spans, (stage - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=0.4)
    names = [COLOURS[kind][0] + (f", chunk {chunk}" if chunks > 1 else "") for kind, chunk in boxes]
    handles = [
        Patch(facecolor=shade(*box, chunks), label=name) for box, name in zip(boxes, names, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    end = max(action.end_ms for action in actions)
    axes.set(xlim=(0, end), ylim=(stages[-1] + 0.6, stages[0] - 0.6), xlabel="ms", facecolor="#f1f1f1")
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.set_title(title(what, events), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    write_numbers(axes, actions, (width - 1) * 72 / end)
    return figure


def picture_width(actions: list[TimelineEvent]) -> float:
    """Inches that leave room for numbers, within limits."""
    by_kind: dict[str, list[float]] = {}
    for action in actions:
        by_kind.setdefault(action.kind, []).append(action.end_ms - action.start_ms)
    shortest = min(statistics.median(times) for times in by_kind.values())
    end = max(action.end_ms for action in actions)
    wanted = end / shortest * WIDTH_OF_SHORTEST if shortest else math.inf
    return min(max(wanted, WIDTHS[0]), WIDTHS[1])


def write_numbers(axes: Axes, actions: list[TimelineEvent], points_per_ms: float) -> None:
    """The micro-batch in each box that has room for the longest number."""
    chunks = 1 + max(action.chunk for action in actions)
    digits = max(len(str(action.microbatch)) for action in actions)
    for action in actions:
        size = min(8.0, (action.end_ms - action.start_ms) * points_per_ms / (0.7 * digits))
        if size < 4:
            continue
        red, green, blue = shade(action.kind, action.chunk, chunks)
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
        axes.text(
            (action.start_ms + action.end_ms) / 2,
            action.stage,
            str(action.microbatch),
            size=size,
            color="white" if dark else "black",
            ha="center",
            va="center_baseline",
        )


def main() -> None:
    """Plan or read a timeline, and write it."""
    parser = FlagParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--schedule", help=f"what to plan: {', '.join(SCHEDULE_CHUNKS)}")
    parser.add_argument("--stages", type=int, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, help="micro-batches of a step")
    parser.add_argument(
        "--chunks", type=int, help="model chunks of a stage; default as few as the schedule takes"
    )
    parser.add_argument(
        "--group-size", type=int, help="micro-batches of a chunk's turn (interleaved); default the stages"
    )
    parser.add_argument("--forward-ms", type=float, default=1.0, help="time of a forward (default 1)")
    parser.add_argument("--backward-ms", type=float, default=2.0, help="time of a whole backward (default 2)")
    parser.add_argument("--weight-ms", type=float, help="the weights' part of it (default half)")
    parser.add_argument(
        "--comm-ms", type=float, default=0.0, help="time of a transfer between stages (default 0)"
    )
    parser.add_argument(
        "--trace", type=Path, help="draw what a run has measured: its --trace-dir, or one file"
    )
    parser.add_argument(
        "--step", type=int, default=-1, help="which step of a trace, from 0 (default the last)"
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write: .png, .svg or .json")
    arguments = parser.parse_args()
    out, kind = arguments.out, arguments.out.suffix.lower()
    if kind not in (*PICTURES, ".json"):
        raise ValueError(f"--out {out}: give a name that ends in one of {', '.join(PICTURES)}, .json")
    if (arguments.schedule is None) == (arguments.trace is None):
        raise ValueError("give either --schedule, to plan, or --trace, to draw what a run has measured")
    if arguments.trace is None:
        what, events = planned(arguments)
    else:
        what, events = measured(arguments.trace, arguments.step)
    out.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".json":
        out.write_text(json.dumps(to_chrome_trace(events)), encoding="utf-8")
    else:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
            draw(what, events).savefig(out, dpi=DOTS_PER_INCH)
    print(f"{title(what, events)}\nwrote {out}")


if __name__ == "__main__":
    run_as_program(main)
