"""The two loops of :mod:`megatron.core.datasets.legacy_shuffle`, compiled by numba."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    return cast(Function, njit(nogil=True)(function))


@_compiled
def accept(
    draws: npt.NDArray[np.uint32], top: int, below: int, places: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """Find the places that ``top``, ``top - 1`` and so on down to ``below + 1`` are swapped with.

    Args:
        draws: [n] words of the generator.
        top: first place.
        below: highest place whose draws have fewer bits, one less than a power of 2.
        places: [n + 1], filled.

    Returns:
        How many places were found, and how many draws were used.
    """
    mask = np.uint32(2 * below + 1)
    found = 0
    for used in range(len(draws)):
        if top == below:
            return found, used
        place = np.int64(draws[used] & mask)
        places[found] = place  # kept if the count goes on: no branch to be mispredicted
        good = int(place <= top)
        found += good
        top -= good
    return found, len(draws)


@_compiled
def swap(array: npt.NDArray[Any], top: int, places: npt.NDArray[np.int64]) -> None:
    """Swap ``array[top]`` with ``array[places[0]]``, then the one before with the next, and so on."""
    for step in range(len(places)):
        place = places[step]
        kept = array[top - step]
        array[top - step] = array[place]
        array[place] = kept
