"""Puts the transfers into a schedule: one program a stage, which the engine runs on process groups."""

from collections import Counter
from collections.abc import Sequence

from megatron.core.pipeline_parallel.actions import (
    Action,
    Exchange,
    Finish,
    Kind,
    Program,
    Schedule,
    Start,
)
from megatron.core.pipeline_parallel.timing import Node, action_spans

MOST_UNFINISHED_SENDS = 2
"""Outputs of a stage that may be on their way at once."""

_TIMES: dict[Kind, int] = {"forward": 1000, "backward": 2000, "backward_input": 1000, "backward_weight": 1000}
_TRANSFER_TIME = 1


def lower(schedule: Schedule, *, forward_only: bool = False) -> list[Program]:
    """Add the transfers to a schedule.

    The actions of all stages are put into one serial order: that in which they end if a forward and each half
    of a backward take equally long, and a transfer next to nothing. Right after each action its output is
    transferred: its stage starts the send, and the receiver, wherever it has got to in its own actions, the
    receive. So a receive is posted before the action that its stage runs while the output is still being
    made, transfers are started in the order in which they can take place, and the starts of all stages
    together follow one serial order, which is why they can't deadlock.

    A receive is finished right before the action that needs it. A send is finished when its stage has made
    the output after the next, so that no more than :data:`MOST_UNFINISHED_SENDS` outputs are on their way at
    once. Where the next part of the model is on the same stage, nothing travels.

    Args:
        schedule: the actions of each stage.
        forward_only: leave the backwards out, for an evaluation.

    Returns:
        The operations of each stage, in order.

    Raises:
        ValueError: if the stages' actions don't match, or no order of transfers could ever run them.
    """
    check_actions(schedule)
    orders: Sequence[Sequence[Action]] = schedule.stages
    if forward_only:
        orders = [[action for action in actions if action.kind == "forward"] for actions in orders]
    programs: list[Program] = [[] for _ in orders]
    arriving: list[dict[Action, Finish]] = [{} for _ in orders]
    leaving: list[list[Finish]] = [[] for _ in orders]
    for stage, action in _in_order_of_ends(schedule, orders):
        program = programs[stage]
        if finish := arriving[stage].pop(action, None):
            program.append(finish)
        program.append(action)
        target = schedule.target(stage, action)
        if target is None or target[0] == stage:
            continue
        if len(leaving[stage]) == MOST_UNFINISHED_SENDS:
            program.append(leaving[stage].pop(0))
        receiver, needy = target
        channel = action.channel
        assert channel is not None
        send = Exchange(receiver, action, None, channel)
        receive = Exchange(stage, None, needy, channel)
        program.append(Start(send))
        leaving[stage].append(Finish(send))
        programs[receiver].append(Start(receive))
        arriving[receiver][needy] = Finish(receive)
    for program, unfinished in zip(programs, leaving, strict=True):
        program += unfinished
    return programs


def check_actions(schedule: Schedule) -> None:
    """Check that all stages run the same passes once each, and each stage's in an order that it can run.

    A backward comes after its forward, a backward of the weights after that of the input, and those of one
    chunk in the order of the latter.

    Raises:
        ValueError: naming the stage and the action.
    """
    wanted = set(schedule.stages[0])
    for stage, actions in enumerate(schedule.stages):
        passes = set(actions)
        if len(passes) != len(actions):
            twice = next(action for action, count in Counter(actions).items() if count > 1)
            raise ValueError(f"stage {stage} runs {twice} twice")
        if different := passes ^ wanted:
            raise ValueError(f"stages 0 and {stage} differ in {sorted(different)}: each must run all passes")
        _check_order(stage, actions)
    chunks = {action.chunk for action in wanted}
    if not chunks <= set(range(schedule.chunks)):
        raise ValueError(f"actions of chunks {sorted(chunks)} in a schedule of {schedule.chunks} chunks")


def _check_order(stage: int, actions: Sequence[Action]) -> None:
    """Each backward comes after what it needs of its own stage, and nothing is left undone."""
    forwards: set[tuple[int, int]] = set()
    owed: dict[int, list[int]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "forward":
            forwards.add((chunk, microbatch))
        elif kind != "backward_weight":
            if (chunk, microbatch) not in forwards:
                raise ValueError(f"stage {stage} runs {Action(kind, chunk, microbatch)} before its forward")
            forwards.remove((chunk, microbatch))
            if kind == "backward_input":
                owed.setdefault(chunk, []).append(microbatch)
        elif owed.get(chunk, [])[:1] != [microbatch]:
            raise ValueError(
                f"stage {stage} runs {Action(kind, chunk, microbatch)}, but the inputs' backwards whose "
                f"weights are still owed are {owed.get(chunk, [])}, and the first is to be the next"
            )
        else:
            owed[chunk].pop(0)
    if forwards or any(owed.values()):
        raise ValueError(f"stage {stage} leaves backwards out: of {sorted(forwards)}, of weights {owed}")


def _in_order_of_ends(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> list[Node]:
    """All stages and actions in the order in which they end."""
    parts = schedule.last_part + 1
    times = {kind: [time] * parts for kind, time in _TIMES.items()}
    spans = action_spans(schedule, times, _TRANSFER_TIME, orders=orders)
    return sorted(spans, key=lambda node: (spans[node][1], node[0]))
