"""Norms over the whole model: every true element counted once, whatever the layout."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.communication import all_reduce
from megatron.core.distributed.own_bucket import ParameterStore, Range

_ROW = 4096


@dataclass(frozen=True)
class GradientStatistics:
    """What all ranks agree on about the gradients of a step, before clipping."""

    norm: float
    """L2 norm over the whole model; not finite where a gradient is not."""
    finite: bool
    """Whether every gradient on every rank is finite."""
    num_zeros: int | None
    """Gradient elements of the whole model that are zero, where asked for."""


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of a flat tensor [n], as a float64 scalar on its device.

    Rows of a fixed length are summed in the tensor's own precision and the rows in float64. One sum over all
    of a large float32 tensor would lose digits (0.2% at 30 million elements on a CPU), and would depend on
    the number of threads.
    """
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    total: torch.Tensor = rows.to(torch.float64).square().sum() + rest.to(torch.float64).square()
    return total


def measure_gradients(
    store: ParameterStore,
    model_group: ProcessGroup,
    data_group: ProcessGroup,
    *,
    loss_scale: float,
    count_zeros: bool,
) -> GradientStatistics:
    """Norm of the reduced gradients (loss scale taken out), and whether they are finite, on all ranks alike.

    Tied copies, duplicates on other tensor-parallel ranks and vocabulary padding do not count in the norm,
    but a NaN or infinity in them does count as one.

    Args:
        store: this rank's parameters and reduced gradients.
        model_group: ranks that hold one replica of the model together: they add up their parts.
        data_group: ranks that hold the same parameters: they add up their slices if those are disjoint, and
            else agree on what is finite.
        loss_scale: what the gradients are still multiplied by.
        count_zeros: also count zeros.
    """
    device = store.device
    counted, uncounted = torch.zeros(2, dtype=torch.float64, device=device)
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in store.buckets:
        for part in _parts(bucket.gradients, bucket.counted_ranges):
            counted = counted + sum_of_squares(part)
            if count_zeros:
                zeros = zeros - torch.count_nonzero(part)
        for part in _parts(bucket.gradients, bucket.uncounted_ranges):
            uncounted = uncounted + sum_of_squares(part)
        zeros = zeros + bucket.counted_size
    unusable = (~(counted + uncounted).isfinite()).to(torch.float64)
    totals = torch.stack([counted, zeros, unusable])
    all_reduce(totals, model_group)
    if store.sharded:
        all_reduce(totals, data_group)
    else:
        all_reduce(totals[2:], data_group, dist.ReduceOp.MAX)
    square, num_zeros, num_unusable = totals.tolist()
    norm = math.sqrt(square) / loss_scale if square >= 0 else math.nan
    return GradientStatistics(
        norm=norm,
        finite=num_unusable == 0 and math.isfinite(norm),
        num_zeros=int(num_zeros) if count_zeros else None,
    )


def parameters_norm(
    store: ParameterStore,
    weights: Sequence[torch.Tensor],
    model_group: ProcessGroup,
    data_group: ProcessGroup,
) -> float:
    """L2 norm of all weights of the model, each true element counted once.

    Args:
        store: this rank's parameters.
        weights: a flat tensor for each bucket, such as the float32 main weights.
        model_group: ranks that hold one replica of the model together.
        data_group: ranks that hold the same parameters, or disjoint slices of them.
    """
    total = torch.zeros(1, dtype=torch.float64, device=store.device)
    for bucket, flat in zip(store.buckets, weights, strict=True):
        for part in _parts(flat, bucket.counted_ranges):
            total += sum_of_squares(part)
    all_reduce(total, model_group)
    if store.sharded:
        all_reduce(total, data_group)
    return math.sqrt(total.item())


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply gradients of L2 norm ``norm`` by so that it is at most ``max_norm`` (0: no limit)."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0


def _parts(flat: torch.Tensor, ranges: Sequence[Range]) -> Iterator[torch.Tensor]:
    for start, stop in ranges:
        yield flat[start:stop]
