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
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

from megatron.core.pipeline_parallel.picture import DOTS_PER_INCH, MOST_BOXES, draw
from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, ScheduleFlags, build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import (
    TimelineEvent,
    from_chrome_trace,
    split_steps,
    summarize,
    to_chrome_trace,
)
from megatron.training.console import run_as_program
from megatron.training.flags import FlagParser, UsageError

PICTURES = (".png", ".svg")
FLAGS = ScheduleFlags("--schedule", "--stages", "--microbatches", "--chunks", "--group-size")
STAGE_FILE = re.compile(r"stage_\d+\.json")
"""What ``--trace-dir`` calls the timeline of a stage."""


def planned(arguments: argparse.Namespace) -> tuple[str, list[TimelineEvent]]:
    """Name and events of the schedule that the flags name.

    Raises:
        UsageError: if there is no such schedule, or a time is no time.
    """
    counts = {name: getattr(arguments, name) for name in ("stages", "microbatches", "chunks", "group_size")}
    missing = [name for name in ("stages", "microbatches") if counts[name] is None]
    if missing:
        raise UsageError(f"--schedule {arguments.schedule} wants --{' and --'.join(missing)}, too")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{name.replace('_', '-')} {count}: must be at least 1")
    forward = duration("--forward-ms", arguments.forward_ms)
    backward = duration("--backward-ms", arguments.backward_ms)
    weights = backward / 2 if arguments.weight_ms is None else duration("--weight-ms", arguments.weight_ms)
    if weights > backward:
        raise UsageError(f"--weight-ms {weights:g} is a part of --backward-ms {backward:g}, not more")
    if forward + backward == 0:
        raise UsageError("--forward-ms 0 and --backward-ms 0: give one of them a time above 0")
    if counts["chunks"] is None and arguments.schedule in SCHEDULE_CHUNKS:
        counts["chunks"] = SCHEDULE_CHUNKS[arguments.schedule].start
    chunks = counts["chunks"] or 1
    boxes = 2 * arguments.stages * arguments.microbatches * chunks
    if boxes > MOST_BOXES:
        raise UsageError(
            f"{boxes:,} boxes are more than a picture can show, {MOST_BOXES:,}: give fewer --stages, "
            "--microbatches or --chunks"
        )
    try:
        schedule = build_schedule(
            arguments.schedule,
            stages=arguments.stages,
            microbatches=arguments.microbatches,
            chunks=chunks,
            group_size=arguments.group_size,
            flags=FLAGS,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    result = simulate(
        schedule,
        forward_time=forward / chunks,
        backward_input_time=(backward - weights) / chunks,
        backward_weight_time=weights / chunks,
        transfer_time=duration("--comm-ms", arguments.comm_ms),
    )
    words = [plural(arguments.stages, "stage"), plural(arguments.microbatches, "micro-batch")]
    words += [plural(chunks, "chunk")] if chunks > 1 else []
    return f"{arguments.schedule}: {', '.join(words)}", list(result.events)


def plural(count: int, noun: str) -> str:
    """So many of what a noun names."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def duration(flag: str, value: float) -> float:
    """The value of a flag that takes milliseconds.

    Raises:
        UsageError: if it is negative or no number.
    """
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{flag} {value}: wants milliseconds, at least 0")
    return value


def measured(path: Path, number: int) -> tuple[str, list[TimelineEvent]]:
    """Name and events of one step of a run, times from its start.

    Raises:
        UsageError: if the path holds no timelines, or no such step.
        ValueError: if a timeline cannot be read.
    """
    if not path.exists():
        raise UsageError(f"--trace {path}: there is no such file or folder")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if STAGE_FILE.fullmatch(file.name))
        if not files:
            raise UsageError(f"--trace {path} holds no stage_NN.json, as a run's --trace-dir does")
    events: list[TimelineEvent] = []
    for file in files:
        try:
            events += from_chrome_trace(json.loads(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    steps = split_steps(events)
    if not -len(steps) <= number < len(steps):
        raise UsageError(f"--step {number}: {path} has {plural(len(steps), 'step')}, counted from 0")
    step = steps[number]
    if all(event.start_ms >= event.end_ms for event in step if event.is_action):
        raise ValueError(f"{path}: no action of step {number % len(steps)} takes any time")
    zero = min(event.start_ms for event in step)
    shifted = [
        TimelineEvent(
            event.stage, event.kind, event.chunk, event.microbatch, event.start_ms - zero, event.end_ms - zero
        )
        for event in step
    ]
    return f"measured, step {number % len(steps)} of {len(steps)}", shifted


def title(what: str, events: list[TimelineEvent], *, is_plan: bool) -> str:
    """Two lines: what it is, and what it costs."""
    summary = summarize(events)
    peaks = list(summary.peak_activations.values())
    chunks = 1 + max(event.chunk for event in events)
    each = "micro-batches" if chunks == 1 else f"micro-batches in one of {chunks} chunks"
    listed = " ".join(map(str, peaks)) if len(peaks) <= 16 else f"{min(peaks)} to {max(peaks)}"
    ideal = "the ideal time" if is_plan else f"the {summary.ideal_ms:.5g} ms that the busiest stage works"
    return (
        f"{what}\n{summary.makespan_ms:.5g} ms, bubble {summary.bubble:.1%} of {ideal}, "
        f"peak activations by stage {listed} ({each})"
    )


@contextmanager
def complete_file(out: Path) -> Iterator[Path]:
    """A path to write to; the file is called ``out`` once it is complete, and gone if it never is.

    Raises:
        UsageError: if there can be no such file.
    """
    beside = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    try:
        if out.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a part of it is a file, not a folder" if in_the_way else error.strerror
        raise UsageError(f"--out {out}: {reason}") from None
    try:
        yield beside
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def save(out: Path, what: str, events: list[TimelineEvent]) -> None:
    """Write a picture or a trace."""
    if out.suffix.lower() == ".json":
        out.write_text(json.dumps(to_chrome_trace(events)), encoding="utf-8")
        return
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        draw(what, events).savefig(out, dpi=DOTS_PER_INCH)


def main() -> None:
    """Read the command line, and :func:`paint`."""
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
    try:
        paint(arguments)
    except UsageError as error:
        parser.error(str(error))


def paint(arguments: argparse.Namespace) -> None:
    """Plan or read a timeline, and write it.

    Raises:
        UsageError: if the flags make no picture.
    """
    out = arguments.out
    if out.suffix.lower() not in (*PICTURES, ".json"):
        raise UsageError(f"--out {out}: give a name that ends in one of {', '.join(PICTURES)}, .json")
    if (arguments.schedule is None) == (arguments.trace is None):
        raise UsageError("give either --schedule, to plan, or --trace, to draw what a run has measured")
    is_plan = arguments.trace is None
    what, events = planned(arguments) if is_plan else measured(arguments.trace, arguments.step)
    what = title(what, events, is_plan=is_plan)
    with complete_file(out) as beside:
        save(beside, what, events)
    print(f"{what}\nwrote {out}")


if __name__ == "__main__":
    run_as_program(main)
