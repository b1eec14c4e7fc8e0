"""Words and characters of texts, and hashes of n of them in a row: loops over code points, compiled by numba.

A word is a run of letters, digits and marks (Unicode categories L, N and M), in lower case; all else stands
between words. In units of characters a text is its words with one space between.
"""

import functools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Unit = Literal["words", "characters"]
Function = TypeVar("Function", bound=Callable[..., Any])

_LAST_ASSIGNED: Final = 0x40000
"""Beyond this plane there are no letters, only tags and private use."""
_SEED = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def compiled(function: Function) -> Function:
    """Decorator: let numba compile a function of numbers and arrays when it is first called."""
    return cast(Function, njit(nogil=True)(function))


@dataclass(frozen=True)
class Ngrams:
    """Hashes of every n units in a row, of several texts."""

    hashes: npt.NDArray[np.uint64]
    """[t] one for each place, text after text."""
    offsets: npt.NDArray[np.int64]
    """[n + 1] where each text's begin."""
    starts: npt.NDArray[np.int64]
    """[t] where the n units begin, in characters of their text."""
    ends: npt.NDArray[np.int64]
    """[t] where they end."""


def ngrams(texts: Sequence[str], size: int, unit: Unit, *, short: bool) -> Ngrams:
    """Hash every ``size`` units in a row of each text.

    The hashes have 64 bits and are the same on every machine.

    Args:
        texts: any texts.
        size: units in a row.
        unit: what is counted.
        short: a text with fewer units, though not none, gives one hash of them all; else it gives none.
    """
    encoded = [text.encode("utf-32-le", "surrogatepass") for text in texts]
    codes = np.frombuffer(b"".join(encoded), dtype=np.uint32)
    lengths = np.fromiter((len(part) // 4 for part in encoded), np.int64, len(encoded))
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    room = len(codes) + len(texts)
    hashes, starts, ends = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    offsets = np.zeros(len(texts) + 1, np.int64)
    options = (size, unit == "words", short)
    total = _hash_all(codes, bounds, folded_codes(), options, (hashes, starts, ends), offsets)
    return Ngrams(hashes[:total], offsets, starts[:total], ends[:total])


def fold(text: str) -> str:
    """The words of a text, in lower case, with one space between: equal texts are equal n-grams."""
    folded = folded_codes()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    spelled = np.where(folded[codes] == 0, np.uint32(32), folded[codes])
    return " ".join(spelled.tobytes().decode("utf-32-le", "surrogatepass").split())


@functools.cache
def folded_codes() -> npt.NDArray[np.uint32]:
    """[0x110000] for each code point the one in lower case; 0 where it belongs to no word."""
    folded = np.zeros(0x110000, np.uint32)
    for code in range(_LAST_ASSIGNED):
        character = chr(code)
        if unicodedata.category(character)[0] in "LNM":
            lower = character.lower()
            folded[code] = ord(lower) if len(lower) == 1 else code
    return folded


@compiled
def mixed(state: np.uint64, value: np.uint64) -> np.uint64:
    """A 64-bit hash that has taken in one value more."""
    state = (state ^ value) * _MULTIPLIER
    return state ^ (state >> _HALF)


@compiled
def _units(
    codes: npt.NDArray[np.uint32],
    folded: npt.NDArray[np.uint32],
    words: bool,
    units: npt.NDArray[np.uint64],
    places: npt.NDArray[np.int64],
) -> int:
    """Hash each unit of one text.

    Args:
        codes: [c] the text.
        folded: as :func:`folded_codes` gives it.
        words: whether units are words.
        units: [c] or more, filled with hashes.
        places: [2, c] or more, filled with beginnings and ends.

    Returns:
        Number of units.
    """
    count, inside, state = 0, False, _SEED
    for place in range(len(codes)):
        code = folded[codes[place]]
        if code == 0:
            if inside and words:
                units[count] = state
                places[1, count] = place
                count += 1
            inside = False
            continue
        if words:
            if not inside:
                state = _SEED
                places[0, count] = place
            state = mixed(state, np.uint64(code))
        else:
            if not inside and count > 0:
                units[count] = np.uint64(32)
                places[0, count] = place - 1
                places[1, count] = place
                count += 1
            units[count] = np.uint64(code)
            places[0, count] = place
            places[1, count] = place + 1
            count += 1
        inside = True
    if inside and words:
        units[count] = state
        places[1, count] = len(codes)
        count += 1
    return count


@compiled
def _hash_all(
    codes: npt.NDArray[np.uint32],
    bounds: npt.NDArray[np.int64],
    folded: npt.NDArray[np.uint32],
    options: tuple[int, bool, bool],
    out: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    offsets: npt.NDArray[np.int64],
) -> int:
    """Hash the n-grams of all texts; ``out`` and ``offsets`` are filled. Returns how many there are."""
    size, words, short = options
    hashes, starts, ends = out
    longest = 1
    for text in range(len(bounds) - 1):
        longest = max(longest, bounds[text + 1] - bounds[text] + 1)
    units = np.empty(longest, np.uint64)
    places = np.empty((2, longest), np.int64)
    total = 0
    for text in range(len(bounds) - 1):
        count = _units(codes[bounds[text] : bounds[text + 1]], folded, words, units, places)
        windows = max(count - size + 1, 0)
        if short and count > 0:
            windows = max(windows, 1)
        for first in range(windows):
            last = min(first + size, count)
            state = _SEED
            for unit in range(first, last):
                state = mixed(state, units[unit])
            hashes[total] = state
            starts[total] = places[0, first]
            ends[total] = places[1, last - 1]
            total += 1
        offsets[text + 1] = total
    return total
