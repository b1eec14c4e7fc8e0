"""The fast shuffle against NumPy's own, to the last place and to the state of the generator."""

import numpy as np
import pytest

from megatron.core.datasets import legacy_shuffle

TAIL = legacy_shuffle.TAIL


@pytest.mark.parametrize(
    "size", [0, 1, TAIL, TAIL + 1, TAIL + 2, 2 * TAIL - 1, 2 * TAIL, 2 * TAIL + 1, 10**6]
)
def test_permutation_and_state_are_those_of_numpy(monkeypatch, size):
    monkeypatch.setattr(legacy_shuffle, "COMPILED_FROM", 1)
    for dtype in (np.int32, np.uint32, np.int64):
        one, other = np.random.RandomState(size), np.random.RandomState(size)
        ours, theirs = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
        for _ in range(2):
            legacy_shuffle.shuffle(one, ours)
            other.shuffle(theirs)
        np.testing.assert_array_equal(ours, theirs)
        assert one.randint(2**31) == other.randint(2**31)


@pytest.mark.parametrize("stretch", [1, 100])
def test_permutation_does_not_depend_on_the_stretch(monkeypatch, stretch):
    monkeypatch.setattr(legacy_shuffle, "COMPILED_FROM", 1)
    monkeypatch.setattr(legacy_shuffle, "STRETCH", stretch)
    monkeypatch.setattr(legacy_shuffle, "TAIL", 16)
    ours, theirs = np.arange(700), np.arange(700)
    legacy_shuffle.shuffle(np.random.RandomState(5), ours)
    np.random.RandomState(5).shuffle(theirs)
    np.testing.assert_array_equal(ours, theirs)


def test_part_of_an_array_is_shuffled_in_place(monkeypatch):
    monkeypatch.setattr(legacy_shuffle, "COMPILED_FROM", 1)
    array = np.arange(2 * TAIL + 100, dtype=np.uint32)
    legacy_shuffle.shuffle(np.random.RandomState(0), array[50:-50])
    assert array[:50].tolist() == list(range(50))
    assert array[-50:].tolist() == list(range(2 * TAIL + 50, 2 * TAIL + 100))
    assert sorted(array.tolist()) == list(range(len(array)))
    assert array.tolist() != list(range(len(array)))


@pytest.mark.nightly
def test_an_array_that_is_compiled_for():
    size = legacy_shuffle.COMPILED_FROM + 12345
    ours, theirs = np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32)
    legacy_shuffle.shuffle(np.random.RandomState(9), ours)
    np.random.RandomState(9).shuffle(theirs)
    np.testing.assert_array_equal(ours, theirs)
