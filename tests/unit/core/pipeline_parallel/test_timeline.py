import json

import pytest

from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import (
    Summary,
    TimelineEvent,
    from_chrome_trace,
    split_steps,
    summarize,
    to_chrome_trace,
)

EVENTS = [
    TimelineEvent(1, "forward", 0, 3, 1.5, 4.0),
    TimelineEvent(0, "send", 1, 2, 0.25, 0.5),
    TimelineEvent(1, "wait", 0, 2, 0.5, 1.5),
]


def test_a_trace_as_chrome_wants_it():
    # The Trace Event Format: complete events "X" with ts and dur in microseconds, metadata "M".
    trace = json.loads(json.dumps(to_chrome_trace(EVENTS)))
    assert [entry["args"]["name"] for entry in trace["traceEvents"] if entry["ph"] == "M"] == [
        *("pipeline", "transfers", "stage 1", "stage 0")
    ]
    complete = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert len(complete) == 3
    assert complete[2] == {
        "name": "forward 3",
        "cat": "forward",
        "ph": "X",
        "ts": 1500.0,
        "dur": 2500.0,
        "pid": 0,
        "tid": 1,
        "args": {"stage": 1, "chunk": 0, "microbatch": 3},
    }
    assert [(entry["pid"], entry["tid"]) for entry in complete] == [(1, 0), (0, 1), (0, 1)]


def test_events_come_back():
    assert from_chrome_trace(json.loads(json.dumps(to_chrome_trace(EVENTS)))) == [
        EVENTS[1],
        EVENTS[2],
        EVENTS[0],
    ]
    order = build_schedule("zb-v", stages=3, microbatches=6, chunks=2)
    times = {"forward_time": 1, "backward_input_time": 1, "backward_weight_time": 1}
    planned = simulate(order, **times, transfer_time=0.5).events
    assert from_chrome_trace(to_chrome_trace(planned)) == list(planned)
    assert from_chrome_trace(to_chrome_trace([])) == []


@pytest.mark.parametrize(
    "trace",
    [
        [],
        {"events": []},
        {"traceEvents": [3]},
        {
            "traceEvents": [
                {
                    "ph": "X",
                    "cat": "lunch",
                    "ts": 0,
                    "dur": 1,
                    "args": {"stage": 0, "chunk": 0, "microbatch": 0},
                }
            ]
        },
        {
            "traceEvents": [
                {"ph": "X", "cat": "forward", "ts": 0, "args": {"stage": 0, "chunk": 0, "microbatch": 0}}
            ]
        },
        {"traceEvents": [{"ph": "X", "cat": "forward", "ts": 0, "dur": 1, "args": {"stage": "a"}}]},
    ],
)
def test_other_files_are_refused(trace):
    with pytest.raises(ValueError, match="not a"):
        from_chrome_trace(trace)


def test_a_summary_is_what_the_simulation_says():
    times = {"forward_time": 1.0, "backward_input_time": 1.5, "backward_weight_time": 0.5}
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        order = build_schedule(name, stages=4, microbatches=12, chunks=chunks)
        planned = simulate(order, **times, transfer_time=0.25)
        summary = summarize(planned.events)
        assert summary.makespan_ms == planned.makespan
        assert summary.bubble == pytest.approx(planned.bubble)
        assert tuple(summary.peak_activations.values()) == planned.peak_activations


def test_a_summary_by_hand():
    step = [
        TimelineEvent(1, "forward", 0, 0, 13.0, 15.0),
        TimelineEvent(1, "backward", 0, 0, 15.0, 18.0),
        TimelineEvent(0, "forward", 0, 0, 10.0, 12.0),
        TimelineEvent(0, "forward", 0, 1, 12.0, 14.0),
        TimelineEvent(0, "wait", 0, 0, 14.0, 19.0),
        TimelineEvent(0, "backward", 0, 0, 19.0, 20.0),
    ]
    peaks = {0: 2, 1: 1}
    assert summarize(step) == Summary(makespan_ms=10.0, ideal_ms=5.0, bubble=1.0, peak_activations=peaks)
    with pytest.raises(ValueError, match="no action"):
        summarize(step[4:5])


def test_steps_are_cut_apart_at_their_first_forward():
    # Stage 1 ends its first step when stage 0 is in its second; the first wait of a run belongs to no step.
    first = [
        TimelineEvent(0, "forward", 0, 0, 1, 2),
        TimelineEvent(0, "backward", 0, 0, 4, 5),
        TimelineEvent(1, "forward", 0, 0, 5, 6),
        TimelineEvent(1, "forward", 1, 0, 6, 7),
        TimelineEvent(1, "backward", 0, 0, 9, 10),
    ]
    second = [TimelineEvent(0, "forward", 0, 0, 8, 9), TimelineEvent(1, "forward", 0, 0, 11, 12)]
    early = TimelineEvent(1, "wait", 0, 0, 0, 1)
    assert split_steps([early, *second, *first]) == [first, second]
    assert split_steps([early]) == []
