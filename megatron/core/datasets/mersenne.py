"""The Mersenne twister in 32 and 64 bits, compiled by numba, for loops that need one draw after another.

The streams are those of the C++ standard's ``mt19937`` and ``mt19937_64`` (Matsumoto and Nishimura 1998;
Nishimura 2000), which other systems of the Megatron family draw on. NumPy has only the first, and gives it in
blocks; a shuffle that must follow the second can't be vectorised at all.

Importing numba takes a second, and the first call of a function compiles it. So this module is imported only
where an index is built. Nothing compiled is kept on disk: that would need a folder to write to.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Decorator: let numba compile a function of numbers and arrays when it is first called."""
    return cast(Function, njit(nogil=True)(function))


# Numba makes a float of an unsigned 64-bit number and a signed one: every constant must be unsigned too.
_U32: Final = np.uint32
_U64: Final = np.uint64

WORDS_32: Final = 624
_MIDDLE_32: Final = 397
_UPPER_32: Final = _U32(0x80000000)
_LOWER_32: Final = _U32(0x7FFFFFFF)
_MATRIX_32: Final = _U32(0x9908B0DF)

WORDS_64: Final = 312
_MIDDLE_64: Final = 156
_UPPER_64: Final = _U64(0xFFFFFFFF80000000)
_LOWER_64: Final = _U64(0x7FFFFFFF)
_MATRIX_64: Final = _U64(0xB5026F5AA96619E9)

_ONE_32: Final = _U32(1)
_ONE_64: Final = _U64(1)


def seed_32(seed: int) -> npt.NDArray[np.uint32]:
    """The state that a seed makes: [624]; only the lower 32 bits of the seed count."""
    return np.array(_seeded(seed, WORDS_32, 32, 1812433253), np.uint32)


def seed_64(seed: int) -> npt.NDArray[np.uint64]:
    """The state that a seed makes: [312]; only the lower 64 bits of the seed count."""
    return np.array(_seeded(seed, WORDS_64, 64, 6364136223846793005), np.uint64)


def _seeded(seed: int, words: int, bits: int, multiplier: int) -> list[int]:
    mask = (1 << bits) - 1
    state = [seed & mask]
    for i in range(1, words):
        last = state[-1]
        state.append((multiplier * (last ^ (last >> (bits - 2))) + i) & mask)
    return state


@compiled
def _twisted_32(word: np.uint32, after: np.uint32, middle: np.uint32) -> np.uint32:
    mixed = (word & _UPPER_32) | (after & _LOWER_32)
    return _U32(middle ^ (mixed >> _ONE_32) ^ ((mixed & _ONE_32) * _MATRIX_32))


@compiled
def _twisted_64(word: np.uint64, after: np.uint64, middle: np.uint64) -> np.uint64:
    mixed = (word & _UPPER_64) | (after & _LOWER_64)
    return middle ^ (mixed >> _ONE_64) ^ ((mixed & _ONE_64) * _MATRIX_64)


@compiled
def draw_32(state: npt.NDArray[np.uint32], draws: npt.NDArray[np.uint32]) -> None:
    """Move the state on, and give the next 624 numbers of the stream: both [624]."""
    shorter = WORDS_32 - _MIDDLE_32
    for i in range(shorter):
        state[i] = _twisted_32(state[i], state[i + 1], state[i + _MIDDLE_32])
    for i in range(shorter, WORDS_32 - 1):
        state[i] = _twisted_32(state[i], state[i + 1], state[i - shorter])
    state[-1] = _twisted_32(state[-1], state[0], state[_MIDDLE_32 - 1])
    for i in range(WORDS_32):
        word = state[i]
        word ^= word >> _U32(11)
        word ^= (word << _U32(7)) & _U32(0x9D2C5680)
        word ^= (word << _U32(15)) & _U32(0xEFC60000)
        draws[i] = word ^ (word >> _U32(18))


@compiled
def draw_64(state: npt.NDArray[np.uint64], draws: npt.NDArray[np.uint64]) -> None:
    """Move the state on, and give the next 312 numbers of the stream: both [312]."""
    shorter = WORDS_64 - _MIDDLE_64
    for i in range(shorter):
        state[i] = _twisted_64(state[i], state[i + 1], state[i + _MIDDLE_64])
    for i in range(shorter, WORDS_64 - 1):
        state[i] = _twisted_64(state[i], state[i + 1], state[i - shorter])
    state[-1] = _twisted_64(state[-1], state[0], state[_MIDDLE_64 - 1])
    for i in range(WORDS_64):
        word = state[i]
        word ^= (word >> _U64(29)) & _U64(0x5555555555555555)
        word ^= (word << _U64(17)) & _U64(0x71D67FFFEDA60000)
        word ^= (word << _U64(37)) & _U64(0xFFF7EEE000000000)
        draws[i] = word ^ (word >> _U64(43))
