"""When each action of a schedule starts and ends, given how long actions and transfers take."""

from collections.abc import Mapping, Sequence

from megatron.core.pipeline_parallel.actions import Action, Kind, Schedule

Node = tuple[int, Action]
"""A stage and one of its actions."""
Span = tuple[float, float]
"""Start and end."""


def action_spans(
    schedule: Schedule,
    times: Mapping[Kind, Sequence[float]],
    transfer_time: float,
    *,
    orders: Sequence[Sequence[Action]] | None = None,
) -> dict[Node, Span]:
    """When each action runs if it waits for nothing but its input and the end of the action before it.

    Args:
        schedule: says which part of the model needs which.
        times: for each kind of action its time in each part of the model.
        transfer_time: time of an output from one stage to another.
        orders: the actions of each stage; default those of ``schedule``.

    Returns:
        Start and end of each action of each stage, in some order in which they can run.

    Raises:
        ValueError: if the order can't run, whatever the transfers.
    """
    orders = schedule.stages if orders is None else orders
    spans: dict[Node, Span] = {}
    at = [0] * len(orders)
    clock = [0.0] * len(orders)
    waiting: dict[Node, int] = {}
    ready = list(range(len(orders)))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while at[stage] < len(order):
            action = order[at[stage]]
            start = clock[stage]
            source = schedule.source(stage, action)
            if source is not None:
                if source not in spans:
                    waiting[source] = stage
                    break
                travelled = 0.0 if source[0] == stage else transfer_time
                start = max(start, spans[source][1] + travelled)
            clock[stage] = start + times[action.kind][schedule.part(stage, action.chunk)]
            spans[stage, action] = start, clock[stage]
            at[stage] += 1
            if (stage, action) in waiting:
                ready.append(waiting.pop((stage, action)))
    if waiting:
        held_up = ", ".join(f"stage {stage} for {orders[stage][at[stage]]}" for stage in waiting.values())
        raise ValueError(f"the schedule can never run: {held_up} would wait for an input that comes too late")
    return spans
