import random

import pytest

from megatron.core.pipeline_parallel.blocking import SCHEDULES, gpipe, one_f_one_b
from megatron.core.pipeline_parallel.simulation import simulate

SHAPES = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 17)]


def _makespan_with_unlimited_buffers(schedule, forward_time, backward_time):
    """When the last action ends if an output reaches its stage at once and waits there for nothing."""
    ends = {}
    clock = [0.0] * len(schedule)
    at = [0] * len(schedule)
    while any(position < len(actions) for position, actions in zip(at, schedule, strict=True)):
        for stage, actions in enumerate(schedule):
            if at[stage] == len(actions):
                continue
            action = actions[at[stage]]
            is_forward = action.kind == "forward"
            source = stage - 1 if is_forward else stage + 1
            if 0 <= source < len(schedule):
                if (source, action) not in ends:
                    continue
                clock[stage] = max(clock[stage], ends[source, action])
            clock[stage] += forward_time[stage] if is_forward else backward_time[stage]
            ends[stage, action] = clock[stage]
            at[stage] += 1
    return max(clock)


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_of_equal_stages(name):
    # Narayanan et al. 2021, section 2.2: (p - 1) / m, whatever a backward costs.
    for stages, microbatches in SHAPES:
        for forward_time, backward_time in ((1, 2), (3, 1)):
            result = simulate(SCHEDULES[name](stages, microbatches), forward_time, backward_time)
            assert result.bubble == pytest.approx((stages - 1) / microbatches, abs=1e-12)
            whole = (microbatches + stages - 1) * (forward_time + backward_time)
            assert result.makespan == pytest.approx(whole, abs=1e-12)


def test_peak_activations():
    for stages, microbatches in SHAPES:
        few = [min(stages - stage, microbatches) for stage in range(stages)]
        assert simulate(one_f_one_b(stages, microbatches), 1, 2).peak_activations == few
        assert simulate(gpipe(stages, microbatches), 1, 2).peak_activations == [microbatches] * stages


@pytest.mark.parametrize("name", SCHEDULES)
def test_blocking_transfers_cost_no_time_even_between_unequal_stages(name):
    rng = random.Random(3)
    for _ in range(100):
        stages, microbatches = rng.randint(1, 8), rng.randint(1, 16)
        forward_time = [rng.uniform(0.5, 2) for _ in range(stages)]
        backward_time = [rng.uniform(0.5, 4) for _ in range(stages)]
        schedule = SCHEDULES[name](stages, microbatches)
        ideal = _makespan_with_unlimited_buffers(schedule, forward_time, backward_time)
        assert simulate(schedule, forward_time, backward_time).makespan == pytest.approx(ideal, rel=1e-12)


def test_times_must_fit_the_stages():
    with pytest.raises(ValueError, match="3 times for 2 stages"):
        simulate(gpipe(2, 1), [1, 1, 1], 1)
