import random

import pytest

from megatron.core.pipeline_parallel.schedules import SCHEDULE_CHUNKS, build_schedule
from megatron.core.pipeline_parallel.simulation import simulate
from megatron.core.pipeline_parallel.timeline import TimelineEvent
from tests.unit.core.pipeline_parallel.orders import needs, places, random_schedule, schedule

SHAPES = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 33)]
UNIT = {"forward_time": 1, "backward_input_time": 1, "backward_weight_time": 1}


def _times(forward, backward_input, backward_weight):
    return {
        "forward_time": forward,
        "backward_input_time": backward_input,
        "backward_weight_time": backward_weight,
    }


def _simulate(name, stages, microbatches, chunks=1, group_size=None, **times):
    order = build_schedule(
        name, stages=stages, microbatches=microbatches, chunks=chunks, group_size=group_size
    )
    return simulate(order, **(times or UNIT))


def _makespan(order, times, transfer_time):
    """When the last action ends, worked out until nothing changes; ``times`` are by kind and part."""
    where = places(len(order.stages), order.chunks, order.placement)
    part = {place: number for number, place in enumerate(where)}
    ends = {}
    changed = True
    while changed:
        changed = False
        for stage, actions in enumerate(order.stages):
            clock = 0.0
            for kind, chunk, microbatch in actions:
                own = part[stage, chunk]
                for need in needs(len(where), own, kind, microbatch):
                    away = where[need[0]][0] != stage
                    clock = max(clock, ends.get(need, 0.0) + away * transfer_time)
                clock += times[kind][own]
                if ends.get((own, kind, microbatch)) != clock:
                    ends[own, kind, microbatch] = clock
                    changed = True
    return max(ends.values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_one_f_one_b(name):
    # Narayanan et al. 2021, section 2.2: (p - 1) / m, whatever a backward costs.
    for stages, microbatches in SHAPES:
        for forward, backward_input, backward_weight in ((1, 1, 1), (3, 0.5, 0.5)):
            times = _times(forward, backward_input, backward_weight)
            result = _simulate(name, stages, microbatches, **times)
            assert result.bubble == pytest.approx((stages - 1) / microbatches, abs=1e-12)
            whole = (microbatches + stages - 1) * (forward + backward_input + backward_weight)
            assert result.makespan == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved(chunks):
    # Narayanan et al. 2021, section 2.2: (p - 1) / (v m).
    for stages, microbatches in SHAPES:
        if microbatches % stages == 0:
            bubble = (stages - 1) / (chunks * microbatches)
            assert _simulate("interleaved", stages, microbatches, chunks).bubble == pytest.approx(
                bubble, abs=1e-12
            )
    odd_times = _times(1, 1, 2)
    assert _simulate("interleaved", 4, 12, chunks, **odd_times).bubble == pytest.approx(1 / (4 * chunks))


def test_a_smaller_last_group_costs_no_more():
    for stages, group, microbatches in ((4, 5, 9), (4, 6, 11), (2, 3, 5), (3, 8, 11), (3, 5, 28)):
        result = _simulate("interleaved", stages, microbatches, 2, group)
        assert result.bubble == pytest.approx((stages - 1) / (2 * microbatches), abs=1e-12)


def test_zb_h1_has_a_third_of_the_bubble_of_one_f_one_b_at_its_memory():
    # Qi et al. 2023, section 2.3: (p - 1) (F + B - W) against (p - 1) (F + B + W).
    for stages, microbatches in SHAPES:
        result, reference = (_simulate(name, stages, microbatches) for name in ("zb-h1", "1f1b"))
        assert max(result.peak_activations) <= max(reference.peak_activations)
        assert result.peak_activations == (min(stages, microbatches),) * stages
        if microbatches >= stages:
            assert result.bubble <= reference.bubble / 3 + 1e-12
            assert result.makespan == pytest.approx(3 * microbatches + stages - 1, abs=1e-12)
        else:
            assert result.makespan <= reference.makespan


def test_zb_v_is_never_idle_at_the_memory_of_one_f_one_b():
    # Nothing can start on the last stage before the first forward has come down: p - 1 of 6 m are lost.
    for stages, microbatches in SHAPES:
        result = _simulate("zb-v", stages, microbatches, 2)
        assert max(result.peak_activations) <= 2 * stages
        assert max(result.peak_share) <= 1  # as 1F1B's first stage, see below
        if microbatches >= 2 * stages - 1:
            assert result.idle == (0,) * stages
            assert result.bubble == pytest.approx((stages - 1) / (6 * microbatches), abs=1e-12)


def test_peak_activations():
    for stages, microbatches in SHAPES:
        few = tuple(min(stages - stage, microbatches) for stage in range(stages))
        assert _simulate("1f1b", stages, microbatches).peak_activations == few
        assert _simulate("gpipe", stages, microbatches).peak_activations == (microbatches,) * stages
        if microbatches % stages == 0:
            # Warm-up of 2 (p - 1 - stage) + (v - 1) p, and the first of the steady state.
            warmups = [2 * (stages - 1 - stage) + 2 * stages for stage in range(stages)]
            peaks = tuple(min(warmup + 1, 3 * microbatches) for warmup in warmups)
            assert _simulate("interleaved", stages, microbatches, 3).peak_activations == peaks


def test_peak_share_of_the_first_stage():
    # Korthikanti et al. 2022, section 4.2.3: all layers' worth under 1F1B, 1 + (p - 1) / (p v) interleaved.
    assert _simulate("1f1b", 8, 16).peak_share[0] == 1
    assert _simulate("interleaved", 8, 16, 4).peak_share[0] == pytest.approx(1 + 7 / 32)
    assert _simulate("gpipe", 4, 16).peak_share == (4, 4, 4, 4)


def test_uneven_parts_and_slow_transfers_against_plain_relaxation():
    rng = random.Random(3)
    for _ in range(60):
        placement = rng.choice(["loop", "v"])
        stages, chunks = rng.randint(1, 4), 2 if placement == "v" else rng.randint(1, 2)
        split = rng.random() < 0.5
        order = random_schedule(
            rng,
            stages=stages,
            chunks=chunks,
            placement=placement,
            microbatches=rng.randint(1, 4),
            split=split,
        )
        forward, inputs, weights = ([rng.uniform(0.5, 2) for _ in range(stages * chunks)] for _ in range(3))
        times = {
            "forward": forward,
            "backward": [one + other for one, other in zip(inputs, weights, strict=True)],
            "backward_input": inputs,
            "backward_weight": weights,
        }
        result = simulate(order, **_times(forward, inputs, weights), transfer_time=0.3)
        assert result.makespan == pytest.approx(_makespan(order, times, 0.3), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_named_schedules_against_plain_relaxation(name):
    times = {
        "forward": [1.0] * 6,
        "backward": [2.5] * 6,
        "backward_input": [1.5] * 6,
        "backward_weight": [1.0] * 6,
    }
    order = build_schedule(name, stages=3, microbatches=6, chunks=SCHEDULE_CHUNKS[name].start)
    result = simulate(order, **_times(1, 1.5, 1), transfer_time=0.25)
    assert result.makespan == pytest.approx(_makespan(order, times, 0.25), rel=1e-12)


def test_events_by_hand():
    # Two stages, one micro-batch: F, a transfer of 1, F; B of 2 + 3, a transfer, B.
    result = simulate(schedule("F0 B0", "F0 B0"), **_times(4, 2, 3), transfer_time=1)
    assert result.events == (
        TimelineEvent(0, "forward", 0, 0, 0, 4),
        TimelineEvent(0, "send", 0, 0, 4, 5),
        TimelineEvent(1, "receive", 0, 0, 4, 5),
        TimelineEvent(1, "forward", 0, 0, 5, 9),
        TimelineEvent(1, "backward", 0, 0, 9, 14),
        TimelineEvent(0, "receive", 0, 0, 14, 15),
        TimelineEvent(1, "send", 0, 0, 14, 15),
        TimelineEvent(0, "backward", 0, 0, 15, 20),
    )
    assert result.makespan == 20
    assert result.bubble == pytest.approx(11 / 9)
    assert result.idle == (11, 0)


def test_times_are_of_a_stage_or_of_a_part():
    order = build_schedule("interleaved", stages=2, microbatches=2, chunks=2)
    by_stage = simulate(order, **_times([1, 2], 1, 1))
    by_part = simulate(order, **_times([1, 2, 1, 2], [1, 1], 1))
    assert by_stage == by_part
    with pytest.raises(ValueError, match=r"3 times .* give 2, for each stage, or 4, for each part"):
        simulate(order, **_times([1, 1, 1], 1, 1))
    with pytest.raises(ValueError, match=r"3 times .* give 2$"):
        simulate(build_schedule("gpipe", stages=2, microbatches=1), **_times(1, [1, 1, 1], 1))
    with pytest.raises(ValueError, match="none may be negative"):
        simulate(order, **_times(-1, 1, 1))


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="can never run"):
        simulate(schedule("F0 B0 F1 B1", "F0 F1 B0 B1"), **UNIT)
