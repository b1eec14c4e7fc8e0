"""Timelines of a pipeline as a picture: a row a stage, a box an action."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.core.pipeline_parallel.timeline import TimelineEvent

COLOURS = {
    "wait": ("waits for a transfer", "#d8b4b4"),
    "forward": ("forward", "#3b76c0"),
    "backward": ("backward", "#2f9e77"),
    "backward_input": ("backward, input", "#2f9e77"),
    "backward_weight": ("backward, weights", "#e09f3e"),
}
"""Name and colour of what is drawn."""

MOST_NUMBERED = 20_000
"""Boxes of a picture that can have numbers and edges; of more, it is an image inside."""
MOST_BOXES = 2_000_000
"""Boxes that a picture can have at all."""
DOTS_PER_INCH = 150

_WIDTHS = (15.0, 20.0, 40.0)
"""Inches: the least, that of a picture without numbers, and the most."""
_MARGIN = 1.0
"""Inches beside the rows."""
_ROW, _TALLEST = 0.42, 80.0
"""Inches of a row, and of all of them."""
_MOST_NAMED = 100
_SIZES = (5.0, 8.0)
"""Points of the smallest number that one can read, and of the largest."""
_DIGIT = 0.75
"""Width of a digit with its share of a box's margin, over its size."""

Span = tuple[float, float, int]
"""Start, end and stage."""


def draw(title: str, events: Iterable[TimelineEvent]) -> Figure:
    """Draw one step: every action as a box with its micro-batch, and what a run has waited for transfers.

    Numbers are left out where they could not be read. Save the picture with :data:`DOTS_PER_INCH`.

    Args:
        title: what to write above it.
        events: of one step, from time 0.

    Raises:
        ValueError: if there are too many of them, or none takes time.
    """
    drawn = [event for event in events if event.kind in COLOURS]
    actions = [event for event in drawn if event.is_action]
    end = max((action.end_ms for action in actions), default=0.0)
    if end <= 0:
        raise ValueError("there is no action that takes time")
    if len(drawn) > MOST_BOXES:
        raise ValueError(f"{len(drawn):,} boxes are more than a picture can show: at most {MOST_BOXES:,}")
    stages = sorted({action.stage for action in actions})
    chunks = 1 + max(action.chunk for action in actions)
    numbered = len(drawn) <= MOST_NUMBERED
    width = _picture_width(actions, end) if numbered else _WIDTHS[1]
    height = min(_ROW * len(stages), _TALLEST)
    figure = Figure(figsize=(width, 1.7 + height), layout="constrained")
    axes = figure.add_subplot()
    handles = _add_boxes(axes, _spans(drawn), chunks, fine=numbered)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False, fontsize=9
    )
    axes.set(xlim=(0, end), ylim=(stages[-1] + 0.6, stages[0] - 0.6), xlabel="ms", facecolor="#f1f1f1")
    named = stages[:: math.ceil(len(stages) / _MOST_NAMED)]
    axes.set_yticks(named, [f"stage {stage}" for stage in named])
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if numbered:
        _write_numbers(axes, actions, chunks, (width - _MARGIN) * 72 / end)
    return figure


def _spans(events: Iterable[TimelineEvent]) -> Mapping[tuple[str, int], list[Span]]:
    """What is drawn alike: by kind, and for actions by chunk."""
    found: dict[tuple[str, int], list[Span]] = {}
    for event in events:
        key = (event.kind, event.chunk if event.is_action else 0)
        found.setdefault(key, []).append((event.start_ms, event.end_ms, event.stage))
    return {key: found[key] for key in sorted(found, key=lambda key: (list(COLOURS).index(key[0]), key[1]))}


def _add_boxes(
    axes: Axes, spans: Mapping[tuple[str, int], Sequence[Span]], chunks: int, *, fine: bool
) -> list[Patch]:
    """Draw the boxes, one collection for those that are drawn alike; what the legend shows of each."""
    handles = []
    for (kind, chunk), boxes in spans.items():
        start, end, stage = np.asarray(boxes, dtype=np.float64).T
        low, high = stage - 0.42, stage + 0.42
        corners: Any = np.stack(
            [np.stack(pair, axis=-1) for pair in ((start, low), (end, low), (end, high), (start, high))],
            axis=1,
        )  # [boxes, 4, 2]
        colour = _shade(kind, chunk, chunks)
        boxes_drawn = PolyCollection(
            corners,
            facecolor=colour,
            edgecolor="white" if fine else "none",
            linewidth=0.4 if fine else 0.0,
            rasterized=not fine,
            antialiased=fine,
        )
        axes.add_collection(boxes_drawn, autolim=False)
        name = COLOURS[kind][0] + (f", chunk {chunk}" if chunks > 1 and kind != "wait" else "")
        handles.append(Patch(facecolor=colour, label=name))
    return handles


def _shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Colour of a kind, the paler the later the chunk."""
    paler = 0.6 * chunk / max(chunks - 1, 2)
    red, green, blue = (channel + (1 - channel) * paler for channel in to_rgb(COLOURS[kind][1]))
    return red, green, blue


def _picture_width(actions: Sequence[TimelineEvent], end: float) -> float:
    """Inches that leave room for the numbers of as many kinds as can be."""
    by_kind: dict[str, list[float]] = {}
    for action in actions:
        by_kind.setdefault(action.kind, []).append(action.end_ms - action.start_ms)
    points = _DIGIT * _digits(actions)
    for typical in sorted(map(statistics.median, by_kind.values())):
        if typical > 0:
            least, best = (_MARGIN + end / typical * points * size / 72 for size in _SIZES)
            if least <= _WIDTHS[2]:
                return min(max(best, _WIDTHS[0]), _WIDTHS[2])
    return _WIDTHS[1]


def _digits(actions: Iterable[TimelineEvent]) -> int:
    return len(str(max(action.microbatch for action in actions)))


def _write_numbers(axes: Axes, actions: Sequence[TimelineEvent], chunks: int, points_per_ms: float) -> None:
    """The micro-batch in each box that has room for the longest number."""
    digits = _digits(actions)
    for action in actions:
        size = min(_SIZES[1], (action.end_ms - action.start_ms) * points_per_ms / (_DIGIT * digits))
        if size < 0.99 * _SIZES[0]:  # the width of the rows is known but roughly
            continue
        red, green, blue = _shade(action.kind, action.chunk, chunks)
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
        text = axes.text(
            (action.start_ms + action.end_ms) / 2,
            action.stage,
            str(action.microbatch),
            size=size,
            color="white" if dark else "black",
            ha="center",
            va="center_baseline",
        )
        text.set_in_layout(False)
