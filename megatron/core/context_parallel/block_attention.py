"""Attention of one rank's queries, built up from the keys of one rank after another."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.context_parallel.dropout import ProbabilityDropout
from megatron.core.context_parallel.kernels import Kernel, choose_kernel
from megatron.core.context_parallel.visibility import Piece, Visibility, tiles


@dataclass(frozen=True)
class AttentionCall:
    """One attention, apart from its queries, keys and values."""

    group: ProcessGroup
    """The ranks that share the sequences."""
    visibility: Visibility
    """Who sees whom."""
    dropout: ProbabilityDropout | None
    """Of the probabilities."""

    def over_whole_sequences(self) -> "AttentionCall":
        """The same with queries and keys of whole sequences on this rank."""
        return replace(self, visibility=replace(self.visibility, cp_size=1))


class _Blocks:
    """Cuts what the queries see into what a kernel takes at a time."""

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor) -> None:
        self.rank = call.group.rank()
        self.visibility = call.visibility
        self.kernel: Kernel = choose_kernel(_heads_first(query), _heads_first(key), call.dropout)
        self.length, self.batch_size, self.heads = query.shape[:3]

    def pieces(self, source: int) -> list[Piece]:
        """What the queries see of the keys of ``source``."""
        rank = self.rank if self.visibility.cp_size > 1 else source
        pieces = self.visibility.pieces(rank, source, length=self.length, batch_size=self.batch_size)
        budget = self.kernel.budget
        if budget is None:
            return pieces
        return [tile for piece in pieces for tile in tiles(piece, self.heads, budget)]

    def place(self, piece: Piece, source: int) -> tuple[int, ...]:
        """What tells a piece from all others of one attention, on any rank."""
        return self.rank, source, piece.batch.start, piece.queries.start, piece.keys.start


class PartialAttention:
    """The output of this rank's queries over the keys seen so far.

    The keys of the rank itself come first: every query sees at least one of them, itself.
    """

    def __init__(self, call: AttentionCall, query: Tensor, key: Tensor) -> None:
        """Make room for the output.

        Args:
            call: what kind of attention.
            query: [s/cp, b, n, d].
            key: [s/cp, b, g, d], to tell the number of heads.
        """
        self._blocks = _Blocks(call, query, key)
        self._query = query
        wide = torch.promote_types(query.dtype, torch.float32)
        # Several results are added up in the wide type; a single one is just put in its place.
        single = call.visibility.cp_size == 1 and all(piece.first for piece in self._blocks.pieces(0))
        self._output = torch.empty_like(query, dtype=query.dtype if single else wide)
        self._lse = query.new_empty((query.shape[1], query.shape[2], query.shape[0]), dtype=wide)

    def add(self, source: int, key: Tensor, value: Tensor) -> None:
        """Look at the keys of rank ``source``.

        Args:
            source: rank in the group.
            key: [s/cp, b, g, d].
            value: [s/cp, b, g, d].
        """
        query, key, value = _heads_first(self._query), _heads_first(key), _heads_first(value)
        whole = _heads_first(self._output)
        for piece in self._blocks.pieces(source):
            output, lse = self._blocks.kernel.forward(
                query[piece.batch, :, piece.queries],
                key[piece.batch, :, piece.keys],
                value[piece.batch, :, piece.keys],
                causal=piece.causal,
                place=self._blocks.place(piece, source),
            )
            so_far = whole[piece.batch, :, piece.queries]
            lse_so_far = self._lse[piece.batch, :, piece.queries]
            if piece.first:
                so_far.copy_(output)
                lse_so_far.copy_(lse)
            else:
                _merge(so_far, lse_so_far, output, lse)

    def results(self) -> tuple[Tensor, Tensor]:
        """The output [s/cp, b, n, d] in the type of the queries, and the lse [b, n, s/cp]."""
        return self._output.to(self._query.dtype), self._lse


def _merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge another block's result into one, in place.

    Each output is a mean weighted by exp(lse), so the new one lies between the two, at the other's share of
    the sum of both weights, exp(other_lse) / (exp(lse) + exp(other_lse)).
    """
    share = torch.sigmoid(other_lse - lse)
    output.lerp_(other.to(output.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


class PartialGradients:
    """Gradients of one rank's queries, and of the keys and values that they look at."""

    def __init__(self, call: AttentionCall, saved: tuple[Tensor, ...], gradient: Tensor) -> None:
        """Make room for the gradient of the queries.

        Args:
            call: what kind of attention.
            saved: query, key, value, output and lse of the forward pass.
            gradient: of the output, [s/cp, b, n, d].
        """
        self._query, key, _, self._output, self._lse = saved
        self._blocks = _Blocks(call, self._query, key)
        self._gradient = gradient
        self._wide = torch.promote_types(self._query.dtype, torch.float32)
        self._of_query = torch.zeros_like(self._query, dtype=self._wide)

    def add(self, source: int, key: Tensor, value: Tensor) -> Tensor:
        """Look at the keys of rank ``source`` again.

        Args:
            source: rank in the group.
            key: [s/cp, b, g, d].
            value: [s/cp, b, g, d].

        Returns:
            This rank's part of their gradients, [2, s/cp, b, g, d], in at least float32.
        """
        of_key_value = torch.zeros((2, *key.shape), dtype=self._wide, device=key.device)
        query, key, value = _heads_first(self._query), _heads_first(key), _heads_first(value)
        gradient, output = _heads_first(self._gradient), _heads_first(self._output)
        of_query, of_key, of_value = (_heads_first(x) for x in (self._of_query, *of_key_value))
        for piece in self._blocks.pieces(source):
            queries = piece.batch, slice(None), piece.queries
            keys = piece.batch, slice(None), piece.keys
            parts = self._blocks.kernel.backward(
                gradient[queries],
                (query[queries], key[keys], value[keys]),
                (output[queries], self._lse[queries]),
                causal=piece.causal,
                place=self._blocks.place(piece, source),
            )
            of_query[queries] += parts[0]
            of_key[keys] += parts[1]
            of_value[keys] += parts[2]
        return of_key_value

    def of_query(self) -> Tensor:
        """The gradient of the queries, [s/cp, b, n, d], in their type."""
        return self._of_query.to(self._query.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """[s, b, n, d] as [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
