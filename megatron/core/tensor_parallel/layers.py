"""Linear layers and the embedding, each split over a tensor-parallel group.

A layer takes the group that it is split over; a group of one rank takes the same path. Weights are made
uninitialised: :func:`megatron.core.tensor_parallel.init.initialize_parameters` fills a whole model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.parameter import ParameterFacts, Piece, Placement, make_parameter, replicated_facts
from megatron.core.tensor_parallel.linear import column_parallel_linear, row_parallel_linear
from megatron.core.tensor_parallel.mappings import (
    apply_function,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.vocab_shard import VocabShard
from megatron.core.weight_gradients import DeferredGradients


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split: each rank has some rows of the weight.

    Args:
        input_size: i, the size of the input's last dim.
        output_size: o, the size of the whole output.
        group: the tensor-parallel group.
        sequence_parallel: whether the input is split along the sequence instead of replicated.
        placement: number format and device of the parameters.
        init_std: standard deviation of the weight's normal initial values.
        bias: whether to add a bias; it starts at zero and takes no weight decay.
        pieces: which rows of the whole weight this rank has. By default rank r has the r-th of tp equal runs.
            Ranks may have rows in common; then only one of them has the rows as primary.

    Raises:
        ValueError: if no pieces are given and the output does not divide by the group's size.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        sequence_parallel: bool = False,
        placement: Placement,
        init_std: float,
        bias: bool = True,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.deferred: DeferredGradients | None = None
        own = _equal_run(output_size, group, "output") if pieces is None else tuple(pieces)
        rows = sum(piece.length for piece in own)
        facts = ParameterFacts(global_shape=(output_size, input_size), dim=0, pieces=own, init_std=init_std)
        self.weight = make_parameter((rows, input_size), facts, placement)
        self.bias: nn.Parameter | None = None
        if bias:
            facts = replace(facts, global_shape=(output_size,), init_std=None, weight_decay=False)
            self.bias = make_parameter((rows,), facts, placement)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i] replicated -> [s, b, o/tp] sharded on the last dim.

        The gradient of ``x`` is all-reduced while the weight's is computed. Under sequence parallelism ``x``
        is [s/tp, b, i], sharded on dim 0: see :func:`column_parallel_linear`.
        """
        return column_parallel_linear(
            x,
            self.weight,
            self.bias,
            self.group,
            sequence_parallel=self.sequence_parallel,
            deferred=self.deferred,
        )

    def extra_repr(self) -> str:
        """Local and whole size, and this rank's place."""
        return (
            f"in={self.input_size}, out={self.weight.shape[0]} of {self.output_size}, "
            f"bias={self.bias is not None}, tp rank {self.group.rank()} of {self.group.size()}"
        )


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split: each rank has some columns of the weight.

    Args:
        input_size: i, the size of the whole input's last dim.
        output_size: o, the size of the output.
        group: the tensor-parallel group.
        sequence_parallel: whether the output is split along the sequence instead of replicated.
        placement: number format and device of the parameters.
        init_std: standard deviation of the weight's normal initial values.
        bias: whether to add a bias, which every rank holds whole; it starts at zero, without weight decay.

    Raises:
        ValueError: if the input does not divide by the group's size.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        sequence_parallel: bool = False,
        placement: Placement,
        init_std: float,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.deferred: DeferredGradients | None = None
        own = _equal_run(input_size, group, "input")
        facts = ParameterFacts(global_shape=(output_size, input_size), dim=1, pieces=own, init_std=init_std)
        self.weight = make_parameter((output_size, own[0].length), facts, placement)
        self.bias: nn.Parameter | None = None
        if bias:
            facts = replicated_facts(
                (output_size,), group.rank(), partial_over_tp=sequence_parallel and group.size() > 1
            )
            self.bias = make_parameter((output_size,), facts, placement)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, i/tp] sharded on the last dim -> [s, b, o] replicated: one all-reduce, then the bias.

        Under sequence parallelism a reduce-scatter, and [s/tp, b, o] sharded on dim 0.

        Raises:
            ValueError: if a sequence that is to be split does not divide over the group.
        """
        return row_parallel_linear(
            x,
            self.weight,
            self.bias,
            self.group,
            sequence_parallel=self.sequence_parallel,
            deferred=self.deferred,
        )

    def extra_repr(self) -> str:
        """Local and whole size, and this rank's place."""
        return (
            f"in={self.weight.shape[1]} of {self.input_size}, out={self.output_size}, "
            f"bias={self.bias is not None}, tp rank {self.group.rank()} of {self.group.size()}"
        )


class VocabParallelEmbedding(nn.Module):
    """A table of token embeddings, split by rows over the vocabulary.

    The vocabulary is padded so that it divides; rank r has the r-th of tp equal runs of the padded rows. Rows
    of padding start at zero, receive no gradient, and stay zero.

    Args:
        vocab_size: v, number of true tokens.
        padded_vocab_size: v_pad, a multiple of the group's size.
        hidden_size: h.
        group: the tensor-parallel group.
        sequence_parallel: whether the output is split along the sequence instead of replicated.
        placement: number format and device of the weight.
        init_std: standard deviation of the normal initial values.
        tied: whether another stage holds the table too.

    Raises:
        ValueError: if the padded vocabulary does not divide by the group's size or is below the true one.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        group: ProcessGroup,
        sequence_parallel: bool = False,
        placement: Placement,
        init_std: float,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.shard = VocabShard.of(vocab_size, padded_vocab_size, group)
        facts = vocab_facts(self.shard, hidden_size, init_std, tied=tied)
        self.weight = make_parameter((self.shard.rows, hidden_size), facts, placement)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [s, b] -> [s, b, h], both replicated: one all-reduce. The weight's gradient stays local.

        Under sequence parallelism a reduce-scatter, and [s/tp, b, h] sharded on dim 0.

        Raises:
            RuntimeError: if a token is not in the vocabulary (on a GPU, at its next synchronisation).
            ValueError: if a sequence that is to be split does not divide over the group.
        """
        self.shard.check(tokens, "token")
        output = apply_function(_Lookup, self.weight, tokens, self.shard)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(output, self.group)
        return reduce_from_tensor_parallel_region(output, self.group)

    def extra_repr(self) -> str:
        """Local and whole size, and this rank's place."""
        return (
            f"rows={self.shard.rows} of {self.padded_vocab_size} ({self.vocab_size} true), "
            f"h={self.hidden_size}, tp rank {self.group.rank()} of {self.group.size()}"
        )


def defer_weight_gradients(model: nn.Module, deferred: DeferredGradients | None) -> None:
    """Let every linear layer of ``model`` hand its weight's gradient to ``deferred`` while that is deferring.

    Gradients of biases, norms and embeddings are cheap and formed at once; that of the output layer is
    formed in the forward (:func:`~megatron.core.tensor_parallel.linear_cross_entropy`). None ends it.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.deferred = deferred


def vocab_facts(
    shard: VocabShard, hidden_size: int, init_std: float, *, copy_of: str | None = None, tied: bool = False
) -> ParameterFacts:
    """Facts of a [v_pad/tp, h] table, as the embedding and the output layer have it.

    Args:
        shard: this rank's rows.
        hidden_size: h.
        init_std: standard deviation of the normal initial values.
        copy_of: the name of the parameter on another stage that this one is a copy of.
        tied: whether another stage holds the table too.
    """
    pieces = (Piece(0, shard.first, shard.valid),) if shard.valid else ()
    return ParameterFacts(
        global_shape=(shard.vocab_size, hidden_size),
        dim=0,
        pieces=pieces,
        init_std=init_std,
        copy_of=copy_of,
        tied=tied,
    )


class _Lookup(torch.autograd.Function):
    """Rows of a table. forward: local lookup, zero for other ranks' tokens. backward: local sum by token.

    A frequent token's gradients are summed in float32 even where the table is in bfloat16: there a running
    sum would lose what is 256 times smaller than itself.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, shard: VocabShard) -> Tensor:
        ids, mine = shard.local(tokens)
        ctx.save_for_backward(ids, mine)
        ctx.shape = weight.shape
        output = F.embedding(ids, weight)
        return output if mine is None else output.masked_fill_(~mine[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ids, mine = ctx.saved_tensors
        if mine is not None:
            gradient = gradient * mine[..., None]
        used, position = torch.unique(ids, return_inverse=True)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        rows = gradient.new_zeros((used.numel(), ctx.shape[1]), dtype=wide)
        rows.index_add_(0, position.flatten(), gradient.reshape(-1, ctx.shape[1]).to(wide))
        grad_weight = gradient.new_zeros(ctx.shape)
        grad_weight[used] = rows.to(gradient.dtype)
        return grad_weight, None, None


def _equal_run(size: int, group: ProcessGroup, what: str) -> tuple[Piece, ...]:
    """The single piece of a rank where ``size`` is split into equal runs."""
    if size % group.size():
        raise ValueError(
            f"a linear layer's {what} size {size} does not divide by the tensor-parallel size {group.size()} "
            "(--tensor-model-parallel-size)"
        )
    length = size // group.size()
    return (Piece(0, group.rank() * length, length),)
