"""``--trace-dir``: what stages did, beside what they were to do."""

import itertools
import json

import pytest

from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.timeline import from_chrome_trace, split_steps
from megatron.training.training import build_hooks, train
from tests.harness import run_ranks
from tests.training_harness import SHAPES, flags, start, write_corpus


def traced_run(argv):
    run = start(argv)
    train(run, build_hooks(run))


@pytest.mark.parametrize(
    ("name", "stages", "words"),
    [
        ("1f1b", 4, ""),
        ("zb-h1", 4, "--pipeline-schedule zb-h1"),
        ("interleaved", 2, "--num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2"),
    ],
)
def test_a_measured_timeline_has_the_actions_of_the_plan_in_their_order(tmp_path, name, stages, words):
    prefix = write_corpus(tmp_path / "corpus")
    folder = tmp_path / "trace"
    layout = f"--pipeline-model-parallel-size {stages} --trace-dir {folder} --trace-iterations 2 {words}"
    run_ranks(4, traced_run, flags(prefix, SHAPES["gpt2"], "--train-iters", "4", *layout.split()))
    chunks = 2 if name == "interleaved" else 1
    plan = build_schedule(name, stages=stages, microbatches=8, chunks=chunks)
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [f"stage_{stage:02d}.json" for stage in range(stages)]
    events = [
        event for path in files for event in from_chrome_trace(json.loads(path.read_text(encoding="utf-8")))
    ]
    steps = split_steps(events)
    assert len(steps) == 2  # the second and third iteration
    for step in steps:
        for stage, actions in enumerate(plan.stages):
            own = [event for event in step if event.stage == stage and event.kind != "wait"]
            own.sort(key=lambda event: event.start_ms)
            assert tuple(Action(event.kind, event.chunk, event.microbatch) for event in own) == actions
            assert all(event.start_ms <= event.end_ms for event in own)
            assert all(one.end_ms <= other.start_ms for one, other in itertools.pairwise(own))


def refusal(argv):
    run = start(argv)
    with pytest.raises(ValueError, match="--trace-dir") as refused:
        build_hooks(run)
    return str(refused.value)


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    line = flags(
        write_corpus(tmp_path / "corpus"), SHAPES["gpt2"], "--trace-dir", str(tmp_path / "file" / "x")
    )
    assert run_ranks(1, refusal, line) == [
        f"--trace-dir {tmp_path}/file/x: Not a directory; give a folder of yours"
    ]
