import json

import pytest

from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import TimelineEvent, from_chrome_trace, to_chrome_trace

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
