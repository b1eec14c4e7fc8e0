"""Proves that the programs of all stages run to their end, whatever the timing.

The events of a step (actions, and transfers, each one event of both its ends) are ordered by the programs and
by the channels, and by nothing else. If that order has no cycle, all events can happen, and waiting can't
stop them. There is no cycle if and only if executing any event that all its predecessors have happened for,
again and again, gets through all of them; that is how it is checked here.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.pipeline_parallel.actions import Action, Exchange, Finish, Program, Schedule, Start


def check_blocking(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Prove that the programs do what the schedule says and can't deadlock.

    Each action must have its input when it runs; each output must be sent once, after it is made, to where it
    is needed; each transfer that is started must be finished. And the programs must run to their end

    * as they are, where a transfer begins only when both its ends have been started (rendezvous) and all
      earlier ones of its channel, on both stages, are through;
    * and with every transfer finished as soon as it is started, so that a send blocks until its receive is
      posted.

    Args:
        schedule: what the programs were made of.
        programs: the operations of each stage.

    Raises:
        ValueError: naming what doesn't hold, with what each stage waits for.
    """
    for stage, (program, actions) in enumerate(zip(programs, schedule.stages, strict=True)):
        ran = tuple(operation for operation in program if isinstance(operation, Action))
        if ran not in (actions, tuple(action for action in actions if action.kind == "forward")):
            raise ValueError(f"stage {stage} does not run the actions of its schedule in order")
        _check_transfers(schedule, stage, program)
    steps = _steps(schedule, programs)
    _check_in_order(steps)
    _check_fully_blocking(steps)


def unfinished_sends(program: Program) -> int:
    """The most outputs of a stage that are on their way at once."""
    now = most = 0
    for operation in program:
        if not isinstance(operation, Action) and operation.exchange.send is not None:
            now += 1 if isinstance(operation, Start) else -1
            most = max(most, now)
    return most


def _check_transfers(schedule: Schedule, stage: int, program: Program) -> None:
    """The transfers of one stage are the right ones, in the right places."""
    made: set[Action] = set()
    arrived: set[Action] = set()
    started: set[Exchange] = set()
    finished: set[Exchange] = set()
    for operation in program:
        if isinstance(operation, Action):
            source = schedule.source(stage, operation)
            if source is not None and source[0] != stage and operation not in arrived:
                raise ValueError(f"stage {stage} runs {operation} before its input has arrived")
            if source is not None and source[0] == stage and source[1] not in made:
                raise ValueError(f"stage {stage} runs {operation} before {source[1]}, whose output it needs")
            made.add(operation)
        elif isinstance(operation, Start):
            exchange = operation.exchange
            _check_start(schedule, stage, exchange, made)
            if exchange in started:
                raise ValueError(f"stage {stage} starts {exchange} twice")
            started.add(exchange)
        else:
            if operation.exchange not in started or operation.exchange in finished:
                raise ValueError(f"stage {stage} finishes {operation.exchange}, which is not on its way")
            finished.add(operation.exchange)
            if operation.exchange.receive is not None:
                arrived.add(operation.exchange.receive)
    if started != finished:
        raise ValueError(f"stage {stage} never finishes {started - finished}")
    sent = {exchange.send for exchange in started}
    for action in made:
        target = schedule.target(stage, action)
        if target is not None and target[0] != stage and action not in sent:
            raise ValueError(f"stage {stage} never sends the output of {action}")


def _check_start(schedule: Schedule, stage: int, exchange: Exchange, made: set[Action]) -> None:
    """What is sent has been made, and goes to where it is needed, on its channel; likewise a receive."""
    if (exchange.send is None) == (exchange.receive is None):
        raise ValueError(f"stage {stage} has {exchange}: a transfer goes one way")
    action = exchange.send or exchange.receive
    assert action is not None
    if exchange.send is not None and action not in made:
        raise ValueError(f"stage {stage} sends the output of {action} before it is made")
    beside = schedule.source if exchange.send is None else schedule.target
    other = beside(stage, action)
    if other is None or other[0] != exchange.peer or action.channel != exchange.channel:
        raise ValueError(f"stage {stage} has {exchange}: the tensor goes another way")


class _Step(NamedTuple):
    """A start or finish of a transfer, both of whose ends call it by one number."""

    starts: bool
    transfer: int
    peer: int
    line: int
    """The queue of the stage's channel that the transfer stands in."""
    facing: int
    """The queue of the peer's."""
    operation: Start | Finish


def _steps(schedule: Schedule, programs: Sequence[Program]) -> list[list[_Step]]:
    """What the stages do with each other; their actions hold up nobody for ever."""
    numbers: dict[tuple[int, Action | None], int] = {}
    steps: list[list[_Step]] = []
    for stage, program in enumerate(programs):
        steps.append(own := [])
        for operation in program:
            if isinstance(operation, Action):
                continue
            peer, send, receive, channel = operation.exchange
            end = (stage, receive) if send is None else schedule.target(stage, send)
            assert end is not None
            number = numbers.setdefault(end, len(numbers))
            odd = channel == "gradients"
            own.append(
                _Step(isinstance(operation, Start), number, peer, 2 * stage + odd, 2 * peer + odd, operation)
            )
    return steps


def _check_in_order(steps: list[list[_Step]]) -> None:
    """Run to the end, with transfers beside the actions that are in order on each channel of each stage."""
    at = [0] * len(steps)
    lines: list[deque[_Step]] = [deque() for _ in range(2 * len(steps))]
    through: set[int] = set()
    ready = list(range(len(steps)))
    while ready:
        stage = ready.pop()
        own = steps[stage]
        while at[stage] < len(own):
            step = own[at[stage]]
            if step.starts:
                lines[step.line].append(step)
                ready += _let_through(lines, step.line, through)
            elif step.transfer not in through:
                break
            at[stage] += 1
    _check_end(steps, at, "with transfers in order on each channel")


def _let_through(lines: list[deque[_Step]], line: int, through: set[int]) -> list[int]:
    """Let through what is first in line at both ends, as long as there is; the stages concerned."""
    concerned: list[int] = []
    look = [line]
    while look:
        here = lines[look.pop()]
        if not here:
            continue
        step = here[0]
        facing = lines[step.facing]
        if facing and facing[0].transfer == step.transfer:
            through.add(step.transfer)
            here.popleft()
            facing.popleft()
            concerned += (step.line // 2, step.peer)
            look += (step.line, step.facing)
    return concerned


def _check_fully_blocking(steps: list[list[_Step]]) -> None:
    """Run to the end, with each stage stopping at a start until its peer has come to it too."""
    at = [0] * len(steps)
    ready = list(range(len(steps)))
    while ready:
        stage = ready.pop()
        own = steps[stage]
        while at[stage] < len(own):
            step = own[at[stage]]
            if step.starts:
                there = steps[step.peer]
                position = at[step.peer]
                if position == len(there) or not there[position].starts:
                    break
                if there[position].transfer != step.transfer:
                    break
                at[step.peer] += 1
                ready.append(step.peer)
            at[stage] += 1
    _check_end(steps, at, "with transfers that block")


def _check_end(steps: list[list[_Step]], at: list[int], how: str) -> None:
    """Nothing may be left over."""
    stuck = {stage: own[at[stage]].operation for stage, own in enumerate(steps) if at[stage] < len(own)}
    if stuck:
        waits = "; ".join(f"stage {stage} for {operation}" for stage, operation in stuck.items())
        raise ValueError(f"{how} the stages wait for each other in a circle: {waits}")
