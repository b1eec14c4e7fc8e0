import math

import pytest

from megatron.training.progress import LossWindow, Progress, StepOutcome


def outcome(loss, *, updated=True):
    return StepOutcome({"lm loss": loss}, 0.1, 0.01, 1.0, 8, updated=updated)


def test_counters_go_through_a_checkpoint():
    progress = Progress(iteration=7, consumed_samples=56, schedule_samples=48, skipped_iterations=1)
    assert Progress.from_json(progress.to_json()) == progress


@pytest.mark.parametrize(("loss", "is_nan"), [(1.0, False), (math.nan, True), (math.inf, True)])
def test_a_loss_that_is_no_number(loss, is_nan):
    assert outcome(loss).has_nan is is_nan


def test_the_mean_is_over_successful_iterations():
    window = LossWindow()
    for step in (outcome(1.0), outcome(9.0, updated=False), outcome(2.0), outcome(math.nan, updated=False)):
        window.add(step)
    assert window.means() == {"lm loss": 1.5}
    assert (window.iterations, window.successful, window.skipped, window.nan) == (4, 2, 2, 1)


def test_no_successful_iteration_has_no_mean():
    window = LossWindow()
    window.add(outcome(9.0, updated=False))
    assert window.means() == {}
