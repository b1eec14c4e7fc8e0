"""The size of each global batch of a run."""

import pytest

from megatron.training.batch_size import BatchSizes, constant, in_steps, ramped_up


def sizes_one_by_one(schedule, iterations, consumed=0):
    """(size of each iteration, samples consumed at the end), by asking at every iteration."""
    sizes = []
    for _ in range(iterations):
        sizes.append(schedule.at(consumed))
        consumed += sizes[-1]
    return sizes, consumed


def by_megatron_lm(start, increment, samples, full, consumed):
    """The rule of Megatron-LM's releases up to 0.15, in floating point as there."""
    if consumed > samples:
        return full
    each = samples / ((full - start) // increment)
    return min(start + increment * int(consumed / each), full)


def test_a_ramp_is_that_of_megatron_lm():
    schedule = ramped_up((4, 4, 32), 12)
    # Size 4 up to 16 samples, 8 up to 32, then 12.
    assert sizes_one_by_one(schedule, 8) == ([4, 4, 4, 4, 8, 8, 12, 12], 56)
    for ramp, full in [((16, 8, 3000), 64), ((32, 32, 977), 512), ((1, 1, 100), 8)]:
        schedule = ramped_up(ramp, full)
        for consumed in range(0, 4000, 7):
            assert schedule.at(consumed) == by_megatron_lm(*ramp, full, consumed)


def test_no_ramp_at_all_and_a_ramp_of_no_samples():
    assert constant(8).sizes == (8,)
    assert ramped_up((8, 4, 100), 8) == constant(8)
    assert ramped_up((4, 4, 0), 12) == constant(12)


def test_steps_are_counted_in_tokens():
    schedule = in_steps("0:768 2.5K:1536 1M:3072", seq_length=10)
    assert schedule.steps == ((0, 768), (250, 1536), (100_000, 3072))
    # A batch that begins before a threshold is not cut short by it.
    assert sizes_one_by_one(schedule, 2) == ([768, 1536], 2304)


@pytest.mark.parametrize("schedule", [ramped_up((4, 4, 33), 24), in_steps("0:8 50:3 70:9", 1), constant(5)])
def test_many_iterations_at_once_are_as_many_one_by_one(schedule):
    for consumed in (0, 3, 17, 40, 200):
        for iterations in range(40):
            _, end = sizes_one_by_one(schedule, iterations, consumed)
            assert schedule.advance(consumed, iterations) == end
            assert schedule.iterations_within(consumed, end) == iterations
            assert schedule.iterations_within(consumed, end + schedule.at(end) - 1) == iterations
    assert schedule.iterations_within(10, 10) == schedule.iterations_within(10, 4) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ramped_up((4, 4), 12), r"--rampup-batch-size 4 4: give three numbers"),
        (lambda: ramped_up((4, 3, 10), 12), r"increments of 3 do not lead from 4 to --global-batch-size 12"),
        (lambda: ramped_up((16, 4, 10), 12), r"do not lead from 16 to --global-batch-size 12"),
        (lambda: ramped_up((4, 0, 10), 12), r"the increment must be at least 1"),
        (lambda: in_steps("768", 8), r"give TOKENS:SIZE pairs"),
        (lambda: in_steps("", 8), r"give TOKENS:SIZE pairs"),
        (lambda: in_steps("5K:8", 8), r"must begin with 0"),
        (lambda: in_steps("0:8 16:9 17:10", 8), r"rise by more than a sample"),
        (lambda: in_steps("0:0", 8), r"a batch size must be at least 1"),
    ],
)
def test_what_makes_no_series_of_sizes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_first_size_holds_from_the_start():
    assert BatchSizes(((0, 4), (16, 8))).at(0) == 4
