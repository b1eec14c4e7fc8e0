"""Counting collectives at the functions of ``torch.distributed`` that the library calls."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)


class Collective(NamedTuple):
    name: str
    shape: tuple[int, ...]
    bytes: int


@contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Every collective that starts inside the block, with its first tensor's shape and size in bytes."""
    seen: list[Collective] = []
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, _recorder(name, seen)))
        yield seen


def _recorder(name: str, seen: list[Collective]) -> Any:
    function = getattr(dist, name)

    def record(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(Collective(name, tuple(tensor.shape), tensor.numel() * tensor.element_size()))
        return function(tensor, *args, **kwargs)

    return record
