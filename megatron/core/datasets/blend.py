"""Mix several datasets by weight, in an order that is the same everywhere and needs no random numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

LANES: Final = 2048
LANE_STEPS: Final = 512
CHUNK: Final = 1 << 20
MOST_DATASETS: Final = 2**15 - 1


@dataclass(frozen=True)
class Blend:
    """Data prefixes and their weights.

    Attributes:
        prefixes: one for each dataset.
        weights: share of the samples of each, adding up to 1; None if none were given.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(paths: tuple[str, ...], flag: str) -> Blend:
    """Read a list of data paths: prefixes, or a weight before each prefix.

    It is read as weights and prefixes where every second word, from the first, is a number and the count is
    even. The weight of a single dataset says nothing; a dataset of weight 0 is left out.

    Raises:
        ValueError: if the weights can't be shares, or there are more datasets than an order can number.
    """
    weights = [_number(word) for word in paths[::2]]
    if len(paths) % 2 or None in weights:
        _check_count(len(paths), flag)
        return Blend(tuple(paths), None)
    numbers = [weight for weight in weights if weight is not None]
    total = math.fsum(numbers)
    if min(numbers) < 0 or not 0 < total < math.inf:
        raise ValueError(f"{flag}: the weights {numbers} must be 0 or above, and not all 0")
    kept = [(prefix, weight) for prefix, weight in zip(paths[1::2], numbers, strict=True) if weight > 0]
    _check_count(len(kept), flag)
    prefixes = tuple(prefix for prefix, _ in kept)
    return Blend(prefixes, normalize([weight for _, weight in kept]) if len(kept) > 1 else None)


def normalize(weights: list[float]) -> tuple[float, ...]:
    """The weights over their sum, in float64 as other systems of this family compute it."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / np.sum(values)).tolist())


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_count(count: int, flag: str) -> None:
    if count >= MOST_DATASETS:
        raise ValueError(f"{flag}: {count} datasets; a blend holds fewer than {MOST_DATASETS}")


def blend_indices(weights: tuple[float, ...], size: int) -> dict[str, npt.NDArray[Any]]:
    """Which dataset, and which of its samples, comes at each place of a blend.

    At place k the dataset is drawn that lags most behind its share: the one with the largest
    ``weight * max(k, 1) - drawn so far``, of equals the first. A dataset's samples come in its own order.

    Args:
        weights: share of each dataset, adding up to 1.
        size: number of places.

    Returns:
        ``dataset_index`` [size] int16 and ``dataset_sample_index`` [size] int64.
    """
    order = _draw(np.array(weights, dtype=np.float64), size)
    return {"dataset_index": order, "dataset_sample_index": _count_within(order, len(weights))}


def exhaustive_indices(sizes: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """The same where each sample of each dataset comes once, and a dataset that is used up is left out.

    Args:
        sizes: number of samples of each dataset, which is its weight too.

    Returns:
        As :func:`blend_indices`, with as many places as there are samples.
    """
    whole = np.array(sizes, dtype=np.int64)
    filled = np.flatnonzero(whole)
    order = filled.astype(np.int16)[_spend(whole[filled] / whole.sum(), whole[filled])]
    return {"dataset_index": order, "dataset_sample_index": _count_within(order, len(whole))}


def _spend(shares: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    """Draw by shares until each dataset has been drawn as often as its size: [sum of sizes]."""
    order = _draw(shares, int(sizes.sum()))
    if (np.bincount(order, minlength=len(sizes)) == sizes).all():
        return order
    # Were numbers exact, shares of the sizes would never overdraw. Rounded ones may, close to the end.
    overdrawn = np.flatnonzero(_count_within(order, len(sizes)) >= sizes[order])
    start = int(overdrawn[0])
    drawn = np.bincount(order[:start], minlength=len(sizes))
    for place in range(start, len(order)):
        lags = np.where(drawn < sizes, shares * max(place, 1) - drawn, -np.inf)
        order[place] = pick = int(lags.argmax())
        drawn[pick] += 1
    return order


def _draw(shares: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.int16]:
    """The dataset at each place: [size]."""
    order = np.empty(size, dtype=np.int16)
    drawn = np.zeros(len(shares))
    start = 0
    while start < size:
        steps = min(LANE_STEPS, size - start)
        lanes = min(LANES, (size - start) // steps)
        picks, drawn = _draw_lanes(shares, drawn, start, lanes, steps)
        order[start : start + lanes * steps] = picks.reshape(-1)
        start += lanes * steps
    return order


def _draw_lanes(
    shares: npt.NDArray[np.float64], drawn: npt.NDArray[np.float64], start: int, lanes: int, steps: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float64]]:
    """Draw ``lanes * steps`` places at once: the lanes are consecutive stretches, worked on side by side.

    Where a lane begins is guessed, since what has been drawn never strays far from the shares. A lane that
    did not begin where the one before it ended is drawn again from there, until all fit together; the result
    is that of one place after the other.

    Returns:
        The picks [lanes, steps], and what has been drawn at the end [n].
    """
    firsts = start + steps * np.arange(lanes)
    begins = _nearest_counts(shares, firsts)
    begins[0] = drawn
    ends = np.empty_like(begins)
    picks = np.empty((lanes, steps), dtype=np.int16)
    todo = np.arange(lanes)
    while todo.size:
        counts = begins[todo]
        rows = np.arange(len(todo))
        for step in range(steps):
            places = np.maximum(firsts[todo] + step, 1).astype(np.float64)
            pick = (shares * places[:, None] - counts).argmax(axis=1)
            counts[rows, pick] += 1
            picks[todo, step] = pick
        ends[todo] = counts
        todo = 1 + np.flatnonzero((ends[:-1] != begins[1:]).any(axis=1))
        begins[todo] = ends[todo - 1]
    return picks, ends[-1]


def _nearest_counts(
    shares: npt.NDArray[np.float64], places: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Whole counts [p, n] that add up to ``places`` [p], nearest to the shares: large remainders go up."""
    exact = shares * places[:, None]
    counts = np.floor(exact)
    missing = places - counts.sum(axis=1)
    by_remainder = np.argsort(counts - exact, axis=1, kind="stable")
    ranks = np.empty_like(by_remainder)
    np.put_along_axis(ranks, by_remainder, np.arange(len(shares))[None, :], axis=1)
    nearest: npt.NDArray[np.float64] = counts + (ranks < missing[:, None])
    return nearest


def _count_within(order: npt.NDArray[np.int16], datasets: int) -> npt.NDArray[np.int64]:
    """For each place, how often its dataset came before."""
    numbers = np.empty(len(order), dtype=np.int64)
    seen = np.zeros(datasets, dtype=np.int64)
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK]
        counts = np.bincount(part, minlength=datasets)
        firsts = np.cumsum(counts) - counts
        by_dataset = np.argsort(part, kind="stable")
        numbers[start + by_dataset] = np.arange(len(part)) + np.repeat(seen - firsts, counts)
        seen += counts
    return numbers


class BlendedDataset(Dataset[dict[str, npt.NDArray[Any]]]):
    """Several datasets as one, in the order of :func:`blend_indices`.

    Args:
        datasets: the components; each must hold as many samples as are drawn from it.
        indices: what :func:`blend_indices` gives.
    """

    def __init__(
        self, datasets: list[Dataset[dict[str, npt.NDArray[Any]]]], indices: dict[str, npt.NDArray[Any]]
    ) -> None:
        self.datasets = datasets
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices["dataset_index"])

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index} in a blend of {len(self)}")
        dataset = int(self.indices["dataset_index"][index])
        return self.datasets[dataset][int(self.indices["dataset_sample_index"][index])]
