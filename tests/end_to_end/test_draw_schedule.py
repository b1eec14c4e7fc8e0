"""The painter of schedules: planned timelines as the formulas say, measured ones as they were written."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from megatron.core.pipeline_parallel.timeline import TimelineEvent, from_chrome_trace, to_chrome_trace
from megatron.training.console import run_as_program
from tools import draw_schedule


@pytest.fixture
def paint(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["draw_schedule.py", *map(str, arguments)])
        run_as_program(draw_schedule.main)
        return capsys.readouterr().out

    return run


def plan(name, stages=4, microbatches=8):
    return ("--schedule", name, "--stages", stages, "--microbatches", microbatches)


def actions_of(trace, stage):
    events = sorted(from_chrome_trace(trace), key=lambda event: event.start_ms)
    return [(e.kind, e.chunk, e.microbatch) for e in events if e.stage == stage and e.is_action]


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_a_plan_in_chrome_s_format_has_the_actions_that_training_runs(paint, tmp_path, name):
    out = tmp_path / "plan.json"
    paint(*plan(name), "--comm-ms", "0.1", "--out", out)
    order = build_schedule(name, stages=4, microbatches=8, chunks=SCHEDULE_CHUNKS[name].start)
    trace = json.loads(out.read_text())
    assert [actions_of(trace, stage) for stage in range(4)] == [list(actions) for actions in order.stages]


def test_times_are_those_of_the_flags(paint, tmp_path):
    out = tmp_path / "plan.json"
    flags = ("--forward-ms", "3", "--backward-ms", "8", "--weight-ms", "2", "--comm-ms", "0.5", "--out", out)
    lasts = {}
    for name in ("1f1b", "zb-h1", "zb-v"):
        paint(*plan(name), *flags)
        events = from_chrome_trace(json.loads(out.read_text()))
        lasts[name] = {event.kind: round(event.end_ms - event.start_ms, 9) for event in events}
    assert lasts["1f1b"] == {"forward": 3, "backward": 8, "send": 0.5, "receive": 0.5}
    assert lasts["zb-h1"]["backward_input"] == 6
    assert lasts["zb-h1"]["backward_weight"] == 2
    assert lasts["zb-v"]["forward"] == 1.5  # a chunk is half of a stage


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # (p - 1) / m of 24 ms, and of what is left of it where backwards are split.
        ("1f1b", "33 ms, bubble 37.5% of the ideal time, peak activations by stage 4 3 2 1 (micro-batches)"),
        ("gpipe", "33 ms, bubble 37.5% of the ideal time, peak activations by stage 8 8 8 8 (micro-batches)"),
        ("zb-h1", "27 ms, bubble 12.5% of the ideal time, peak activations by stage 4 4 4 4 (micro-batches)"),
        (
            "interleaved",
            "28.5 ms, bubble 18.8% of the ideal time, peak activations by stage 11 9 7 5 (micro-b",
        ),
        (
            "zb-v",
            "25.5 ms, bubble 6.2% of the ideal time, peak activations by stage 8 8 8 8 (micro-batches in",
        ),
    ],
)
def test_the_title_says_what_the_schedule_costs(paint, tmp_path, name, said):
    out = tmp_path / "made" / "plan.json"
    assert said in paint(*plan(name), "--out", out)


def test_an_svg_has_a_number_for_each_action(paint, tmp_path):
    out = tmp_path / "plan.svg"
    paint(*plan("zb-v", 2, 7), "--out", out)
    root = ElementTree.parse(out).getroot()
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "stage 1" in texts
    assert "backward, weights, chunk 1" in texts
    for microbatch in ("1", "3", "6"):  # three kinds through two chunks of two stages
        assert texts.count(microbatch) == 12


def test_a_png_of_a_large_plan(paint, tmp_path):
    out = tmp_path / "plan.PNG"
    said = paint(*plan("interleaved", 4, 16), "--chunks", 3, "--group-size", 8, "--out", out)
    assert "4 stages, 16 micro-batches, 3 chunks" in said
    assert out.read_bytes().startswith(b"\x89PNG")


def run_of(stage, begin, *, steps=2):
    """Two micro-batches forward and backward, again after 100 ms, starting at ``begin``."""
    events = []
    for step in range(steps):
        clock = begin + 100 * step
        for kind, length in (("forward", 1.0), ("backward", 2.0 + step)):
            for microbatch in range(2):
                events.append(TimelineEvent(stage, kind, 0, microbatch, clock, clock + length))
                clock += length
        events.append(TimelineEvent(stage, "wait", 0, 0, clock, clock + 1))
    return events


def write(path, events):
    path.write_text(json.dumps(to_chrome_trace(events)))


def test_a_measured_timeline_is_the_last_step_of_each_stage(paint, tmp_path):
    traces, out = tmp_path / "traces", tmp_path / "measured.json"
    traces.mkdir()
    for stage, begin in enumerate((5000.0, 5001.0)):
        write(traces / f"stage_{stage:02d}.json", run_of(stage, begin))
    (traces / "events.json").write_text("[]")  # another program's, in the same folder
    (traces / "stage_00.json.old").write_text("")
    said = paint("--trace", traces, "--out", out)
    # Of 8 ms each (forwards of 1, backwards of 3), the second stage begins 1 ms later.
    assert (
        "measured, step 1 of 2\n9 ms, bubble 12.5% of the 8 ms that the busiest stage works, "
        "peak activations by stage 2 2" in said
    )
    events = [event for event in from_chrome_trace(json.loads(out.read_text())) if event.is_action]
    assert len(events) == 8
    assert events[0] == TimelineEvent(0, "forward", 0, 0, 0.0, 1.0)
    assert events[1].start_ms == pytest.approx(1.0)
    assert max(event.end_ms for event in events) == pytest.approx(9.0)
    assert "7 ms, bubble 16.7%" in paint("--trace", traces, "--step", 0, "--out", tmp_path / "measured.png")
    assert "6 ms, bubble 0.0%" in paint("--trace", traces / "stage_01.json", "--step", -2, "--out", out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "x.png"], "give either --schedule, to plan, or --trace, to draw what a run has measured"),
        (
            ["--schedule", "gpipe", "--out", "x.png"],
            "--schedule gpipe wants --stages and --microbatches, too",
        ),
        (
            [*plan("gpipe"), "--out", "x.doc"],
            "--out x.doc: give a name that ends in one of .png, .svg, .json",
        ),
        (
            [*plan("pipe"), "--out", "x.png"],
            "--schedule pipe: there is gpipe, 1f1b, interleaved, zb-h1, zb-v",
        ),
        (
            [*plan("1f1b"), "--comm-ms", "-1", "--out", "x.png"],
            "--comm-ms -1.0: wants milliseconds, at least 0",
        ),
        ([*plan("1f1b"), "--forward-ms", "nan", "--out", "x.png"], "--forward-ms nan: wants milliseconds"),
        ([*plan("zb-v"), "--weight-ms", "3", "--out", "x.png"], "--weight-ms 3 is a part of --backward-ms 2"),
        (
            [*plan("1f1b"), "--chunks", "2", "--out", "x.png"],
            "error: --schedule 1f1b takes 1 chunk a stage, not 2: see --chunks\n",
        ),
        (
            [*plan("interleaved", 4, 6), "--out", "x.png"],
            "error: --schedule interleaved cannot run 6 micro-batches in groups of 4 over --stages 4: the "
            "last group would have 2, fewer than the stages. Valid counts of micro-batches near it: 4, 8, "
            "12. Change --microbatches, or give --group-size 6\n",
        ),
        (
            [*plan("interleaved"), "--group-size", "3", "--out", "x.png"],
            "error: --group-size 3 is less than --stages 4: a stage would wait in every turn",
        ),
        (
            [*plan("gpipe"), "--group-size", "4", "--out", "x.png"],
            "error: --group-size 4 is for --schedule interleaved, not gpipe\n",
        ),
        ([*plan("1f1b", 0), "--out", "x.png"], "--stages 0: must be at least 1"),
        ([*plan("1f1b"), "--chunks", "0", "--out", "x.png"], "--chunks 0: must be at least 1"),
        (
            [*plan("1f1b"), "--forward-ms", "0", "--backward-ms", "0", "--out", "x.png"],
            "--forward-ms 0 and --backward-ms 0: give one of them a time above 0",
        ),
        (
            [*plan("1f1b", 2000, 1000), "--out", "x.png"],
            "4,000,000 boxes are more than a picture can show, 2,000,000: give fewer --stages, --microb",
        ),
        ([*plan("1f1b"), "--out", "{good}/x.png"], "--out {good}/x.png: a part of it is a file, not a"),
        ([*plan("1f1b"), "--out", "{folder}"], "--out {folder}: it is a folder"),
        (["--trace", "{empty}", "--out", "x.png"], "--trace {empty} holds no stage_NN.json"),
        (
            ["--trace", "{empty}/no.json", "--out", "x.png"],
            "--trace {empty}/no.json: there is no such file or folder",
        ),
        (["--trace", "{still}", "--out", "x.png"], "{still}: no action of step 0 takes any time"),
        (["--trace", "{other}", "--out", "x.png"], "{other}: not a timeline: it has no list of traceEvents"),
        (["--trace", "{broken}", "--out", "x.png"], "{broken}: Expecting value"),
        (
            ["--trace", "{good}", "--step", "2", "--out", "x.png"],
            "--step 2: {good} has 2 steps, counted from 0",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_line(monkeypatch, capsys, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    names = {name: tmp_path / f"{name}.json" for name in ("other", "broken", "good", "still")}
    names["folder"] = tmp_path / "folder.svg"
    names["folder"].mkdir()
    names["empty"] = tmp_path / "empty"
    names["empty"].mkdir()
    names["other"].write_text("{}")
    names["broken"].write_text("")
    write(names["good"], run_of(0, 0))
    write(names["still"], [TimelineEvent(0, "forward", 0, 0, 1.0, 1.0)])
    monkeypatch.setattr(sys, "argv", ["draw_schedule.py", *(str(word).format(**names) for word in arguments)])
    with pytest.raises(SystemExit) as stop:
        run_as_program(draw_schedule.main)
    spoilt = said.startswith(("{other}", "{broken}", "{still}"))
    assert stop.value.code == (1 if spoilt else 2)
    error = capsys.readouterr().err
    assert said.format(**names) in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("**/*x.png"))
    assert not list(tmp_path.glob(".*"))
