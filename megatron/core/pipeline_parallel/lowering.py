"""Puts the transfers into a schedule: one program a stage, which the engine runs on process groups."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import (
    Action,
    Exchange,
    Finish,
    Kind,
    Program,
    Schedule,
    Start,
)

MOST_UNFINISHED_SENDS = 2
"""Outputs of a stage that may still be on their way while it makes the next one."""

_TIMES: dict[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def lower(schedule: Schedule, *, forward_only: bool = False) -> list[Program]:
    """Add the transfers to a schedule.

    The actions of all stages are put into one serial order: that in which they end if a forward takes one
    unit of time, each half of a backward too, and a transfer none. Right after each action its output is
    transferred: its stage starts the send, and the receiver, wherever it has got to in its own actions, the
    receive. So each receive is posted before the action that its stage runs while the output is made
    elsewhere, and all starts of all stages follow from one serial order, which is why they can't deadlock.

    A receive is finished right before the action that needs it. A send is finished when its stage has made
    the output after the next, at the latest, so that no more than :data:`MOST_UNFINISHED_SENDS` are on
    their way while it computes. Where the next part of the model is on the same stage, nothing travels.

    Args:
        schedule: the actions of each stage.
        forward_only: leave the backwards out, for an evaluation.

    Returns:
        The operations of each stage, in order.

    Raises:
        ValueError: if the stages' actions don't match, or no order of transfers could ever run them.
    """
    orders = [
        [action for action in actions if action.kind == "forward" or not forward_only]
        for actions in schedule.stages
    ]
    flow = Flow(schedule)
    programs: list[Program] = [[] for _ in orders]
    arriving: list[dict[Action, Finish]] = [{} for _ in orders]
    leaving: list[list[Finish]] = [[] for _ in orders]
    for stage, action in _in_order_of_ends(orders, flow):
        program = programs[stage]
        if finish := arriving[stage].pop(action, None):
            program.append(finish)
        program.append(action)
        target = flow.target(stage, action)
        if target is None or target.stage == stage:
            continue
        if len(leaving[stage]) == MOST_UNFINISHED_SENDS:
            program.append(leaving[stage].pop(0))
        channel = action.channel
        assert channel is not None
        send = Exchange(target.stage, action, None, channel)
        receive = Exchange(stage, None, target.action, channel)
        program.append(Start(send))
        leaving[stage].append(Finish(send))
        programs[target.stage].append(Start(receive))
        arriving[target.stage][target.action] = Finish(receive)
    for program, unfinished in zip(programs, leaving, strict=True):
        program += unfinished
    return programs


class Node(NamedTuple):
    """An action and where it runs."""

    stage: int
    action: Action


class Flow:
    """Which action needs the output of which."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        parts = range(schedule.last_part + 1)
        self._place = [schedule.place(part) for part in parts]
        self._part = {place: part for part, place in zip(parts, self._place, strict=True)}

    def target(self, stage: int, action: Action) -> Node | None:
        """The action that needs the output of ``action``, and where; None if the output is the step's."""
        if action.kind == "backward_weight":
            return None
        return self._beside(stage, action, 1 if action.kind == "forward" else -1)

    def source(self, stage: int, action: Action) -> Node | None:
        """The action of another part whose output ``action`` needs, and where."""
        if action.kind == "backward_weight":
            return None
        return self._beside(stage, action, -1 if action.kind == "forward" else 1)

    def _beside(self, stage: int, action: Action, step: int) -> Node | None:
        part = self._part[stage, action.chunk] + step
        if not 0 <= part < len(self._place):
            return None
        other, chunk = self._place[part]
        return Node(other, Action(action.kind, chunk, action.microbatch))


def _in_order_of_ends(orders: Sequence[Sequence[Action]], flow: Flow) -> Iterator[Node]:
    """All actions in the order of their ends; of those that end together, even stages' come first."""
    ends: dict[Node, int] = {}
    at = [0] * len(orders)
    clock = [0] * len(orders)
    waiting: dict[Node, int] = {}
    ready = list(range(len(orders)))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while at[stage] < len(order):
            action = order[at[stage]]
            source = flow.source(stage, action)
            arrival = 0 if source is None else ends.get(source)
            if arrival is None:
                assert source is not None
                waiting[source] = stage
                break
            clock[stage] = max(clock[stage], arrival) + _TIMES[action.kind]
            node = Node(stage, action)
            ends[node] = clock[stage]
            at[stage] += 1
            if node in waiting:
                ready.append(waiting.pop(node))
    if stuck := [stage for stage, order in enumerate(orders) if at[stage] < len(order)]:
        held_up = ", ".join(f"stage {stage} for {orders[stage][at[stage]]}" for stage in stuck)
        raise ValueError(f"the schedule can never run: {held_up} would wait for an input that comes too late")
    return itertools.chain(sorted(ends, key=lambda node: (ends[node], node.stage % 2, node.stage)))
