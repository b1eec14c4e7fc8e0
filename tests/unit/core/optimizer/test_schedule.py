"""Schedules against golden values, and on resume."""

import json
from dataclasses import replace

import pytest

from megatron.core.config import ScheduleConfig
from megatron.core.optimizer.schedule import (
    ParameterSchedule,
    ScheduleLengths,
    build_schedule,
    resume_schedule,
)

LENGTHS = ScheduleLengths(warmup=10, decay=100, wsd=20, weight_decay=100)
N = (0, 1, 5, 10, 11, 30, 55, 80, 90, 95, 100, 101)
GOLDEN = {
    "linear": (0, 0.1, 0.5, 1, 0.99, 0.8, 0.55, 0.3, 0.2, 0.15, 0.1, 0.1),
    "cosine": (0, 0.1, 0.5, 1, 0.999726, 0.89472, 0.55, 0.20528, 0.127138, 0.106837, 0.1, 0.1),
    "inverse-square-root": (
        *(0, 0.1, 0.5, 1, 0.953463, 0.57735),
        *(0.426401, 0.353553, 0.333333, 0.324443, 0.316228, 0.1),
    ),
    "constant": (0, 0.1, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1),
}
GOLDEN_WSD = {
    "exponential": (0.472792, 0.270286),
    "linear": (0.55, 0.325),
    "cosine": (0.55, 0.231802),
    "minus_sqrt": (0.363604, 0.220577),
}


def config(**changes: object) -> ScheduleConfig:
    return replace(ScheduleConfig(lr=1.0, min_lr=0.1), **changes)


@pytest.mark.parametrize("style", GOLDEN)
def test_learning_rate_golden(style: str):
    schedule = build_schedule(config(lr_decay_style=style), LENGTHS)
    assert [schedule.learning_rate(n) for n in N] == pytest.approx(GOLDEN[style], abs=6e-7)


@pytest.mark.parametrize("style", GOLDEN_WSD)
def test_wsd_golden(style: str):
    schedule = build_schedule(config(lr_decay_style="WSD", lr_wsd_decay_style=style), LENGTHS)
    assert [schedule.learning_rate(n) for n in (10, 11, 55, 80)] == [1, 1, 1, 1]
    assert [schedule.learning_rate(n) for n in (90, 95)] == pytest.approx(GOLDEN_WSD[style], abs=6e-7)
    assert schedule.learning_rate(100) == pytest.approx(0.1)
    assert schedule.learning_rate(101) == 0.1


def test_warmup_starts_from_its_initial_rate_and_may_fill_the_whole_length():
    lengths = replace(LENGTHS, warmup=100)
    schedule = build_schedule(config(lr_warmup_init=0.2, lr_decay_style="cosine"), lengths)
    assert [schedule.learning_rate(n) for n in (0, 50, 100, 101)] == pytest.approx([0.2, 0.6, 1.0, 0.1])
    no_warmup = build_schedule(config(), replace(LENGTHS, warmup=0))
    assert no_warmup.learning_rate(0) == 1.0


@pytest.mark.parametrize(
    ("style", "values"),
    [("linear", (0.1, 0.2, 0.3, 0.5, 0.5)), ("cosine", (0.1, 0.158579, 0.3, 0.5, 0.5))],
)
def test_weight_decay_goes_from_start_to_end(style: str, values: tuple[float, ...]):
    ramp = config(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.5)
    schedule = build_schedule(ramp, LENGTHS)
    # cosine: 0.1 + 0.4 (cos(pi (1 - r)) + 1) / 2 is 0.158579 at r = 1/4
    assert [schedule.weight_decay(n) for n in (0, 25, 50, 100, 150)] == pytest.approx(values, abs=6e-7)


def test_constant_weight_decay():
    schedule = build_schedule(config(weight_decay=0.07), LENGTHS)
    assert {schedule.weight_decay(n) for n in (0, 50, 200)} == {0.07}


@pytest.mark.parametrize(
    ("changes", "lengths", "message"),
    [
        ({}, replace(LENGTHS, decay=0), "--lr-decay-iters"),
        ({}, replace(LENGTHS, warmup=101), "--lr-warmup-iters"),
        ({"lr_decay_style": "WSD"}, replace(LENGTHS, wsd=None), "--lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD"}, replace(LENGTHS, wsd=101), "annealing of 101"),
        ({"start_weight_decay": 0.1}, LENGTHS, "--weight-decay-incr-style linear"),
        ({"weight_decay_incr_style": "linear"}, LENGTHS, "needs both"),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            LENGTHS,
            r"--start-weight-decay 0\.2",
        ),
    ],
)
def test_refusals_name_the_flag(changes: dict[str, object], lengths: ScheduleLengths, message: str):
    with pytest.raises(ValueError, match=message):
        build_schedule(config(**changes), lengths)


def resumed(config_now: ScheduleConfig, saved: ParameterSchedule) -> ParameterSchedule:
    through_json = json.loads(json.dumps(saved.state_dict()))
    return resume_schedule(build_schedule(config_now, LENGTHS), through_json, config_now)


def test_resume_with_another_rate_is_refused_unless_a_flag_chooses():
    old = build_schedule(ScheduleConfig(lr=3e-4, lr_decay_style="cosine"), LENGTHS)
    new = ScheduleConfig(lr=3e-5, lr_decay_style="cosine")
    with pytest.raises(
        ValueError, match=r"max_lr 0\.0003 in the checkpoint, 3e-05 now\n.*--override-opt_param"
    ) as caught:
        resumed(new, old)
    assert "min_lr" not in str(caught.value)
    overridden = resumed(replace(new, override_opt_param_scheduler=True), old)
    assert overridden.max_lr == 3e-5
    kept = resumed(replace(new, use_checkpoint_opt_param_scheduler=True), old)
    assert kept.max_lr == 3e-4


def test_resumed_schedule_gives_the_straight_run_s_columns():
    """Cosine with warm-up and a weight-decay ramp, resumed at iteration 7 of 20, 5 samples an iteration."""
    ramp = config(
        lr_decay_style="cosine",
        weight_decay_incr_style="linear",
        start_weight_decay=0.01,
        end_weight_decay=0.1,
    )
    straight = build_schedule(ramp, LENGTHS)
    again = resumed(ramp, straight)
    for iteration in range(7, 20):
        n = iteration * 5
        assert again.learning_rate(n) == straight.learning_rate(n)
        assert again.weight_decay(n) == straight.weight_decay(n)


def test_what_a_law_does_not_use_makes_no_difference_on_resume():
    constant = config(lr_decay_style="constant")
    saved = build_schedule(constant, LENGTHS).state_dict()
    longer = build_schedule(constant, replace(LENGTHS, decay=1000, wsd=None, weight_decay=1000))
    assert resume_schedule(longer, saved, constant) == longer


def test_a_schedule_that_lacks_a_value_is_refused():
    saved = build_schedule(config(), LENGTHS).state_dict()
    del saved["max_lr"]
    with pytest.raises(ValueError, match="lacks max_lr"):
        resume_schedule(build_schedule(config(), LENGTHS), saved, config())
