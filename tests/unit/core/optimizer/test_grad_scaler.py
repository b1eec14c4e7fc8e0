"""Loss scaling, against a table worked out by hand."""

import json

import pytest

from megatron.core.config import PrecisionConfig
from megatron.core.optimizer.grad_scaler import (
    ConstantScaler,
    DynamicScaler,
    DynamicScalerRule,
    LossScaleError,
    build_grad_scaler,
)

RULE = DynamicScalerRule(min_scale=1.0, growth_interval=3, hysteresis=2, max_consecutive_skips=4)


def test_dynamic_scale_follows_the_table():
    scaler = DynamicScaler(RULE, 16.0)
    # (overflow, scale after, good steps in a row, hysteresis left)
    table = [
        (True, 16.0, 0, 1),  # the first overflow is tolerated
        (True, 8.0, 0, 0),  # the second halves
        (False, 8.0, 1, 0),
        (False, 8.0, 2, 0),
        (True, 4.0, 0, -1),  # good steps short of the window gave nothing back
        (False, 4.0, 1, -1),
        (False, 4.0, 2, -1),
        (False, 8.0, 0, 2),  # a whole window doubles and restores the hysteresis
        (True, 8.0, 0, 1),
        (False, 8.0, 1, 1),
    ]
    for found_inf, scale, growth, hysteresis in table:
        scaler.update(found_inf)
        assert (scaler.scale, scaler.growth_tracker, scaler.hysteresis_tracker) == (scale, growth, hysteresis)


def test_state_goes_through_json_and_continues_equal():
    straight = DynamicScaler(RULE, 2.0**20)
    pattern = [True, True, False, False, False, True, False, True, False, False, False, False]
    for found_inf in pattern[:6]:
        straight.update(found_inf)
    resumed = DynamicScaler(RULE, 2.0**32)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for found_inf in pattern[6:]:
        straight.update(found_inf)
        resumed.update(found_inf)
        assert resumed == straight


def test_too_many_skips_at_the_minimum_end_the_run():
    scaler = DynamicScaler(RULE, 4.0)
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 1.0
    for _ in range(3):
        scaler.update(True)
    scaler.update(False)  # one good step, and the count begins anew
    for _ in range(3):
        scaler.update(True)
    with pytest.raises(LossScaleError, match=r"4 updates in a row .* minimum 1\.0"):
        scaler.update(True)


def test_constant_scale_stays_and_gives_up_too():
    scaler = ConstantScaler(128.0, max_consecutive_skips=2)
    scaler.update(False)
    scaler.update(True)
    assert scaler.scale == 128.0
    resumed = ConstantScaler(64.0, max_consecutive_skips=2)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert resumed.scale == 64.0  # the command line's
    with pytest.raises(LossScaleError, match="2 updates"):
        resumed.update(True)


def test_flags_choose_the_scaler():
    assert build_grad_scaler(PrecisionConfig()) is None
    assert build_grad_scaler(PrecisionConfig(bf16=True)) is None
    dynamic = build_grad_scaler(PrecisionConfig(fp16=True))
    assert isinstance(dynamic, DynamicScaler)
    assert (dynamic.scale, dynamic.rule.min_scale, dynamic.rule.growth_interval) == (2.0**32, 1.0, 1000)
    assert dynamic.hysteresis_tracker == 2
    for precision in (PrecisionConfig(fp16=True, loss_scale=8.0), PrecisionConfig(bf16=True, loss_scale=8.0)):
        constant = build_grad_scaler(precision)
        assert isinstance(constant, ConstantScaler)
        assert constant.scale == 8.0
