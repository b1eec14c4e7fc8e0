"""Blends: golden vectors, one draw after the other as reference, shares kept."""

import numpy as np
import pytest

from megatron.core.datasets import blend
from megatron.core.datasets.blend import Blend, blend_indices, exhaustive_indices, normalize, parse_blend


def numbers(text):
    return [int(word) for word in text.split()]


def draw_one_by_one(weights, size):
    drawn, order, samples = [0] * len(weights), [], []
    for place in range(size):
        lags = [
            weight * float(max(place, 1)) - float(count) for weight, count in zip(weights, drawn, strict=True)
        ]
        pick = lags.index(max(lags))
        order.append(pick)
        samples.append(drawn[pick])
        drawn[pick] += 1
    return order, samples


def test_golden_weights():
    arrays = blend_indices((0.2, 0.3, 0.5), 20)
    assert arrays["dataset_index"].tolist() == numbers("2 1 0 2 1 2 0 2 1 2 0 2 1 2 1 2 0 2 1 2")
    assert arrays["dataset_sample_index"].tolist() == numbers("0 0 0 1 1 2 1 3 2 4 2 5 3 6 4 7 3 8 5 9")
    assert arrays["dataset_index"].dtype == np.int16
    assert arrays["dataset_sample_index"].dtype == np.int64
    assert blend_indices((0.5, 0.5), 6)["dataset_index"].tolist() == numbers("0 1 0 1 0 1")


def draw_until_spent(weights, sizes):
    drawn, order = [0] * len(sizes), []
    for place in range(sum(sizes)):
        lags = {
            number: weights[number] * float(max(place, 1)) - float(drawn[number])
            for number in range(len(sizes))
            if drawn[number] < sizes[number]
        }
        order.append(max(lags, key=lambda number: lags[number]))  # the first of equals
        drawn[order[-1]] += 1
    return order


def test_golden_every_sample_of_every_dataset_once():
    arrays = exhaustive_indices([2, 3, 5])
    assert arrays["dataset_index"].tolist() == numbers("2 1 0 2 1 2 0 2 1 2")
    assert arrays["dataset_sample_index"].tolist() == numbers("0 0 0 1 1 2 1 3 2 4")
    assert [array.dtype for array in arrays.values()] == [np.int16, np.int64]


@pytest.mark.parametrize("case", range(6))
def test_every_sample_once_equals_one_draw_after_the_other(monkeypatch, case):
    monkeypatch.setattr(blend, "LANES", 16)
    monkeypatch.setattr(blend, "LANE_STEPS", 32)
    generator = np.random.default_rng(case)
    sizes = generator.integers(0, 200, generator.integers(2, 12)).tolist() + [1] * case
    arrays = exhaustive_indices(sizes)
    assert arrays["dataset_index"].tolist() == draw_until_spent([size / sum(sizes) for size in sizes], sizes)
    for number, size in enumerate(sizes):
        found = arrays["dataset_sample_index"][arrays["dataset_index"] == number]
        assert found.tolist() == list(range(size))


def test_a_dataset_that_is_used_up_leaves_its_places_to_the_others():
    # Weights that are not those of the sizes stand for what rounding does to blends of billions of samples.
    weights, sizes = [0.7, 0.1, 0.2], [3, 9, 5]
    order = blend._spend(np.array(weights), np.array(sizes))
    assert order.tolist() == draw_until_spent(weights, sizes)


@pytest.mark.parametrize("case", range(8))
def test_stretches_side_by_side_equal_one_draw_after_the_other(monkeypatch, case):
    monkeypatch.setattr(blend, "LANES", 16)
    monkeypatch.setattr(blend, "LANE_STEPS", 32)
    monkeypatch.setattr(blend, "CHUNK", 100)
    generator = np.random.default_rng(case)
    count = int(generator.integers(2, 12))
    raw = generator.integers(1, 10, count) if case % 2 else generator.dirichlet(np.ones(count))
    weights = normalize(raw.tolist())
    arrays = blend_indices(weights, 2000)
    order, samples = draw_one_by_one(weights, 2000)
    assert arrays["dataset_index"].tolist() == order
    assert arrays["dataset_sample_index"].tolist() == samples


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
@pytest.mark.parametrize("weights", [[0.001, 0.999], [1e-4] * 20 + [1.0], [1.0] * 5])
def test_draws_are_the_share_to_one_sample(weights, size):
    shares = normalize(weights)
    drawn = np.bincount(blend_indices(shares, size)["dataset_index"], minlength=len(shares))
    exact = size * np.array(shares)
    assert (drawn <= np.ceil(exact)).all()  # never more than the dataset was built for
    assert (drawn >= np.floor(exact) - 1).all()


def test_lists_with_and_without_weights():
    assert parse_blend(("a",), "--data-path") == Blend(("a",), None)
    assert parse_blend(("a", "b"), "--data-path") == Blend(("a", "b"), None)
    assert parse_blend(("1", "a", "3", "b"), "--data-path") == Blend(("a", "b"), (0.25, 0.75))
    assert parse_blend(("7", "a"), "--data-path") == Blend(("a",), None)
    assert parse_blend(("1", "a", "2"), "--data-path") == Blend(("1", "a", "2"), None)
    assert parse_blend(("1", "a", "b", "c"), "--data-path") == Blend(("1", "a", "b", "c"), None)


def test_dataset_of_weight_zero_is_left_out():
    assert parse_blend(("0", "a", "1", "b", "1", "c"), "--data-path") == Blend(("b", "c"), (0.5, 0.5))


@pytest.mark.parametrize("weights", [("-1", "2"), ("0", "0"), ("nan", "1"), ("inf", "1")])
def test_weights_that_are_no_shares(weights):
    with pytest.raises(ValueError, match=r"--valid-data-path: the weights .* must be 0 or above"):
        parse_blend((weights[0], "a", weights[1], "b"), "--valid-data-path")


def test_too_many_datasets():
    with pytest.raises(ValueError, match="--data-path: 32767 datasets; a blend holds fewer than 32767"):
        parse_blend(("a",) * 32767, "--data-path")
