"""How long a schedule takes and how many activations it holds, on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action, Kind, Schedule
from megatron.core.pipeline_parallel.lowering import check_actions
from megatron.core.pipeline_parallel.timeline import EventKind, TimelineEvent
from megatron.core.pipeline_parallel.timing import Node, Span, action_spans

Times = float | Sequence[float]
"""Of one pass through one part of the model: the same for all, or one for each stage (whatever the chunk), or
one for each part in the model's order."""


@dataclass(frozen=True)
class Simulation:
    """What one step of a schedule costs."""

    makespan: float
    """Time from the first action's start to the last one's end, in the unit of the times given."""
    bubble: float
    """Idle time over ideal time, where ideal is the busiest stage working without a pause."""
    idle: tuple[float, ...]
    """For each stage the time between its first and its last action in which it does nothing."""
    peak_activations: tuple[int, ...]
    """For each stage the most activations that it holds at once, each of one micro-batch in one chunk: from
    the start of the forward until the backward has ended, with a split backward that of the weights."""
    peak_share: tuple[float, ...]
    """The same as a share of what one micro-batch leaves in the whole model, for parts of equal size."""
    events: tuple[TimelineEvent, ...]
    """All actions, and the transfers if they take time; in the order of their starts."""


def simulate(
    schedule: Schedule,
    *,
    forward_time: Times,
    backward_input_time: Times,
    backward_weight_time: Times,
    transfer_time: float = 0.0,
) -> Simulation:
    """Time a schedule, with transfers that run beside the actions.

    An action starts when its stage has ended the one before and its input is there: that is ``transfer_time``
    after it was made, or at once if it was made on the same stage. Nobody waits for a send to be taken, and
    transfers don't hold each other up.

    Args:
        schedule: the actions of each stage.
        forward_time: time of one forward through a part of the model.
        backward_input_time: time of one backward of its input.
        backward_weight_time: time of one backward of its weights; a whole backward takes the sum of both.
        transfer_time: time from one stage to another.

    Returns:
        What the step costs. With equal parts and no transfer time the bubble of p stages and m micro-batches
        is (p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) for v chunks interleaved (Narayanan et al. 2021,
        arXiv:2104.04473, section 2.2); where a forward and both halves of a backward are equal, too, and m is
        large enough, (p - 1) / (3 m) for ZB-H1 and (p - 1) / (6 m) for ZB-V.

    Raises:
        ValueError: if the schedule can't run, or the times don't fit it.
    """
    check_actions(schedule)
    inputs = _each(backward_input_time, schedule)
    weights = _each(backward_weight_time, schedule)
    times: dict[Kind, list[float]] = {
        "forward": _each(forward_time, schedule),
        "backward": [one + other for one, other in zip(inputs, weights, strict=True)],
        "backward_input": inputs,
        "backward_weight": weights,
    }
    spans = action_spans(schedule, times, transfer_time)
    busy = [
        sum(times[action.kind][schedule.part(stage, action.chunk)] for action in actions)
        for stage, actions in enumerate(schedule.stages)
    ]
    first = [spans[stage, actions[0]][0] for stage, actions in enumerate(schedule.stages)]
    last = [spans[stage, actions[-1]][1] for stage, actions in enumerate(schedule.stages)]
    peaks = tuple(map(_peak_activations, schedule.stages))
    makespan, ideal = max(last), max(busy)
    return Simulation(
        makespan=makespan,
        bubble=(makespan - ideal) / ideal if ideal else 0.0,
        idle=tuple(end - start - work for start, end, work in zip(first, last, busy, strict=True)),
        peak_activations=peaks,
        peak_share=tuple(peak / (schedule.last_part + 1) for peak in peaks),
        events=_events(schedule, spans, transfer_time),
    )


def _each(times: Times, schedule: Schedule) -> list[float]:
    """One time a part."""
    stages, parts = len(schedule.stages), schedule.last_part + 1
    each = list(times) if isinstance(times, Sequence) else [times] * parts
    if len(each) == stages:
        each = [each[schedule.place(part)[0]] for part in range(parts)]
    if len(each) != parts:
        wanted = str(stages) if stages == parts else f"{stages}, for each stage, or {parts}, for each part"
        raise ValueError(f"{len(each)} times {each}: give {wanted}")
    if any(time < 0 for time in each):
        raise ValueError(f"times {each}: none may be negative")
    return each


def _peak_activations(actions: Sequence[Action]) -> int:
    """The most forwards that have begun and whose last backward has not ended."""
    held = peak = 0
    for action in actions:
        if action.kind == "forward":
            held += 1
        elif action.kind != "backward_input":
            held -= 1
        peak = max(peak, held)
    return peak


def _events(
    schedule: Schedule, spans: Mapping[Node, Span], transfer_time: float
) -> tuple[TimelineEvent, ...]:
    """What a run with these times would record."""
    events: list[TimelineEvent] = []

    def record(stage: int, kind: EventKind, action: Action, start: float, end: float) -> None:
        events.append(TimelineEvent(stage, kind, action.chunk, action.microbatch, start, end))

    for (stage, action), (start, end) in spans.items():
        record(stage, action.kind, action, start, end)
        target = schedule.target(stage, action)
        if transfer_time and target is not None and target[0] != stage:
            record(stage, "send", action, end, end + transfer_time)
            record(target[0], "receive", target[1], end, end + transfer_time)
    return tuple(sorted(events, key=lambda event: (event.start_ms, event.stage)))
