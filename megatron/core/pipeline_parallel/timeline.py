"""Timelines of a pipeline: what each stage did when, planned or measured.

They are kept in Chrome's trace format. Open a file at ``chrome://tracing`` or https://ui.perfetto.dev: it has
one row a stage, and a second set of rows for transfers, which run beside the actions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron.core.pipeline_parallel.actions import Kind

EventKind = Literal["forward", "backward", "backward_input", "backward_weight", "send", "receive", "wait"]
"""An action; a transfer, at either of its ends; or a stage that stands still until a transfer is through."""

_COMPUTE, _TRANSFERS = 0, 1
"""Processes of the trace, which hold the rows."""


@dataclass(frozen=True)
class TimelineEvent:
    """Something that a stage did.

    A transfer, and a wait for one, is named after the stage's own action: the one whose output is sent, or
    the one that needs what is received.
    """

    stage: int
    kind: EventKind
    chunk: int
    microbatch: int
    start_ms: float
    end_ms: float

    @property
    def is_action(self) -> bool:
        """Whether it is a pass, not a transfer or a wait."""
        return self.kind in get_args(Kind)


@dataclass(frozen=True)
class Summary:
    """What a timeline says about one step."""

    makespan_ms: float
    """Time from the first action's start to the last one's end."""
    ideal_ms: float
    """Time that the busiest stage has worked, all its actions together."""
    bubble: float
    """Idle time over ideal time, where ideal is the busiest stage working without a pause."""
    peak_activations: dict[int, int]
    """For each stage the most activations that it held at once, each of one micro-batch in one chunk."""


def summarize(step: Iterable[TimelineEvent]) -> Summary:
    """Work out what a timeline of one step says.

    Raises:
        ValueError: if there is no action in it.
    """
    actions = sorted((event for event in step if event.is_action), key=lambda event: event.start_ms)
    busy: dict[int, float] = {}
    held: dict[int, set[tuple[int, int]]] = {}
    peaks: dict[int, int] = {}
    for action in actions:
        stage, which = action.stage, (action.chunk, action.microbatch)
        busy[stage] = busy.get(stage, 0.0) + action.end_ms - action.start_ms
        holds = held.setdefault(stage, set())
        if action.kind == "forward":
            holds.add(which)
        elif action.kind != "backward_input":
            holds.discard(which)
        peaks[stage] = max(peaks.get(stage, 0), len(holds))
    if not actions:
        raise ValueError("the timeline has no action")
    makespan = max(action.end_ms for action in actions) - actions[0].start_ms
    ideal = max(busy.values())
    bubble = (makespan - ideal) / ideal if ideal else 0.0
    return Summary(makespan, ideal, bubble, dict(sorted(peaks.items())))


def split_steps(events: Iterable[TimelineEvent]) -> list[list[TimelineEvent]]:
    """Cut a timeline into steps: a stage begins one with the first forward through its first chunk.

    A wait or a transfer before that forward belongs to the step before, or to none.

    Returns:
        The events of each step in the order of their starts.
    """
    steps: list[list[TimelineEvent]] = []
    at: dict[int, int] = {}
    for event in sorted(events, key=lambda event: (event.start_ms, event.stage)):
        if (event.kind, event.chunk, event.microbatch) == ("forward", 0, 0):
            at[event.stage] = at.get(event.stage, -1) + 1
            if at[event.stage] == len(steps):
                steps.append([])
        if event.stage in at:
            steps[at[event.stage]].append(event)
    return steps


def to_chrome_trace(events: Iterable[TimelineEvent]) -> dict[str, Any]:
    """Events as a trace that Chrome and Perfetto open; save it with :func:`json.dump`.

    Times in a trace are in microseconds.
    """
    events = sorted(events, key=lambda event: (event.start_ms, event.stage))
    rows = sorted({(_process(event), event.stage) for event in events})
    names = [_name("process_name", process, 0, title) for process, title in _titles(rows)]
    names += [_name("thread_name", process, stage, f"stage {stage}") for process, stage in rows]
    passes = [
        {
            "name": f"{event.kind} {event.microbatch}",
            "cat": event.kind,
            "ph": "X",
            "ts": event.start_ms * 1e3,
            "dur": (event.end_ms - event.start_ms) * 1e3,
            "pid": _process(event),
            "tid": event.stage,
            "args": {"stage": event.stage, "chunk": event.chunk, "microbatch": event.microbatch},
        }
        for event in events
    ]
    return {"traceEvents": names + passes, "displayTimeUnit": "ms"}


def from_chrome_trace(trace: Mapping[str, Any]) -> list[TimelineEvent]:
    """The events of a trace that :func:`to_chrome_trace` has made, in the order of their starts.

    Raises:
        ValueError: if it is something else.
    """
    entries = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("not a timeline: it has no list of traceEvents")
    return [_event(entry) for entry in entries if not (isinstance(entry, Mapping) and entry.get("ph") == "M")]


def _event(entry: Any) -> TimelineEvent:
    try:
        kind, where = entry["cat"], entry["args"]
        start = float(entry["ts"])
        if entry["ph"] != "X" or kind not in get_args(EventKind):
            raise ValueError(kind)
        return TimelineEvent(
            stage=int(where["stage"]),
            kind=kind,
            chunk=int(where["chunk"]),
            microbatch=int(where["microbatch"]),
            start_ms=start / 1e3,
            end_ms=(start + float(entry["dur"])) / 1e3,
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"not an event of a pipeline's timeline: {str(entry)[:200]}") from None


def _process(event: TimelineEvent) -> int:
    return _TRANSFERS if event.kind in ("send", "receive") else _COMPUTE


def _titles(rows: list[tuple[int, int]]) -> list[tuple[int, str]]:
    titles = {_COMPUTE: "pipeline", _TRANSFERS: "transfers"}
    return [(process, titles[process]) for process in sorted({process for process, _ in rows})]


def _name(what: str, process: int, thread: int, title: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": title}}
