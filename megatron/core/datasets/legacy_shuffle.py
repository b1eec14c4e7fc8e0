"""NumPy's legacy shuffle, the same permutation, faster for large arrays.

``RandomState.shuffle`` walks from the last place down; at each it draws 32 bits, cut to the width of the
place, until they name a place not above it, and swaps the two. The permutation is part of what makes a run
the same as another, so neither the draws nor their order can change. But drawing and swapping in turn costs a
mispredicted branch and a wait for memory at every place. Where a stretch of draws is made first, and the
swaps follow with all places known, the processor waits for many of them at once: a third of the time, with a
loop that is compiled.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

COMPILED_FROM: Final = 1 << 24
"""Length from which an array is worth the second that compiling the loops takes."""
TAIL: Final = 1 << 17
"""Places below this lie in the processor's cache and are left to NumPy; a power of 2."""
LONGEST: Final = 1 << 32
"""Longest array whose places are drawn with 32 bits each."""
STRETCH: Final = 1 << 15
"""Draws that are made at once."""


def shuffle(generator: np.random.RandomState, array: npt.NDArray[Any]) -> None:
    """Shuffle in place exactly as ``generator.shuffle(array)`` does, and leave the generator in its state.

    Args:
        generator: what is drawn from.
        array: [n] contiguous, of 4 or 8 bytes each.
    """
    if not COMPILED_FROM <= len(array) <= LONGEST:
        generator.shuffle(array)
        return
    # Importing numba takes a while too, and most processes never need it.
    from megatron.core.datasets import shuffle_kernels

    words = array.view(np.int32 if array.itemsize == 4 else np.int64)
    places = np.empty(STRETCH + 1, dtype=np.int64)
    top = len(array) - 1
    while top >= TAIL:
        below = (1 << (top.bit_length() - 1)) - 1  # the highest place of the next smaller width
        state = generator.get_state()
        draws = _draw(generator, STRETCH)
        good, used = shuffle_kernels.accept(draws, top, below, places)
        if used < STRETCH:
            generator.set_state(state)
            _draw(generator, used)
        shuffle_kernels.swap(words, top, places[:good])
        top -= good
    generator.shuffle(array[: top + 1])


def _draw(generator: np.random.RandomState, size: int) -> npt.NDArray[np.uint32]:
    """The next 32-bit words of a generator: [size]."""
    return generator.randint(0, 1 << 32, size=size, dtype=np.uint32)
