"""Gathering updated parameters: each data-parallel rank has updated a slice of every bucket.

The all-gathers may run while the next forward pass already uses what has arrived (--overlap-param-gather). A
module then waits, right before it runs, for the buckets that its parameters lie in.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.communication import Handle, start_all_gather


class ParameterGather:
    """The all-gathers of one rank's buckets, one a bucket."""

    def __init__(
        self, wholes: Sequence[torch.Tensor], owns: Sequence[torch.Tensor], group: ProcessGroup
    ) -> None:
        """Gather nothing yet.

        Args:
            wholes: flat weights [n] of each bucket.
            owns: this rank's slice [n/d] of each, a view of it.
            group: the data-parallel ranks, d of them.
        """
        self._wholes = wholes
        self._owns = owns
        self._group = group
        self._order = list(range(len(wholes)))
        self._overlap = False
        self._under_way: dict[int, Handle] = {}

    def overlap_with(self, modules: Sequence[nn.Module], places: Mapping[int, int]) -> None:
        """Leave the waiting to the modules from now on, and begin with the bucket that is needed first.

        Args:
            modules: trees of modules in the order of their forward passes.
            places: for the ``id`` of each parameter the number of its bucket.
        """
        self._overlap = True
        needed: list[int] = []
        for module in (module for tree in modules for module in tree.modules()):
            numbers = dict.fromkeys(places[id(parameter)] for parameter in _read_by(module))
            if numbers:
                module.register_forward_pre_hook(partial(self._wait_for, tuple(numbers)))
            needed += numbers
        self._order = list(dict.fromkeys([*needed, *self._order]))

    def start(self) -> None:
        """Start to gather every bucket; without overlap, wait for it. All ranks of the group together."""
        self.wait()
        for number in self._order:
            self._under_way[number] = start_all_gather(self._wholes[number], self._owns[number], self._group)
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Return when all buckets have arrived."""
        self._wait_for(tuple(self._under_way))

    def _wait_for(self, numbers: Sequence[int], *_: Any) -> None:
        """Return when these buckets have arrived; a forward pre-hook of a module that reads them."""
        if not self._under_way:
            return
        for number in numbers:
            handle = self._under_way.pop(number, None)
            if handle is not None:
                handle.wait()


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a module's own forward pass may read without calling another module.

    Those of a child that has no forward pass (the output layer, whose matrix goes into the loss) count as its
    own.
    """
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _has_forward(child):
            yield from _read_by(child)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
