"""Facts about a parameter: where in the whole model this rank's tensor lies.

A leaf layer makes its parameters through :func:`make_parameter`, which records the facts once. The name is
the parameter's path in the module tree, which is its name in the whole model too (stages number their layers
globally), so it is looked up and not stored: see :func:`named_parameters`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Piece:
    """A run of rows (along the split dim) of a local tensor, and where it lies in the whole tensor."""

    local: int
    """First index in the local tensor."""
    start: int
    """First index in the whole tensor, in the true (unpadded) shape."""
    length: int
    """Number of indices."""
    primary: bool = True
    """Whether this rank counts the piece in norms and saves it; False where another rank does."""


@dataclass(frozen=True)
class ParameterFacts:
    """What a rank knows of one parameter of the whole model."""

    global_shape: tuple[int, ...]
    """True shape in the whole model: no padding, all ranks together."""
    dim: int
    """The dim that tensor parallelism splits (0 for a parameter that is not split)."""
    pieces: tuple[Piece, ...]
    """Where the local tensor's rows along ``dim`` lie; rows in no piece are padding and stay zero."""
    init_std: float | None
    """Standard deviation of its normal initial values; None if filled with ``init_fill``."""
    init_fill: float = 0.0
    """Its constant initial value, where ``init_std`` is None."""
    weight_decay: bool = True
    """Whether weight decay applies (not to biases, nor to any parameter of one dim)."""
    copy_of: str | None = None
    """Name of the parameter on another stage that this one is a copy of (the tied output layer)."""
    tied: bool = False
    """Whether another stage holds this parameter too: the original and the copy alike."""
    partial_over_tp: bool = False
    """Whether each tensor-parallel rank sees only a part of its gradient, though all hold it whole: it serves
    a slice of the sequence or a rank's own heads. The parts are to be summed before the update."""

    @property
    def split(self) -> bool:
        """Whether this rank holds less than the whole parameter."""
        return sum(piece.length for piece in self.pieces) < self.global_shape[self.dim]


class FactsError(TypeError):
    """A parameter that was not made by :func:`make_parameter`."""


@dataclass(frozen=True)
class Placement:
    """Number format and device of new parameters."""

    dtype: torch.dtype
    device: torch.device


def make_parameter(local_shape: tuple[int, ...], facts: ParameterFacts, placement: Placement) -> nn.Parameter:
    """An uninitialised parameter of ``local_shape`` that carries ``facts``."""
    parameter = nn.Parameter(torch.empty(local_shape, dtype=placement.dtype, device=placement.device))
    parameter.facts = facts  # type: ignore[attr-defined]
    return parameter


def replicated_facts(
    shape: tuple[int, ...],
    tp_rank: int,
    *,
    init_std: float | None = None,
    init_fill: float = 0.0,
    partial_over_tp: bool = False,
) -> ParameterFacts:
    """Facts of a parameter that every tensor-parallel rank holds whole; rank 0 counts and saves it."""
    return ParameterFacts(
        global_shape=shape,
        dim=0,
        pieces=(Piece(0, 0, shape[0], primary=tp_rank == 0),),
        init_std=init_std,
        init_fill=init_fill,
        weight_decay=len(shape) > 1,
        partial_over_tp=partial_over_tp,
    )


def facts_of(parameter: nn.Parameter) -> ParameterFacts:
    """The facts recorded for ``parameter``.

    Raises:
        FactsError: if there are none, which is an error of the layer that made it.
    """
    facts = parameter.__dict__.get("facts")
    if not isinstance(facts, ParameterFacts):
        raise FactsError(f"a parameter of shape {tuple(parameter.shape)} was not made by make_parameter")
    return facts


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with its name in the whole model and its facts."""

    name: str
    parameter: nn.Parameter
    facts: ParameterFacts


def named_parameters(module: nn.Module) -> Iterator[NamedParameter]:
    """Every parameter of ``module`` under its name in the whole model, in the order of the module tree.

    A copy of another stage's parameter goes by the name of the original.
    """
    for path, parameter in module.named_parameters():
        facts = facts_of(parameter)
        yield NamedParameter(facts.copy_of or path, parameter, facts)
