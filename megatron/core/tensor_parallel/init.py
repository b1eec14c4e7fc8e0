"""Initial weights that do not depend on the layout: one seed gives one whole model for every TP and PP."""

from collections.abc import Iterable

import torch
from torch import nn

from megatron.core.parameter import NamedParameter, Piece, named_parameters
from megatron.core.tensor_parallel.random import RandomStream

BLOCK = 128
"""Indices along the split dim that are drawn together. Part of what a seed means: never change it."""


@torch.no_grad()
def initialize_parameters(model: nn.Module | Iterable[NamedParameter], seed: int) -> None:
    """Fill every parameter of ``model`` by its facts.

    A normally distributed parameter is cut, as it lies in the whole model, into blocks of 128 indices along
    the dim that tensor parallelism splits. Each block has its own stream, named by the seed, the parameter's
    name in the whole model and the block's number, and is drawn on the CPU in float32. A rank draws the
    blocks that it holds a part of. Rows that lie in no piece are padding and become zero.

    Args:
        model: a model, or the part of one that this rank holds, made of parameters with facts; or its
            parameters, where it is in several modules.
        seed: the run's seed.
    """
    root = RandomStream.root(seed)
    for named in named_parameters(model) if isinstance(model, nn.Module) else model:
        facts = named.facts
        named.parameter.zero_()
        for piece in facts.pieces:
            if facts.init_std is None:
                named.parameter.narrow(facts.dim, piece.local, piece.length).fill_(facts.init_fill)
            else:
                _fill_piece(named, piece, facts.init_std, root)


def _fill_piece(named: NamedParameter, piece: Piece, std: float, root: RandomStream) -> None:
    """Draw the blocks that touch ``piece`` and copy their common part into the parameter."""
    facts = named.facts
    whole = facts.global_shape[facts.dim]
    end = piece.start + piece.length
    for block in range(piece.start // BLOCK, -(-end // BLOCK)):
        first = block * BLOCK
        last = min(first + BLOCK, whole)
        shape = list(facts.global_shape)
        shape[facts.dim] = last - first
        values = torch.empty(shape, dtype=torch.float32)
        values.normal_(0.0, std, generator=root.fold("init", named.name, block).generator())
        low, high = max(first, piece.start), min(last, end)
        target = named.parameter.narrow(facts.dim, piece.local + low - piece.start, high - low)
        target.copy_(values.narrow(facts.dim, low - first, high - low))
