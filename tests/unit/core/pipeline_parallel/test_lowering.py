import itertools
import random
from collections import Counter, deque

import pytest

from megatron.core.pipeline_parallel.actions import Action, Exchange, Finish, Schedule, Start
from megatron.core.pipeline_parallel.lowering import MOST_UNFINISHED_SENDS, lower
from megatron.core.pipeline_parallel.proof import check_blocking, unfinished_sends
from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from tests.unit.core.pipeline_parallel.orders import needs, places, random_schedule, read, schedule

SMALL_CHUNKS = {name: [v for v in range(1, 5) if v in chunks] for name, chunks in SCHEDULE_CHUNKS.items()}


def _shapes(name, stages, microbatches):
    """All schedules of a kind up to some numbers of stages and micro-batches, and four chunks."""
    for p in range(1, stages + 1):
        for m in range(1, microbatches + 1):
            for v in SMALL_CHUNKS[name]:
                if name != "interleaved" or m % p == 0:
                    yield build_schedule(name, stages=p, microbatches=m, chunks=v)


def _shapes_of_groups(stages, microbatches):
    """Interleaved schedules of two chunks whose micro-batches don't divide by the stages."""
    for p in range(2, stages + 1):
        for m in range(p + 1, microbatches + 1):
            groups = [g for g in range(p, m) if m % g >= p]
            for g in groups[:1] + groups[-1:]:
                yield build_schedule("interleaved", stages=p, microbatches=m, chunks=2, group_size=g)


def _send(peer, action):
    return Exchange(peer, action, None, action.channel)


def _receive(peer, action):
    return Exchange(peer, None, action, action.channel)


class _Machine:
    """Runs programs as a machine would.

    A transfer takes place when both its ends have been started and no earlier one of its channel is still on
    its way at either end. ``blocking``: and its stages stop until it has. What a stage knows is named by
    parts of the model.
    """

    def __init__(self, order, programs, *, blocking):
        self.programs = programs
        self.blocking = blocking
        where = places(len(programs), order.chunks, order.placement)
        self.parts = len(where)
        self.part = {place: part for part, place in enumerate(where)}
        self.known = [set() for _ in programs]
        self.lines = {
            (stage, channel): deque()
            for stage in range(len(programs))
            for channel in ("activations", "gradients")
        }
        self.started = set()
        self.through = set()

    def run(self):
        """The stages that get stuck."""
        at = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for stage, program in enumerate(self.programs):
                while at[stage] < len(program) and self.step(stage, program[at[stage]]):
                    at[stage] += 1
                    moved = True
            for end in self.lines:
                while self.transfer(*end):
                    moved = True
        return [stage for stage, program in enumerate(self.programs) if at[stage] < len(program)]

    def step(self, stage, operation):
        if isinstance(operation, Action):
            kind, chunk, microbatch = operation
            part = self.part[stage, chunk]
            assert self.known[stage].issuperset(needs(self.parts, part, kind, microbatch))
            self.known[stage].add((part, kind, microbatch))
            return True
        if isinstance(operation, Start) and (stage, operation) not in self.started:
            self.started.add((stage, operation))
            self.lines[stage, operation.exchange.channel].append(operation.exchange)
        waits = isinstance(operation, Finish) or self.blocking
        return not waits or (stage, operation.exchange) in self.through

    def transfer(self, stage, channel):
        """Let the first send in line through if its receive is the first in line, too; whether it was."""
        line = self.lines[stage, channel]
        if not line or line[0].send is None:
            return False
        peer = line[0].peer
        facing = self.lines[peer, channel]
        if not facing or facing[0].receive is None or facing[0].peer != stage:
            return False
        sent, got = line[0].send, facing[0].receive
        part = self.part[stage, sent.chunk]
        assert self.part[peer, got.chunk] == part + (1 if sent.kind == "forward" else -1)
        assert (sent.kind, sent.microbatch) == (got.kind, got.microbatch)
        assert (part, sent.kind, sent.microbatch) in self.known[stage]
        self.known[peer].add((part, sent.kind, sent.microbatch))
        self.through |= {(stage, line.popleft()), (peer, facing.popleft())}
        return True


def _run(order, programs, *, blocking):
    return _Machine(order, programs, blocking=blocking).run()


def test_a_program_by_hand():
    f0, f1, b0, b1 = read("F0 F1 B0 B1")
    sends = [_send(1, f0), _send(1, f1)]
    receives = [_receive(1, b0), _receive(1, b1)]
    first, second = lower(build_schedule("1f1b", stages=2, microbatches=2))
    # Stage 0's second output is made, and its receive posted, while stage 1 runs the first forward.
    assert first == [
        *(f0, Start(sends[0]), f1, Start(sends[1])),
        *(Start(receives[0]), Finish(receives[0]), b0),
        *(Start(receives[1]), Finish(receives[1]), b1),
        *(Finish(sends[0]), Finish(sends[1])),
    ]
    assert second == [
        *(Start(_receive(0, f0)), Start(_receive(0, f1)), Finish(_receive(0, f0)), f0),
        *(b0, Start(_send(0, b0)), Finish(_receive(0, f1)), f1, b1, Start(_send(0, b1))),
        *(Finish(_send(0, b0)), Finish(_send(0, b1))),
    ]


def test_nothing_travels_on_a_stage_of_its_own():
    for name, chunks in (("gpipe", 1), ("interleaved", 3), ("zb-v", 2)):
        order = build_schedule(name, stages=1, microbatches=4, chunks=chunks)
        assert lower(order) == [list(order.stages[0])]
    v = build_schedule("zb-v", stages=2, microbatches=4, chunks=2)
    turn = [op for op in lower(v)[1] if isinstance(op, Start) and op.exchange.channel == "activations"]
    received = [op.exchange.receive for op in turn if op.exchange.receive]
    assert received == list(read("F0 F1 F2 F3"))
    assert [op.exchange.send for op in turn if op.exchange.send] == list(read("F0' F1' F2' F3'"))


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_no_timing_stops_any_small_schedule(name):
    groups = _shapes_of_groups(8, 16) if name == "interleaved" else ()
    for order in itertools.chain(_shapes(name, 8, 32), groups):
        short = len(order.stages[0]) <= 40  # longer evaluations only repeat what shorter ones do
        for forward_only in (False, True) if short else (False,):
            programs = lower(order, forward_only=forward_only)
            check_blocking(order, programs)
            assert max(map(unfinished_sends, programs)) <= MOST_UNFINISHED_SENDS


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_small_schedules_run_on_a_machine(name):
    groups = _shapes_of_groups(3, 8) if name == "interleaved" else ()
    for order in itertools.chain(_shapes(name, 4, 8), groups):
        for forward_only in (False, True):
            programs = lower(order, forward_only=forward_only)
            for blocking in (False, True):
                assert _run(order, programs, blocking=blocking) == []


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_sends_are_prompt_and_receives_are_finished_late(name):
    for order in _shapes(name, 4, 8):
        for program in lower(order):
            for before, operation, after in zip(program, program[1:], program[2:], strict=False):
                if isinstance(operation, Finish) and operation.exchange.receive:
                    assert after == operation.exchange.receive
                if isinstance(operation, Start) and operation.exchange.send:
                    late = isinstance(before, Finish) and before.exchange.send
                    assert late or before == operation.exchange.send


def _posted_ahead(name, chunks):
    """For four stages and twelve micro-batches: how many receives are posted how many actions ahead."""
    ahead = Counter()
    for program in lower(build_schedule(name, stages=4, microbatches=12, chunks=chunks)):
        posted = {op.exchange.receive: i for i, op in enumerate(program) if isinstance(op, Start)}
        for action in filter(None, posted):
            between = program[posted[action] : program.index(action)]
            ahead[sum(isinstance(op, Action) for op in between)] += 1
    return ahead


def test_receives_are_posted_ahead_of_the_action_that_runs_meanwhile():
    # GPipe: all but the first on each of 3 links and 2 channels, by one action.
    assert _posted_ahead("gpipe", 1) == {0: 6, 1: 66}
    # 1F1B: where a stage waits for a gradient and the one after it for an activation, only one can be ahead.
    assert _posted_ahead("1f1b", 1)[0] <= 72 / 2 + 3
    for name, chunks, receives in (("zb-h1", 1, 72), ("interleaved", 2, 168), ("zb-v", 2, 144)):
        ahead = _posted_ahead(name, chunks)
        assert ahead.total() == receives
        assert ahead[0] <= receives / 4


def test_each_link_carries_each_microbatch_once_each_way():
    for name, parts, links in (("1f1b", 4, 3), ("zb-h1", 4, 3), ("interleaved", 8, 7), ("zb-v", 8, 6)):
        chunks = parts // 4
        programs = lower(build_schedule(name, stages=4, microbatches=8, chunks=chunks))
        sent = Counter(
            op.exchange.channel
            for program in programs
            for op in program
            if isinstance(op, Start) and op.exchange.send
        )
        assert sent == {"activations": links * 8, "gradients": links * 8}


def test_any_order_that_can_run_is_lowered_without_deadlock():
    rng = random.Random(7)
    for _ in range(200):
        placement = rng.choice(["loop", "v"])
        order = random_schedule(
            rng,
            stages=rng.randint(1, 4),
            chunks=2 if placement == "v" else rng.randint(1, 3),
            placement=placement,
            microbatches=rng.randint(1, 4),
            split=rng.random() < 0.5,
        )
        programs = lower(order)
        check_blocking(order, programs)
        for blocking in (False, True):
            assert _run(order, programs, blocking=blocking) == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (schedule("F0 B0 F1 B1", "F0 F1 B0 B1"), r"can never run: stage 0 .*backward.*stage 1 .*forward"),
        (schedule("B0 F0"), "stage 0 runs .*backward.* before its forward"),
        (schedule("F0 F0 B0"), "stage 0 runs .*forward.* twice"),
        (schedule("F0 B0 F1 B1", "F0 B0"), "stages 0 and 1 differ"),
        (schedule("F0 W0 I0"), r"inputs' backwards whose weights are still owed are \[\]"),
        (schedule("F0 F1 I0 I1 W1 W0"), r"still owed are \[0, 1\], and the first is to be the next"),
        (schedule("F0 I0 W0 F1 I1"), r"leaves backwards out: of \[\], of weights \{0: \[1\]\}"),
        (schedule("F0 F1 B0"), r"leaves backwards out: of \[\(0, 1\)\]"),
        (schedule("F0 F0' B0' B0"), r"actions of chunks \[0, 1\] in a schedule of 1 chunks"),
    ],
)
def test_an_order_that_cannot_run_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        lower(order)


def test_a_v_has_two_chunks():
    with pytest.raises(ValueError, match="3 chunks: a V has two"):
        Schedule((read("F0 B0"),), chunks=3, placement="v")


# The smallest pipeline in which sends cross: stage 0's second output and stage 1's first gradient.
CROSSING = schedule("F0 F1 B0 B1", "F0 B0 F1 B1")
F0, F1, B0, B1 = read("F0 F1 B0 B1")


def _at_once(*operations):
    """A program in which each transfer is finished as soon as it is started."""
    return [
        step for op in operations for step in ([op] if isinstance(op, Action) else [Start(op), Finish(op)])
    ]


def test_check_blocking_finds_the_classic_deadlock():
    upper = [F0, _send(1, F0), F1, _send(1, F1), _receive(1, B0), B0, _receive(1, B1), B1]
    lower_ = [_receive(0, F0), F0, B0, _send(0, B0), _receive(0, F1), F1, B1, _send(0, B1)]
    programs = [_at_once(*upper), _at_once(*lower_)]
    assert _run(CROSSING, programs, blocking=True) == [0, 1]
    with pytest.raises(ValueError, match=r"in order.* in a circle: stage 0 for .*send.*; stage 1 for .*send"):
        check_blocking(CROSSING, programs)
    lower_[3:5] = [_receive(0, F1), _send(0, B0)]
    programs = [_at_once(*upper), _at_once(*lower_)]
    check_blocking(CROSSING, programs)
    assert _run(CROSSING, programs, blocking=True) == []


def test_check_blocking_finds_what_only_blocking_sends_stop():
    # Each stage posts its send, then its receive: the channels let both through, blocking sends would not.
    upper = _at_once(F0, _send(1, F0), F1, _send(1, F1), _receive(1, B0), B0, _receive(1, B1), B1)
    upper[5], upper[6] = upper[6], upper[5]
    lower_ = _at_once(_receive(0, F0), F0, B0, _send(0, B0), _receive(0, F1), F1, B1, _send(0, B1))
    lower_[5], lower_[6] = lower_[6], lower_[5]
    assert _run(CROSSING, [upper, lower_], blocking=False) == []
    assert _run(CROSSING, [upper, lower_], blocking=True) == [0, 1]
    with pytest.raises(ValueError, match=r"with transfers that block .* in a circle"):
        check_blocking(CROSSING, [upper, lower_])


def test_check_blocking_finds_sends_that_stand_in_each_others_way_on_one_channel():
    # Round the loop both stages send activations to each other; on one channel no receive overtakes a send.
    order = build_schedule("interleaved", stages=2, microbatches=2, chunks=2)
    programs = lower(order)
    check_blocking(order, programs)
    program = programs[1]
    receive, send = Start(_receive(0, F1)), Start(_send(0, F0))
    assert program.index(receive) < program.index(send)
    program.remove(receive)
    program.insert(program.index(send) + 1, receive)
    assert _run(order, programs, blocking=False) == [0, 1]
    with pytest.raises(ValueError, match="in order on each channel the stages wait"):
        check_blocking(order, programs)


@pytest.mark.parametrize(
    ("upper", "lower_", "message"),
    [
        ([F0, _send(1, F0)], [F0], "stage 1 runs .* before its input has arrived"),
        ([_send(1, F0), F0], [_receive(0, F0), F0], "stage 0 sends .* before it is made"),
        ([F0, _send(2, F0)], [_receive(0, F0), F0], "stage 0 has .*goes another way"),
        ([F0, Exchange(1, F0, None, "gradients")], [_receive(0, F0), F0], "stage 0 has .*goes another way"),
        ([F0, Exchange(1, F0, F0, "activations")], [_receive(0, F0), F0], "a transfer goes one way"),
        ([F0], [_receive(0, F0), F0], "stage 0 never sends the output"),
        ([F0, _send(1, F0), _send(1, F0)], [_receive(0, F0), F0], "stage 0 starts .* twice"),
        ([F0, _send(1, F0)], [_receive(0, F0), F0, F1], "stage 1 does not run the actions of its schedule"),
    ],
)
def test_check_blocking_finds_misplaced_operations(upper, lower_, message):
    with pytest.raises(ValueError, match=message):
        check_blocking(schedule("F0 B0", "F0 B0"), [_at_once(*upper), _at_once(*lower_)])


def test_check_blocking_finds_transfers_that_are_not_finished_or_not_on_their_way():
    order = schedule("F0 B0", "F0 B0")
    for program_number, change, message in (
        (0, lambda program: program.pop(), r"stage 0 never finishes"),
        (0, lambda program: program.append(program[-1]), r"stage 0 finishes .* not on its way"),
        (1, lambda program: program.remove(Start(_receive(0, F0))), r"stage 1 finishes .* not on its way"),
    ):
        programs = lower(order)
        change(programs[program_number])
        with pytest.raises(ValueError, match=message):
            check_blocking(order, programs)
