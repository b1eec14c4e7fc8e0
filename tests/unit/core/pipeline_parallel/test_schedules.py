import random
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from megatron.core.config import ParallelConfig
from megatron.core.pipeline_parallel.blocking import (
    SCHEDULES,
    Action,
    Exchange,
    check_blocking,
    gpipe,
    lower,
    one_f_one_b,
)

SHAPES = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 17)]


def _read(text):
    """``"F0 B0"`` as actions."""
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[word[0]], 0, int(word[1:])) for word in text.split()]


def _needs(stages, stage, action):
    """What must have run before an action, by the chain rule."""
    if action.kind == "forward":
        return [(stage - 1, action)] if stage > 0 else []
    own_forward = (stage, Action("forward", 0, action.microbatch))
    return [own_forward] + ([(stage + 1, action)] if stage < stages - 1 else [])


def _random_schedule(stages, microbatches, rng):
    """Any order that respects the needs, cut into stages."""
    left = {
        (stage, Action(kind, 0, i))
        for stage in range(stages)
        for kind in ("forward", "backward")
        for i in range(microbatches)
    }
    schedule = [[] for _ in range(stages)]
    while left:
        ready = [node for node in left if not any(need in left for need in _needs(stages, *node))]
        node = rng.choice(sorted(ready, key=repr))
        left.remove(node)
        schedule[node[0]].append(node[1])
    return schedule


def _run_with_blocking_sends(programs):
    """Run the programs, a transfer only when both ends have come to it; give the stages that get stuck."""
    at = [0] * len(programs)
    done = [set() for _ in programs]
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            if at[stage] == len(program):
                continue
            operation = program[at[stage]]
            if isinstance(operation, Action):
                assert all(need in done[stage] for need in _needs(len(programs), stage, operation))
                done[stage].add((stage, operation))
            else:
                peer = operation.peer
                mirror = Exchange(stage, send=operation.receive, receive=operation.send)
                if at[peer] == len(programs[peer]) or programs[peer][at[peer]] != mirror:
                    continue
                at[peer] += 1
                if operation.send is not None:
                    assert (stage, operation.send) in done[stage]
                    done[peer].add((stage, operation.send))
                if operation.receive is not None:
                    assert (peer, operation.receive) in done[peer]
                    done[stage].add((peer, operation.receive))
            at[stage] += 1
            moved = True
    return [stage for stage, program in enumerate(programs) if at[stage] < len(program)]


def test_orders_by_hand():
    assert one_f_one_b(3, 4) == [
        _read("F0 F1 F2 B0 F3 B1 B2 B3"),
        _read("F0 F1 B0 F2 B1 F3 B2 B3"),
        _read("F0 B0 F1 B1 F2 B2 F3 B3"),
    ]
    assert one_f_one_b(4, 2)[0] == _read("F0 F1 B0 B1")
    assert gpipe(2, 3) == [_read("F0 F1 F2 B0 B1 B2")] * 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock_with_blocking_sends(name):
    for stages, microbatches in SHAPES:
        schedule = SCHEDULES[name](stages, microbatches)
        for forward_only in (False, True):
            programs = lower(schedule, forward_only=forward_only)
            check_blocking(programs)
            assert _run_with_blocking_sends(programs) == []
            for actions, program in zip(schedule, programs, strict=True):
                ran = [operation for operation in program if isinstance(operation, Action)]
                assert ran == [a for a in actions if a.kind == "forward" or not forward_only]


@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_are_prompt_and_receives_late(name):
    for stages, microbatches in SHAPES:
        for program in lower(SCHEDULES[name](stages, microbatches)):
            for index, operation in enumerate(program):
                if not isinstance(operation, Exchange):
                    continue
                action_before = next((a for a in reversed(program[:index]) if isinstance(a, Action)), None)
                action_after = next((a for a in program[index:] if isinstance(a, Action)), None)
                assert operation.send in (None, action_before)
                assert operation.receive in (None, action_after)


def test_opposing_transfers_are_one_exchange():
    # Stage 1 of 3, 1F1B: warm-up, then each forward goes up as a gradient comes down, and the reverse.
    f, b = _read("F0 F1 F2 F3"), _read("B0 B1 B2 B3")
    assert lower(one_f_one_b(3, 4))[1] == [
        Exchange(0, receive=f[0]),
        f[0],
        Exchange(2, send=f[0]),
        Exchange(0, receive=f[1]),
        f[1],
        Exchange(2, send=f[1], receive=b[0]),
        b[0],
        Exchange(0, send=b[0], receive=f[2]),
        f[2],
        Exchange(2, send=f[2], receive=b[1]),
        b[1],
        Exchange(0, send=b[1], receive=f[3]),
        f[3],
        Exchange(2, send=f[3], receive=b[2]),
        b[2],
        Exchange(0, send=b[2]),
        Exchange(2, receive=b[3]),
        b[3],
        Exchange(0, send=b[3]),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_link_carries_each_microbatch_once_each_way(name):
    for stages, microbatches in SHAPES:
        programs = lower(SCHEDULES[name](stages, microbatches))
        sent = sum(isinstance(op, Exchange) and op.send is not None for program in programs for op in program)
        assert sent == 2 * (stages - 1) * microbatches


def test_any_order_that_can_run_is_lowered_without_deadlock():
    rng = random.Random(7)
    for _ in range(300):
        schedule = _random_schedule(rng.randint(2, 5), rng.randint(1, 6), rng)
        programs = lower(schedule)
        check_blocking(programs)
        assert _run_with_blocking_sends(programs) == []


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"can never run: stage 0 .*backward.*stage 1 .*forward"):
        lower([_read("F0 B0 F1 B1"), _read("F0 F1 B0 B1")])
    with pytest.raises(ValueError, match="before its forward"):
        lower([_read("B0 F0")])
    with pytest.raises(ValueError, match="twice"):
        lower([_read("F0 F0 B0")])
    with pytest.raises(ValueError, match="stages 0 and 1 differ"):
        lower([_read("F0 B0 F1 B1"), _read("F0 B0")])


def test_check_blocking_finds_the_classic_deadlock():
    # 1F1B without fused exchanges: stage 0 sends F1 while stage 1 sends B0, and neither posts its receive.
    f0, f1, b0, b1 = _read("F0 F1 B0 B1")
    upper = [f0, Exchange(1, send=f0), f1, Exchange(1, send=f1), Exchange(1, receive=b0), b0]
    upper += [Exchange(1, receive=b1), b1]
    lower_ = [Exchange(0, receive=f0), f0, b0, Exchange(0, send=b0), Exchange(0, receive=f1), f1, b1]
    lower_ += [Exchange(0, send=b1)]
    assert _run_with_blocking_sends([upper, lower_]) == [0, 1]
    with pytest.raises(ValueError, match=r"in a circle: .*forward.*backward"):
        check_blocking([upper, lower_])
    upper[3:5] = [Exchange(1, send=f1, receive=b0)]
    with pytest.raises(ValueError, match="does not mirror it"):
        check_blocking([upper, lower_])
    lower_[3:5] = [Exchange(0, send=b0, receive=f1)]
    check_blocking([upper, lower_])


def test_check_blocking_finds_misplaced_operations():
    f0 = Action("forward", 0, 0)
    with pytest.raises(ValueError, match=r"stage 1 runs .*before its input"):
        check_blocking([[f0, Exchange(1, send=f0)], [f0, Exchange(0, receive=f0)]])
    with pytest.raises(ValueError, match=r"stage 0 sends .*out of turn"):
        check_blocking([[Exchange(1, send=f0), f0], [Exchange(0, receive=f0), f0]])
    with pytest.raises(ValueError, match=r"stage 0 sends .* to 2 out of turn"):
        check_blocking([[f0, Exchange(2, send=f0)], [], [Exchange(0, receive=f0)]])
    with pytest.raises(ValueError, match="stage 0 never sends"):
        check_blocking([[f0], []])


def test_names_are_those_of_the_flag():
    assert set(SCHEDULES) == set(get_args(get_type_hints(ParallelConfig)["pipeline_schedule"]))
    with pytest.raises(ValueError, match="at least 1"):
        one_f_one_b(2, 0)
    with pytest.raises(ValueError, match="at least 1"):
        gpipe(0, 2)


def test_a_planner_needs_no_torch():
    code = "import sys, megatron.core.pipeline_parallel.simulation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
