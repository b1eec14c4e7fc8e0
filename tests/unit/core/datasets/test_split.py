"""Splits: boundaries computed by hand, wrong ones refused."""

import pytest

from megatron.core.datasets.split import parse_split, split_ranges


def ranges(split, count):
    return split_ranges(count, parse_split(split))


@pytest.mark.parametrize(
    "split",
    ["969,30,1", "969, 30, 1", "969/30/1", "969 30 1", "0.969,0.03,0.001", "'969,30,1'", "[969; 30 | 1.]",
     "969-30-1", "9.69e2,3e1,1"],
)  # fmt: skip
def test_default_split_of_a_thousand(split):
    assert ranges(split, 1000) == (range(969), range(969, 999), range(999, 1000))


def test_zero_share_and_missing_shares_are_no_split():
    assert ranges("100,0,0", 7) == (range(7), None, None)
    assert ranges("98,2", 100) == (range(98), range(98, 100), None)
    assert ranges("1", 5) == (range(5), None, None)
    assert ranges("0,0,1", 5) == (None, None, range(5))


def test_boundaries_round_half_to_even():
    # shares 1/4, 1/2, 1/4 of 10: boundaries at 2.5 and 7.5
    assert ranges("1,2,1", 10) == (range(2), range(2, 8), range(8, 10))


def test_small_data_leaves_a_range_empty():
    # boundaries at 19.38 and 19.98 of 20
    assert ranges("969,30,1", 20) == (range(19), range(19, 20), range(20, 20))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 1000, 12345])
@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "90,5,5", "1,2,4", "0.1,0.2,0.7"])
def test_disjoint_and_complete(split, count):
    assert [element for part in ranges(split, count) for element in part] == list(range(count))


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,1,1,1", "-1,2,3", "0,0,0", "nan,1", "inf,1,1", "90%,10", "9,-1,1", "''", "1.2.3"]
)
def test_what_is_no_split(split):
    with pytest.raises(ValueError, match="--split"):
        parse_split(split)
