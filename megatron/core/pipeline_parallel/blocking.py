"""Pipeline schedules as data: in what order each stage runs its micro-batches, and when it talks to whom.

A schedule is one list of actions a stage, a pure function of the numbers of stages and micro-batches.
:func:`lower` adds the transfers between neighbouring stages and gives one list of operations a stage, which
the engine runs on process groups and the simulator times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from megatron.core.pipeline_parallel.actions import Action


@dataclass(frozen=True)
class Exchange:
    """What a stage sends to a neighbour and receives from it in one go; the neighbour holds the mirror image.

    Both directions are posted together and the exchange ends when both are through, so neither end waits for
    the other to receive first.
    """

    peer: int
    """The neighbour's stage."""
    send: Action | None = None
    """The action whose output leaves: an activation after a forward, a gradient after a backward."""
    receive: Action | None = None
    """The action of this stage that needs what arrives."""


Operation = Action | Exchange
Schedule = list[list[Action]]
Program = list[Operation]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, section 2.3).

    At its peak every stage holds the activations of all micro-batches. Backwards run in the order of the
    forwards, so that gradients add up in the same order as in :func:`one_f_one_b`.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.

    Returns:
        The actions of each stage, in order.
    """
    _check_sizes(stages, microbatches)
    order = [_forward(i) for i in range(microbatches)] + [_backward(i) for i in range(microbatches)]
    return [list(order) for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: no more forwards ahead than needed (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Warm-up: ``stages - 1 - stage`` forwards. Steady state: one forward, one backward in turn. Cool-down: the
    backwards that are left. A stage holds the activations of at most ``stages - stage`` micro-batches.

    Args:
        stages: pipeline stages, at least 1.
        microbatches: micro-batches of a step, at least 1.

    Returns:
        The actions of each stage, in order.
    """
    _check_sizes(stages, microbatches)
    schedule = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        actions = [_forward(i) for i in range(warmup)]
        for i in range(microbatches - warmup):
            actions += [_forward(warmup + i), _backward(i)]
        schedule.append(actions + [_backward(i) for i in range(microbatches - warmup, microbatches)])
    return schedule


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""Schedules by the name that ``--pipeline-schedule`` takes."""


def lower(schedule: Sequence[Sequence[Action]], *, forward_only: bool = False) -> list[Program]:
    """Add the transfers to a schedule.

    The result is one serial execution of all stages, in which a send and its receive are one event, dealt out
    stage by stage. So it can't deadlock, even where a send blocks until it is received. A stage sends an
    output before it does anything else, and receives an input right before the action that needs it; what a
    pair of stages owes each other at that point is one exchange. Only where all stages would wait for each
    other does one receive something earlier than it needs it, which happens in neither GPipe nor 1F1B.

    Args:
        schedule: the actions of each stage, in order.
        forward_only: leave the backwards out, for an evaluation.

    Returns:
        The operations of each stage, in order.

    Raises:
        ValueError: if the stages' actions don't match, or no order of transfers could ever run them.
    """
    _check_actions(schedule)
    orders = [[a for a in actions if a.kind == "forward" or not forward_only] for actions in schedule]
    stages = [_Stage(index, order, len(orders)) for index, order in enumerate(orders)]
    while not all(stage.finished for stage in stages):
        ran = [stage.run() for stage in stages]
        exchanged = [_exchange_on_time(stage, stages) for stage in stages]
        if not any(ran) and not any(exchanged):
            _exchange_early(stages)
    return [stage.program for stage in stages]


def check_blocking(programs: Sequence[Sequence[Operation]]) -> None:
    """Prove that the programs run to their end even where a send blocks until its receive is posted.

    Both ends must hold each exchange; each action must have its input when it runs, and each output must be
    sent once, after it is made; and the union of all stages' orders, with both ends of an exchange taken as
    one event, must have no cycle. Then blocking can't stop them, whatever the timing.

    Args:
        programs: the operations of each stage.

    Raises:
        ValueError: naming what doesn't hold, with the cycle if there is one.
    """
    ends = {
        (stage, op) for stage, program in enumerate(programs) for op in program if isinstance(op, Exchange)
    }
    for stage, exchange in ends:
        if (exchange.peer, _mirrored(stage, exchange)) not in ends:
            raise ValueError(f"stage {stage} has {exchange}, but its peer does not mirror it")
    for stage, program in enumerate(programs):
        _check_inputs(stage, program, len(programs))
    try:
        run_order(programs)
    except CycleError as error:
        cycle = " <- ".join(f"stage {stage}: {operation}" for stage, operation in error.args[1])
        raise ValueError(f"stages wait for each other in a circle: {cycle}") from error


def run_order(programs: Sequence[Sequence[Operation]]) -> list[tuple[int, Operation]]:
    """One serial order of all stages' operations, both ends of an exchange being one event.

    Args:
        programs: the operations of each stage.

    Returns:
        Stage and operation in order; an exchange is there once, as its lower stage sees it.

    Raises:
        graphlib.CycleError: if there is no such order.
    """
    sorter: TopologicalSorter[tuple[int, Operation]] = TopologicalSorter()
    for stage, program in enumerate(programs):
        events = [
            (operation.peer, _mirrored(stage, operation))
            if isinstance(operation, Exchange) and operation.peer < stage
            else (stage, operation)
            for operation in program
        ]
        for index, event in enumerate(events):
            sorter.add(event, *events[max(index - 1, 0) : index])
    return list(sorter.static_order())


class _Stage:
    """How far the lowering has got on one stage."""

    def __init__(self, index: int, actions: list[Action], stages: int) -> None:
        self.index = index
        self.actions = actions
        self.stages = stages
        self.program: Program = []
        self.done = 0
        self.unsent: Action | None = None
        self.received: set[Action] = set()

    @property
    def finished(self) -> bool:
        """Whether all has run and been sent."""
        return self.done == len(self.actions) and self.unsent is None

    @property
    def awaited(self) -> Action | None:
        """The next action, if its input has yet to arrive."""
        if self.done == len(self.actions):
            return None
        action = self.actions[self.done]
        if action in self.received or _source(self.index, action, self.stages) is None:
            return None
        return action

    @property
    def destination(self) -> int | None:
        """The stage that the unsent output goes to."""
        return None if self.unsent is None else _destination(self.index, self.unsent, self.stages)

    def run(self) -> bool:
        """Run the next action if nothing holds it up; whether it did."""
        if self.done == len(self.actions) or self.unsent is not None or self.awaited is not None:
            return False
        action = self.actions[self.done]
        self.program.append(action)
        self.done += 1
        if _destination(self.index, action, self.stages) is not None:
            self.unsent = action
        return True

    def distance(self, action: Action) -> int:
        """How many actions this stage runs before ``action``."""
        return self.actions.index(action, self.done) - self.done


def _exchange_on_time(sender: _Stage, stages: list[_Stage]) -> bool:
    """Transfer ``sender``'s output if its receiver needs it now and owes no other stage; whether it did."""
    if sender.destination is None:
        return False
    receiver = stages[sender.destination]
    if receiver.awaited != sender.unsent:
        return False
    mutual = receiver.destination == sender.index and sender.awaited == receiver.unsent
    if receiver.unsent is not None and not mutual:
        return False
    _exchange(sender, receiver)
    return True


def _exchange_early(stages: list[_Stage]) -> None:
    """All stages wait for each other: let the output that is needed soonest be received ahead of its turn."""
    waiting = [
        (stages[stage.destination].distance(stage.unsent), stage.index, stage.destination)
        for stage in stages
        if stage.unsent is not None and stage.destination is not None
    ]
    if not waiting:
        held_up = ", ".join(f"stage {stage.index} for {stage.awaited}" for stage in stages if stage.awaited)
        raise ValueError(f"the schedule can never run: {held_up} would wait for an input that comes too late")
    _, sender, receiver = min(waiting)
    _exchange(stages[sender], stages[receiver])


def _exchange(sender: _Stage, receiver: _Stage) -> None:
    """Transfer ``sender``'s output, and in the same exchange what ``receiver`` has for it."""
    there, back = sender.unsent, None
    if receiver.destination == sender.index:
        back = receiver.unsent
    sender.program.append(Exchange(receiver.index, send=there, receive=back))
    receiver.program.append(Exchange(sender.index, send=back, receive=there))
    sender.unsent = None
    assert there is not None
    receiver.received.add(there)
    if back is not None:
        receiver.unsent = None
        sender.received.add(back)


def _forward(microbatch: int) -> Action:
    return Action("forward", 0, microbatch)


def _backward(microbatch: int) -> Action:
    return Action("backward", 0, microbatch)


def _destination(stage: int, action: Action, stages: int) -> int | None:
    """The stage that needs what ``action`` makes: the next one, for a gradient the one before."""
    neighbour = stage + 1 if action.kind == "forward" else stage - 1
    return neighbour if 0 <= neighbour < stages else None


def _source(stage: int, action: Action, stages: int) -> int | None:
    """The stage whose same action makes the input of ``action``."""
    neighbour = stage - 1 if action.kind == "forward" else stage + 1
    return neighbour if 0 <= neighbour < stages else None


def _check_sizes(stages: int, microbatches: int) -> None:
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"{stages} stages and {microbatches} micro-batches: a schedule needs at least 1 of each"
        )


def _check_actions(schedule: Sequence[Sequence[Action]]) -> None:
    """All stages run the same actions once each, every backward after its forward."""
    for stage, actions in enumerate(schedule):
        where = {action: position for position, action in enumerate(actions)}
        if len(where) != len(actions):
            raise ValueError(f"stage {stage} runs an action twice")
        if different := where.keys() ^ set(schedule[0]):
            raise ValueError(f"stages 0 and {stage} differ in {different}: each must run all micro-batches")
        for action, position in where.items():
            forward = Action("forward", action.chunk, action.microbatch)
            if where.get(forward, len(actions)) > position:
                raise ValueError(f"stage {stage} runs {action} before its forward")


def _mirrored(stage: int, exchange: Exchange) -> Exchange:
    """What the peer calls an exchange of ``stage``."""
    return Exchange(stage, send=exchange.receive, receive=exchange.send)


def _check_inputs(stage: int, program: Sequence[Operation], stages: int) -> None:
    """Each action has its input when it runs; each output is sent once, when it is made, to where it goes."""
    received: set[Action] = set()
    unsent: set[Action] = set()
    for operation in program:
        if isinstance(operation, Action):
            if _source(stage, operation, stages) is not None and operation not in received:
                raise ValueError(f"stage {stage} runs {operation} before its input has arrived")
            if _destination(stage, operation, stages) is not None:
                unsent.add(operation)
            continue
        if operation.send is not None:
            if operation.send not in unsent or _destination(stage, operation.send, stages) != operation.peer:
                raise ValueError(f"stage {stage} sends {operation.send} to {operation.peer} out of turn")
            unsent.remove(operation.send)
        if operation.receive is not None:
            received.add(operation.receive)
    if unsent:
        raise ValueError(f"stage {stage} never sends {unsent}")
