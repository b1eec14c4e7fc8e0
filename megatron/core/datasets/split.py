"""Divide a dataset into training, validation and test: consecutive ranges, whatever the seed."""

import math
import re
from typing import Final

SPLIT_NAMES: Final = ("train", "valid", "test")
DEFAULT_SPLIT: Final = "969, 30, 1"
DEFAULT_MOCK_SPLIT: Final = "1, 1, 1"

# A minus sign right after a digit stands between two numbers.
_NUMBER: Final = re.compile(r"(?<![\d.])-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of training, validation and test, which add up to 1.

    Args:
        split: one to three numbers of any scale, with any punctuation between and around them, such as the
            quotes of a launch script; further shares are 0.

    Raises:
        ValueError: if it is anything else.
    """
    between = _NUMBER.sub("", split)
    if any(character.isalnum() or character in ".%" for character in between):
        raise ValueError(f"--split {split!r}: give one to three numbers, say 969,30,1")
    shares = [float(number) for number in _NUMBER.findall(split)]
    total = sum(shares)
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or min(shares) < 0 or not 0 < total < math.inf:
        raise ValueError(
            f"--split {split!r}: give one to three numbers, none of them negative, not all of them zero"
        )
    train, valid, test = [share / total for share in shares] + [0.0] * (len(SPLIT_NAMES) - len(shares))
    return train, valid, test


def split_ranges(num_elements: int, shares: tuple[float, float, float]) -> tuple[range | None, ...]:
    """The elements of each split: consecutive, disjoint, together all of them.

    A boundary is the share before it times the number of elements, rounded half to even, as in other systems
    of this family.

    Args:
        num_elements: sequences of a GPT dataset.
        shares: as :func:`parse_split` gives them.

    Returns:
        A range for each split. None where the share is zero; a range may be empty where it is not.
    """
    ranges: list[range | None] = []
    before = 0.0
    for share in shares:
        after = before + share
        bounds = round(before * num_elements), round(after * num_elements)
        ranges.append(range(*bounds) if share > 0 else None)
        before = after
    return tuple(ranges)
