"""How long a schedule takes and how many activations it holds, on paper."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.blocking import lower, run_order


@dataclass(frozen=True)
class Simulation:
    """What one step of a schedule costs."""

    makespan: float
    """Time from the first action's start to the last one's end, in the unit of the times given."""
    bubble: float
    """Idle time over ideal time, where ideal is the busiest stage working without a pause."""
    peak_activations: list[int]
    """For each stage the most micro-batches whose activations it holds at once."""


def simulate(
    schedule: Sequence[Sequence[Action]],
    forward_time: float | Sequence[float],
    backward_time: float | Sequence[float],
) -> Simulation:
    """Time a schedule with blocking transfers that take no time themselves.

    An exchange starts when both its stages have come to it, as in the engine: what a stage loses by waiting
    until its output is taken counts too.

    Args:
        schedule: the actions of each stage, in order.
        forward_time: time of one forward, of each stage or the same for all.
        backward_time: time of one backward, likewise.

    Returns:
        Makespan, bubble and peak activations. For GPipe and 1F1B with equal stages the bubble is
        (stages - 1) / micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Raises:
        ValueError: if the schedule can't run.
    """
    programs = lower(schedule)
    times = {"forward": _each(forward_time, len(programs)), "backward": _each(backward_time, len(programs))}
    clock = [0.0] * len(programs)
    for stage, operation in run_order(programs):
        if isinstance(operation, Action):
            clock[stage] += times[operation.kind][stage]
        else:
            clock[stage] = clock[operation.peer] = max(clock[stage], clock[operation.peer])
    busy = [sum(times[action.kind][stage] for action in actions) for stage, actions in enumerate(schedule)]
    ideal = max(busy)
    return Simulation(
        makespan=max(clock),
        bubble=(max(clock) - ideal) / ideal,
        peak_activations=[_peak_activations(actions) for actions in schedule],
    )


def _each(time: float | Sequence[float], stages: int) -> list[float]:
    """One time a stage."""
    if not isinstance(time, Sequence):
        return [time] * stages
    if len(time) != stages:
        raise ValueError(f"{len(time)} times for {stages} stages")
    return list(time)


def _peak_activations(actions: Sequence[Action]) -> int:
    """The most forwards that have begun and whose backward has not ended."""
    held = peak = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        peak = max(peak, held)
    return peak
