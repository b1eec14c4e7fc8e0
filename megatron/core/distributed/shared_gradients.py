"""Gradients of what several ranks of one model replica hold, each with a part of the sum.

* The tied word embedding: the first stage's table and the last stage's copy of it.
* Key and value rows when there are fewer query groups than tensor-parallel ranks: several ranks hold the same
  rows, and each sees only its own query heads.
"""

import json
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.buffers import ParameterBuffers
from megatron.core.parameter import NamedParameter, Piece


@dataclass(frozen=True)
class _SharedRows:
    """Rows of a gradient that other tensor-parallel ranks hold too."""

    gradient: torch.Tensor
    """Their view, the split dim first."""
    start: int
    """Where they begin in the flat tensor of all shared rows."""


class SharedGradients:
    """Sums the gradients of parameters, or parts of them, that ranks of one replica hold more than once."""

    def __init__(
        self, buffers: ParameterBuffers, tp_group: ProcessGroup, embedding_group: ProcessGroup | None
    ) -> None:
        """Find out which they are; all ranks of the groups call this together.

        Args:
            buffers: this rank's parameters; tensor-parallel ranks give them in the same order.
            tp_group: this rank's tensor-parallel group.
            embedding_group: first and last stage, where this rank is on one of two or more; else None.
        """
        self._tp_group = tp_group
        self._embedding_group = embedding_group
        gradients = buffers.gradients()
        self._tied = [] if embedding_group is None else _tied_gradients(buffers, gradients, embedding_group)
        self._rows, self._rows_size = _shared_rows(buffers, gradients, tp_group)
        dtypes = [shared.gradient.dtype for shared in self._rows]
        self._rows_dtype = reduce(torch.promote_types, dtypes, torch.float32)
        self._device = buffers.device

    def sum(self) -> None:
        """Add up this step's gradients in place, after their reduction over data-parallel ranks."""
        self._sum_shared_rows()
        for gradient in self._tied:
            dist.all_reduce(gradient, group=self._embedding_group)

    def _sum_shared_rows(self) -> None:
        """One flat all-reduce over the tensor-parallel group; every rank fills in the rows it holds."""
        if not self._rows_size:
            return
        flat = torch.zeros(self._rows_size, dtype=self._rows_dtype, device=self._device)
        places = [
            flat[shared.start : shared.start + shared.gradient.numel()].view(shared.gradient.shape)
            for shared in self._rows
        ]
        for place, shared in zip(places, self._rows, strict=True):
            place.copy_(shared.gradient)
        dist.all_reduce(flat, group=self._tp_group)
        for place, shared in zip(places, self._rows, strict=True):
            shared.gradient.copy_(place)


def _tied_gradients(
    buffers: ParameterBuffers, gradients: dict[str, torch.Tensor], embedding_group: ProcessGroup
) -> list[torch.Tensor]:
    """Gradients of the parameters that first and last stage both hold, in the same order on both."""
    held = {named.name: list(named.parameter.shape) for named in buffers.parameters}
    first, last = _gather_json(held, embedding_group, buffers.device)
    names = [name for name in first if name in last]
    for name in names:
        if first[name] != last[name]:
            raise ValueError(
                f"{name} has shape {first[name]} on the first stage but {last[name]} on the last"
            )
    return [gradients[name] for name in names]


def _gather_json(value: Any, group: ProcessGroup, device: torch.device) -> list[Any]:
    """What each rank of ``group`` passed, in the order of ranks. Plain JSON values only."""
    message = json.dumps(value).encode()
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = len(message)
    dist.all_reduce(sizes, group=group)
    longest = int(sizes.max())
    padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    dist.all_gather_single(gathered, padded, group=group)
    return [json.loads(bytes(part.tolist())) for part in gathered.view(group.size(), longest).cpu()]


def _shared_rows(
    buffers: ParameterBuffers, gradients: dict[str, torch.Tensor], tp_group: ProcessGroup
) -> tuple[list[_SharedRows], int]:
    """This rank's shared rows, and the number of elements of all shared rows of the group.

    The first holder of a row cannot tell from its own facts that others hold it too, so holders are counted.
    """
    suspects = _partly_shared_anywhere(buffers, tp_group)
    if not suspects:
        return [], 0
    holders = torch.zeros(sum(_rows(named) for named in suspects), dtype=torch.int32, device=buffers.device)
    parts = torch.split(holders, [_rows(named) for named in suspects])
    for part, named in zip(parts, suspects, strict=True):
        for piece in named.facts.pieces:
            part[piece.start : piece.start + piece.length] += 1
    dist.all_reduce(holders, group=tp_group)
    found: list[_SharedRows] = []
    size = 0
    for part, named in zip(parts, suspects, strict=True):
        shared = (part > 1).tolist()
        shape, dim = named.parameter.shape, named.facts.dim
        row_size = shape[:dim].numel() * shape[dim + 1 :].numel()
        gradient = gradients[named.name].movedim(dim, 0)
        for local, start, length in (run for piece in named.facts.pieces for run in _runs(piece, shared)):
            offset = size + sum(shared[:start]) * row_size
            found.append(_SharedRows(gradient[local : local + length], offset))
        size += sum(shared) * row_size
    return found, size


def _partly_shared_anywhere(buffers: ParameterBuffers, tp_group: ProcessGroup) -> list[NamedParameter]:
    """The parameters of which some rank holds a part that it does not count. The same on all ranks."""
    if tp_group.size() == 1:
        return []
    flags = torch.tensor([named.facts.partly_shared for named in buffers.parameters], dtype=torch.int32)
    flags = flags.to(buffers.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=tp_group)
    return [named for named, flag in zip(buffers.parameters, flags.tolist(), strict=True) if flag]


def _rows(named: NamedParameter) -> int:
    return named.facts.global_shape[named.facts.dim]


def _runs(piece: Piece, shared: list[bool]) -> list[tuple[int, int, int]]:
    """The shared runs of a piece: (first local row, first row in the whole tensor, rows)."""
    rows = range(piece.start, piece.start + piece.length)
    runs = [list(run) for is_shared, run in groupby(rows, key=shared.__getitem__) if is_shared]
    return [(piece.local + run[0] - piece.start, run[0], len(run)) for run in runs]
