"""Small modules for the engine's tests: a two-layer network, and a layout probe whose gradients are given."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.parallel_state import ParallelState
from megatron.core.parameter import (
    NamedParameter,
    ParameterFacts,
    Piece,
    Placement,
    make_parameter,
    named_parameters,
    replicated_facts,
)


@contextmanager
def solo_group() -> Iterator[ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.new_group([0])
    finally:
        dist.destroy_process_group()


class TwoLayers(nn.Module):
    """x [n, i] -> [n, i]; sizes that are no multiple of anything, and one bias."""

    def __init__(self, dtype: torch.dtype, width: int = 5, inner: int = 7, seed: int = 0) -> None:
        super().__init__()
        shapes = {"first": (inner, width), "bias": (inner,), "second": (width, inner)}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            facts = replicated_facts(shape, 0)
            parameter = make_parameter(shape, facts, Placement(dtype, torch.device("cpu")))
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(values)
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first.t() + self.bias) @ self.second.t()


# The layout probe: a model of parameters alone, whose loss is linear in them, so that its gradients are what
# we say. Global shapes; HEADS = rows of a query or key-value head.
VOCAB, WIDTH, INNER, HEAD, QUERIES, GROUPS = 11, 4, 8, 3, 4, 2
SHAPES = {
    "embedding.weight": (VOCAB, WIDTH),
    "position.weight": (6, WIDTH),
    "norm.weight": (WIDTH,),
    "qkv.weight": ((QUERIES + 2 * GROUPS) * HEAD, WIDTH),
    "qkv.bias": ((QUERIES + 2 * GROUPS) * HEAD,),
    "row.weight": (WIDTH, INNER),
    "final.weight": (WIDTH,),
}
ON_FIRST_STAGE = ("embedding.weight", "position.weight", "norm.weight", "qkv.weight", "qkv.bias")


def whole(name: str, salt: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A whole tensor for ``name`` in its global shape, the same on all ranks; some elements are zero."""
    generator = torch.Generator().manual_seed(salt * 100 + list(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    return (values * (values.abs() > 0.2)).to(dtype)


def pieces_of(name: str, tp_rank: int, tp: int) -> tuple[Piece, ...]:
    """Which rows (along the split dim) a rank holds."""
    if name == "embedding.weight":
        rows = -(-VOCAB // tp)
        return (Piece(0, tp_rank * rows, max(0, min(rows, VOCAB - tp_rank * rows))),)
    if name == "row.weight":
        return (Piece(0, tp_rank * INNER // tp, INNER // tp),)
    if not name.startswith("qkv"):
        return (Piece(0, 0, SHAPES[name][0], primary=tp_rank == 0),)
    per_group = QUERIES // GROUPS * HEAD  # query rows of one group; then come HEAD rows of K and of V
    block = per_group + 2 * HEAD
    if tp <= GROUPS:
        return (Piece(0, tp_rank * GROUPS // tp * block, GROUPS // tp * block),)
    sharing = tp // GROUPS  # ranks that share one group
    group, part = divmod(tp_rank, sharing)
    rows = per_group // sharing
    return (
        Piece(0, group * block + part * rows, rows),
        Piece(rows, group * block + per_group, 2 * HEAD, primary=part == 0),
    )


class Probe(nn.Module):
    """This rank's parameters of the probe model in a layout."""

    def __init__(self, state: ParallelState, dtype: torch.dtype, *, tied: bool = True) -> None:
        super().__init__()
        tp, tp_rank = state.size("tp"), state.rank("tp")
        is_first, is_last = state.rank("pp") == 0, state.rank("pp") == state.size("pp") - 1
        self.tp, self.tp_rank = tp, tp_rank
        self.embedding_has_copy = tied and state.size("pp") > 1
        for name in SHAPES:
            here = is_first if name in ON_FIRST_STAGE else is_last
            if here:
                self._add(name, name, dtype)
        if self.embedding_has_copy and is_last:
            self._add("output.weight", "embedding.weight", dtype)

    def _add(self, path: str, name: str, dtype: torch.dtype) -> None:
        pieces = pieces_of(name, self.tp_rank, self.tp)
        dim = 1 if name == "row.weight" else 0
        shape = list(SHAPES[name])
        shape[dim] = -(-VOCAB // self.tp) if name == "embedding.weight" else sum(p.length for p in pieces)
        if len(shape) == 1 and name != "qkv.bias":
            facts = replicated_facts(tuple(shape), self.tp_rank, init_fill=1.0)
        else:
            copy_of = name if path != name else None
            tied = name == "embedding.weight" and self.embedding_has_copy
            facts = ParameterFacts(SHAPES[name], dim, pieces, 0.02, 0.0, len(shape) > 1, copy_of, tied)
        parameter = make_parameter(tuple(shape), facts, Placement(dtype, torch.device("cpu")))
        parameter.data.copy_(self.local(whole(name, 1), facts, tuple(shape)))
        module_name, _, leaf = path.partition(".")
        if module_name not in self._modules:
            self.add_module(module_name, nn.Module())
        self.get_submodule(module_name).register_parameter(leaf, parameter)

    @staticmethod
    def local(tensor: torch.Tensor, facts: ParameterFacts, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's rows of a whole tensor, padding zero."""
        out = torch.zeros(shape, dtype=tensor.dtype)
        for piece in facts.pieces:
            rows = tensor.narrow(facts.dim, piece.start, piece.length)
            out.narrow(facts.dim, piece.local, piece.length).copy_(rows)
        return out

    def loss(self, salt: int) -> torch.Tensor:
        """A loss whose gradient with respect to each whole parameter is ``whole(name, salt)``.

        Rows that several ranks share get an equal part each; so do the two holders of a tied parameter.
        """
        total = torch.zeros((), dtype=torch.float64)
        for named in named_parameters(self):
            gradient = self.local(whole(named.name, salt), named.facts, tuple(named.parameter.shape))
            if named.facts.split and named.name.startswith("qkv") and self.tp > GROUPS:
                piece = named.facts.pieces[1]
                gradient.narrow(0, piece.local, piece.length).div_(self.tp // GROUPS)
            if named.name == "embedding.weight" and self.embedding_has_copy:
                gradient = gradient * (0.25 if named.facts.copy_of is None else 0.75)
            total = total + (named.parameter.to(torch.float64) * gradient).sum()
        return total


def parameters(module: nn.Module) -> list[NamedParameter]:
    return list(named_parameters(module))
