import itertools
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from megatron.core.config import ParallelConfig
from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from tests.unit.core.pipeline_parallel.orders import places, read


def _orders(name, stages, microbatches, chunks=1, group_size=None):
    return build_schedule(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group_size
    ).stages


def test_one_f_one_b_and_gpipe_by_hand():
    assert _orders("1f1b", 3, 4) == (
        read("F0 F1 F2 B0 F3 B1 B2 B3"),
        read("F0 F1 B0 F2 B1 F3 B2 B3"),
        read("F0 B0 F1 B1 F2 B2 F3 B3"),
    )
    assert _orders("1f1b", 4, 2)[0] == read("F0 F1 B0 B1")
    assert _orders("gpipe", 2, 3) == (read("F0 F1 F2 B0 B1 B2"),) * 2


def test_interleaved_by_hand():
    # Narayanan et al. 2021, figure 4, drawn again for two stages of two chunks.
    assert _orders("interleaved", 2, 4, 2) == (
        read("F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"),
        read("F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"),
    )
    # Two micro-batches are all in flight before the first backward of the first stage.
    assert _orders("interleaved", 2, 2, 2) == (
        read("F0 F1 F0' F1' B0' B1' B0 B1"),
        read("F0 F1 F0' B0' F1' B1' B0 B1"),
    )


def test_interleaved_takes_groups_of_another_size_and_a_last_one_that_is_smaller():
    assert _orders("interleaved", 2, 5, 2, 3) == (
        read("F0 F1 F2 F0' F1' F2' B0' F3 B1' F4 B2' F3' B0 F4' B1 B2 B3' B4' B3 B4"),
        read("F0 F1 F2 F0' B0' F1' B1' F2' B2' F3 B0 F4 B1 F3' B2 F4' B3' B4' B3 B4"),
    )


def test_zb_h1_by_hand():
    # Qi et al. 2023, figure 3: 1F1B whose last stage is as many weights behind as there are stages before it.
    assert _orders("zb-h1", 3, 4) == (
        read("F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"),
        read("F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"),
        read("F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
    )
    assert _orders("zb-h1", 4, 8)[3] == read(
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    )
    assert _orders("zb-h1", 3, 1) == (read("F0 I0 W0"),) * 3


def test_zb_v_by_hand():
    assert _orders("zb-v", 2, 4, 2) == (
        read("F0 F1 F2 F0' I0' W0' F1' I1' W1' F3 I0 W0 F2' I2' W2' I1 W1 F3' I3' W3' I2 W2 I3 W3"),
        read("F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' F3 I1 W1 F3' I2' W2' I2 I3' I3 W2 W3' W3"),
    )
    assert _orders("zb-v", 2, 1, 2) == (read("F0 F0' I0' W0' I0 W0"),) * 2


def test_parts_of_the_model_lie_in_a_loop_or_in_a_v():
    loop = build_schedule("interleaved", stages=3, microbatches=3, chunks=2)
    assert [loop.place(part) for part in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    v = build_schedule("zb-v", stages=3, microbatches=3, chunks=2)
    assert [v.place(part) for part in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    for schedule in (loop, v):
        assert [schedule.part(*schedule.place(part)) for part in range(6)] == list(range(6))
        assert [schedule.place(part) for part in range(6)] == places(3, 2, schedule.placement)
        assert schedule.last_part == 5
    assert v.splits_backward
    assert not loop.splits_backward


def test_outputs_go_to_the_next_part_and_gradients_to_the_one_before():
    f, b, w = read("F5 I5 W5")
    v = build_schedule("zb-v", stages=3, microbatches=6, chunks=2)
    assert v.target(1, f) == (2, f)
    assert v.target(2, f) == (2, f._replace(chunk=1))  # the turn of the V: nothing travels
    assert v.target(0, f._replace(chunk=1)) is None
    assert v.source(0, f) is None
    assert v.target(0, b._replace(chunk=1)) == (1, b._replace(chunk=1))
    assert v.source(2, b) == (2, b._replace(chunk=1))
    assert v.target(0, b) is None
    assert v.target(1, w) is None
    assert v.source(1, w) is None
    loop = build_schedule("interleaved", stages=3, microbatches=6, chunks=2)
    assert loop.target(2, f) == (0, f._replace(chunk=1))
    assert loop.source(0, f._replace(chunk=1)) == (2, f)


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_every_stage_runs_every_pass_once(name):
    for stages, microbatches, chunks in itertools.product((1, 2, 5, 8), (1, 2, 3, 7, 16), (1, 2, 3)):
        if chunks not in SCHEDULE_CHUNKS[name] or (name == "interleaved" and microbatches % stages):
            continue
        kinds = ("F", "I", "W") if name.startswith("zb") else ("F", "B")
        words = [
            f"{kind}{i}" + "'" * chunk
            for kind in kinds
            for i in range(microbatches)
            for chunk in range(chunks)
        ]
        for actions in _orders(name, stages, microbatches, chunks):
            assert sorted(actions) == sorted(read(" ".join(words)))


def test_names_are_those_of_the_flag():
    kinds = get_type_hints(ParallelConfig)["pipeline_schedule"]
    assert set(SCHEDULE_CHUNKS) == set(get_args(get_args(kinds)[0]))
    with pytest.raises(ValueError, match="--pipeline-schedule zb-2: there is gpipe, 1f1b"):
        _orders("zb-2", 2, 2)
    with pytest.raises(ValueError, match="at least 1"):
        _orders("1f1b", 2, 0)
    with pytest.raises(ValueError, match="at least 1"):
        _orders("gpipe", 0, 2)


def test_each_schedule_has_its_number_of_chunks():
    with pytest.raises(ValueError, match="--pipeline-schedule 1f1b takes 1 chunk a stage, not 2"):
        _orders("1f1b", 2, 2, 2)
    with pytest.raises(
        ValueError, match=r"interleaved takes 2 chunks or more a stage, not 1: .*--num-virtual"
    ):
        _orders("interleaved", 2, 2, 1)
    with pytest.raises(ValueError, match="zb-v takes 2 chunks a stage, not 3"):
        _orders("zb-v", 2, 2, 3)
    with pytest.raises(ValueError, match=r"group-size.* 2 is for --pipeline-schedule interleaved, not gpipe"):
        _orders("gpipe", 2, 2, 1, 2)


def test_interleaved_says_which_counts_of_microbatches_are_valid():
    message = (
        r"cannot run 3 micro-batches in groups of 2 over --pipeline-model-parallel-size 2: the last group "
        r"would have 1, .*Valid counts of micro-batches near it: 2, 4, 6\. Change --global-batch-size"
        r".*, or give --microbatch-group-size-per-virtual-pipeline-stage 3$"
    )
    with pytest.raises(ValueError, match=message):
        _orders("interleaved", 2, 3, 2)
    with pytest.raises(ValueError, match=r"the last group would have 2, .* 4, 8\. .*--micro-batch-size$"):
        _orders("interleaved", 4, 2, 2)
    with pytest.raises(ValueError, match=r"near it: 4, 5, 6, 10, 11, 12, 16, 17, 18\. .*-stage 5$"):
        _orders("interleaved", 4, 9, 2, 6)
    with pytest.raises(
        ValueError, match=r"-stage 2 is less than --pipeline-model-parallel-size 4: .*least 4"
    ):
        _orders("interleaved", 4, 8, 2, 2)
    for count in (4, 5, 6, 10, 11, 12, 16, 17, 18):
        assert _orders("interleaved", 4, count, 2, 6)
    assert _orders("interleaved", 4, 9, 2, 5)


def test_a_planner_needs_no_torch():
    modules = "lowering, partition, proof, schedules, simulation, timeline"
    code = (
        f"import sys; from megatron.core.pipeline_parallel import {modules}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
