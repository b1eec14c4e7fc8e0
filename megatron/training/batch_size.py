"""The global batch size over a run: constant, ramped up evenly, or raised in steps.

It depends on the number of consumed samples alone, so a resumed run finds it by that number, in whatever
layout. A size holds for whole iterations: one that begins before a threshold is not cut short by it.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

_STEP: Final = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSizes:
    """Global batch sizes by the samples that have been consumed.

    Attributes:
        steps: (consumed samples, global batch size that holds from there on), the first from 0, rising.
    """

    steps: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size of the run, each once, in the order of their turns."""
        return tuple(dict.fromkeys(size for _, size in self.steps))

    def at(self, consumed_samples: int) -> int:
        """Samples of the global batch that begins after so many."""
        place = bisect_right(self.steps, consumed_samples, key=lambda step: step[0])
        return self.steps[place - 1][1]

    def advance(self, consumed_samples: int, iterations: int) -> int:
        """Samples consumed after so many more iterations."""
        while iterations > 0:
            size, turns = self._stretch(consumed_samples)
            turns = iterations if turns is None else min(turns, iterations)
            consumed_samples += turns * size
            iterations -= turns
        return consumed_samples

    def iterations_within(self, consumed_samples: int, stop: int) -> int:
        """Iterations after ``consumed_samples`` that end at ``stop`` samples or before."""
        iterations = 0
        while True:
            size, turns = self._stretch(consumed_samples)
            fitting = max(stop - consumed_samples, 0) // size
            if turns is None or fitting < turns:
                return iterations + fitting
            iterations += turns
            consumed_samples += turns * size

    def _stretch(self, consumed_samples: int) -> tuple[int, int | None]:
        """The size at a place, and the iterations from there for which it holds; None without end."""
        place = bisect_right(self.steps, consumed_samples, key=lambda step: step[0])
        size = self.steps[place - 1][1]
        if place == len(self.steps):
            return size, None
        return size, -(-(self.steps[place][0] - consumed_samples) // size)


def constant(global_batch_size: int) -> BatchSizes:
    """One size for all of the run."""
    return BatchSizes(((0, global_batch_size),))


def ramped_up(rampup: tuple[int, ...], global_batch_size: int) -> BatchSizes:
    """``--rampup-batch-size``: from a start to ``global_batch_size``, each size for equally many samples.

    Args:
        rampup: start, increment, and the samples over which it is raised.
        global_batch_size: the size afterwards.

    Raises:
        ValueError: if these make no ramp.
    """
    flag = f"--rampup-batch-size {' '.join(map(str, rampup))}"
    if len(rampup) != 3:
        raise ValueError(f"{flag}: give three numbers, START INCREMENT SAMPLES")
    start, increment, samples = rampup
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{flag}: the start and the increment must be at least 1, the samples at least 0")
    if start > global_batch_size or (global_batch_size - start) % increment:
        raise ValueError(
            f"{flag}: increments of {increment} do not lead from {start} to --global-batch-size "
            f"{global_batch_size}"
        )
    turns = (global_batch_size - start) // increment
    steps = {0: start}  # of steps at one place the last counts
    for turn in range(1, turns + 1):
        steps[-(-turn * samples // turns)] = start + turn * increment
    return BatchSizes(tuple(steps.items()))


def in_steps(schedule: str, seq_length: int) -> BatchSizes:
    """``--step-batch-size-schedule``: ``0:768 250B:1536`` for 768 samples, and 1536 after 250e9 tokens.

    Args:
        schedule: pairs of a number of consumed tokens, with K, M, B or T for 1e3 to 1e12, and a batch size.
        seq_length: tokens of a sample; a threshold within a sample counts from its start.

    Raises:
        ValueError: if it isn't that, or the thresholds do not rise from 0.
    """
    flag = f"--step-batch-size-schedule {schedule!r}"
    pairs = [_STEP.fullmatch(word) for word in schedule.split()]
    if not pairs or None in pairs:
        raise ValueError(
            f"{flag}: give TOKENS:SIZE pairs with spaces between them, such as '0:768 250B:1536'"
        )
    steps = [
        (int(Fraction(found[1]) * _UNITS[found[2].upper()]) // seq_length, int(found[3]))
        for found in pairs
        if found is not None
    ]
    places = [place for place, _ in steps]
    if places[0] != 0 or sorted(set(places)) != places:
        raise ValueError(
            f"{flag}: the thresholds must begin with 0 and rise by more than a sample (--seq-length "
            f"{seq_length} tokens)"
        )
    if min(size for _, size in steps) < 1:
        raise ValueError(f"{flag}: a batch size must be at least 1")
    return BatchSizes(tuple(steps))
