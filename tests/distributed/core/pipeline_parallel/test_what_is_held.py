"""How long tensors live in the engine, seen from outside, and what it records of its run."""

import gc
import itertools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.pipeline_parallel.actions import Action, Finish
from megatron.core.pipeline_parallel.lowering import MOST_UNFINISHED_SENDS
from tests.distributed.core.pipeline_parallel.toy import Case, Stage, cases_for, programs_of, schedule_of
from tests.harness import make_state, run_ranks


class Counted(torch.autograd.Function):
    """Identity whose graph node counts as a held graph for as long as it lives."""

    @staticmethod
    def forward(ctx, hidden, live):
        ctx.token = Token(live)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Token:
    def __init__(self, live):
        self.live = live
        live.append(None)

    def __del__(self):
        self.live.pop()


def _alive(storages):
    return sum(not storage.expired() for storage in storages)


class Watch:
    """Counts, after each action of a step, the graphs, recipes, inputs and outputs that are still there."""

    def __init__(self, stage):
        self.stage = stage
        self.graphs, self.inputs, self.outputs = [], [], []
        self.seen = []

    def forward(self, chunk, microbatch, hidden):
        if hidden is not None:
            self.inputs.append(StorageWeakRef(hidden.untyped_storage()))
        output = Counted.apply(self.stage.forward(chunk, microbatch, hidden), self.graphs)
        if self.stage.parts[chunk] < self.stage.last_part:
            self.outputs.append(StorageWeakRef(output.untyped_storage()))
        return output

    def look(self, event):
        if event.kind != "wait":
            owed = sum(deferred.owed for deferred in self.stage.deferred)
            counts = len(self.graphs), owed, _alive(self.inputs), _alive(self.outputs)
            self.seen.append(((event.kind, event.chunk, event.microbatch), *counts))


def _watch(pp, cases):
    state = make_state(pp=pp)
    results = []
    for case in cases:
        watch = Watch(Stage(state, case))
        watch.stage.step(forward=watch.forward, recorder=watch.look)
        watch.stage.step(forward=watch.forward)
        left = len(watch.graphs), _alive(watch.inputs), _alive(watch.outputs)
        results.append((watch.seen, left))
    return results


def test_nothing_is_held_longer_than_the_schedule_needs():
    pp = 4
    cases = [
        Case("gpipe", 1, 6),
        Case("1f1b", 1, 6),
        Case("interleaved", 2, 8),
        Case("zb-h1", 1, 6),
        Case("zb-v", 2, 6),
    ]
    ranks = run_ranks(pp, _watch, pp, cases)
    for stage, index in itertools.product(range(pp), range(len(cases))):
        case, (seen, left) = cases[index], ranks[stage][index]
        schedule = schedule_of(case, pp)
        assert [Action(*action) for action, *_ in seen] == list(schedule.stages[stage])
        graphs = owed = travelled = 0
        for (kind, chunk, _), live_graphs, live_recipes, inputs, outputs in seen:
            graphs += {"forward": 1, "backward_weight": 0}.get(kind, -1)
            owed += {"backward_input": 1, "backward_weight": -1}.get(kind, 0)
            assert (live_graphs, live_recipes) == (graphs, owed)
            if schedule.part(stage, chunk) > 0:
                travelled += {"forward": 1, "backward_weight": 0}.get(kind, -1)
            # Recipes hold inputs too, of one pass each.
            assert inputs <= travelled + owed
            # An output is gone although its graph lives, unless it has just been made, is still on its way
            # or, at the turn of the V, is the next chunk's input.
            handed_over = travelled + owed if case.name == "zb-v" and stage == pp - 1 else 0
            assert outputs <= (kind == "forward") + MOST_UNFINISHED_SENDS + handed_over
        assert left == (0, 0, 0)


def _count_tensors(pp, case, iterations):
    """Tensors that the garbage collector knows of after each step."""
    stage = Stage(make_state(pp=pp), case)
    counts = []
    for _ in range(iterations):
        stage.step()
        gc.collect()
        counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    return counts


def test_steps_leave_nothing_behind():
    for counts in run_ranks(2, _count_tensors, 2, Case("zb-v", 2, 3), 6):
        assert len(set(counts[1:])) == 1


def _record(pp, cases):
    state = make_state(pp=pp)
    results = []
    for case in cases:
        stage = Stage(state, case)
        events, evaluation = [], []
        stage.step(recorder=events.append)
        stage.step(recorder=evaluation.append, forward_only=True)
        results.append((events, evaluation))
    return results


def _as_actions(events):
    return [Action(event.kind, event.chunk, event.microbatch) for event in events if event.kind != "wait"]


def test_the_recorded_order_is_the_planned_one():
    pp, cases = 4, cases_for(4)
    ranks = run_ranks(pp, _record, pp, cases)
    for index, case in enumerate(cases):
        ends = {}
        for stage, results in enumerate(ranks):
            planned = list(schedule_of(case, pp).stages[stage])
            events, evaluation = results[index]
            assert _as_actions(events) == planned
            assert _as_actions(evaluation) == [action for action in planned if action.kind == "forward"]
            waits = [(event.chunk, event.microbatch) for event in events if event.kind == "wait"]
            finished = [op.exchange for op in programs_of(case, pp)[stage] if isinstance(op, Finish)]
            subjects = [exchange.send or exchange.receive for exchange in finished]
            assert waits == [(action.chunk, action.microbatch) for action in subjects]
            assert all(event.stage == stage and event.start_ms <= event.end_ms for event in events)
            assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(events))
            for event in events:
                if event.kind != "wait":
                    ends[stage, Action(event.kind, event.chunk, event.microbatch)] = event
        # Clocks of one host agree: nothing began before what it needs had ended.
        for (stage, action), event in ends.items():
            if target := schedule_of(case, pp).target(stage, action):
                assert event.end_ms <= ends[target].start_ms
