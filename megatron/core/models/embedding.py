"""From tokens to the first hidden states."""

import torch
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement, make_parameter, replicated_facts
from megatron.core.tensor_parallel import RandomStream, VocabParallelEmbedding
from megatron.core.transformer import dropout


class PositionEmbedding(nn.Module):
    """A learned vector for each position, replicated over tp and cp."""

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        parallel: ModelParallel,
        placement: Placement,
        init_std: float,
    ) -> None:
        """Make ``weight`` [num_positions, h].

        Args:
            num_positions: rows of the table.
            hidden_size: h.
            parallel: how ranks share the model.
            placement: format and device of the weight.
            init_std: standard deviation of its initial values.
        """
        super().__init__()
        self.parallel = parallel
        shape = (num_positions, hidden_size)
        facts = replicated_facts(
            shape,
            parallel.tp.rank(),
            init_std=init_std,
            partial_over_tp=parallel.sequence_parallel and parallel.tp.size() > 1,
        )
        self.weight = make_parameter(shape, facts, placement)

    def forward(self, seq_length: int, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Look positions up.

        Args:
            seq_length: s, of the whole sequence.
            position_ids: [b or 1, s/cp], of the tokens of this context-parallel rank, replicated over tp.
                None stands for 0..s-1, where cp is 1.

        Returns:
            [s/cp, b or 1, h], replicated over tp; under sequence parallelism [s/cp/tp, b or 1, h], sharded on
            dim 0.

        Raises:
            ValueError: if the sequence is longer than the table.
        """
        rows = self.weight.size(0)
        if seq_length > rows:
            raise ValueError(
                f"a sequence of {seq_length} tokens is longer than the table of learned positions: "
                f"--max-position-embeddings {rows}"
            )
        if position_ids is None:
            return self.weight[self._own_run(seq_length)].unsqueeze(1)
        own = self._own_run(position_ids.size(1))
        return nn.functional.embedding(position_ids[:, own].t(), self.weight)

    def _own_run(self, length: int) -> slice:
        """Which of the tokens of this context-parallel rank this tensor-parallel rank has."""
        if not self.parallel.sequence_parallel:
            return slice(length)
        size = length // self.parallel.tp.size()
        return slice(self.parallel.tp.rank() * size, (self.parallel.tp.rank() + 1) * size)

    def extra_repr(self) -> str:
        """Positions and width, for ``print(model)``."""
        return f"{self.weight.size(0)}, {self.weight.size(1)}"


class LanguageModelEmbedding(nn.Module):
    """Word embeddings, plus learned positions where the model has them, then dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        parallel: ModelParallel,
        placement: Placement,
        tied: bool = False,
    ) -> None:
        """Make the tables.

        Args:
            config: shape of the model.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            tied: whether another stage holds a copy of the word embeddings.
        """
        super().__init__()
        self.cp_size = parallel.cp.size()
        self.dropout_probability = config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.true_vocab_size,
            config.padded_vocab_size(parallel.tp.size()),
            config.hidden_size,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std,
            tied=tied,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                config.num_positions,
                config.hidden_size,
                parallel=parallel,
                placement=placement,
                init_std=config.init_method_std,
            )

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor | None, stream: RandomStream
    ) -> torch.Tensor:
        """Tokens [b, s/cp] -> [s/cp, b, h], both replicated over tp; one all-reduce over tp.

        Under sequence parallelism a reduce-scatter, and [s/cp/tp, b, h] sharded on dim 0.

        Args:
            tokens: ids of the true vocabulary.
            position_ids: [b or 1, s/cp], replicated over tp; None stands for 0..s-1, where cp is 1.
            stream: of this micro-batch and this rank's part of the sequence.
        """
        # Looked up in [s, b] order, the output needs no transposition.
        hidden_states: torch.Tensor = self.word_embeddings(tokens.t())  # [s/cp, b, h], or [s/cp/tp, b, h]
        if self.position_embeddings is not None:
            hidden_states = hidden_states + self.position_embeddings(
                tokens.size(1) * self.cp_size, position_ids
            )
        return dropout(
            hidden_states, self.dropout_probability, stream.fold("embedding"), training=self.training
        )
