"""From tokens to the first hidden states."""

import torch
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement, make_parameter, replicated_facts
from megatron.core.tensor_parallel import RandomStream, VocabParallelEmbedding
from megatron.core.transformer import dropout


class PositionEmbedding(nn.Module):
    """A learned vector for each position, replicated over tp."""

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
        shape = (num_positions, hidden_size)
        self.weight = make_parameter(
            shape, replicated_facts(shape, parallel.tp.rank(), init_std=init_std), placement
        )

    def forward(self, seq_length: int, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Vectors of ``position_ids`` [b, s], or of 0..s-1 without: [s, b or 1, h], replicated.

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
            return self.weight[:seq_length].unsqueeze(1)
        return nn.functional.embedding(position_ids.t(), self.weight)

    def extra_repr(self) -> str:
        """Positions and width, for ``print(model)``."""
        return f"{self.weight.size(0)}, {self.weight.size(1)}"


class LanguageModelEmbedding(nn.Module):
    """Word embeddings, plus learned positions where the model has them, then dropout."""

    def __init__(self, config: TransformerConfig, *, parallel: ModelParallel, placement: Placement) -> None:
        """Make the tables.

        Args:
            config: shape of the model.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
        """
        super().__init__()
        self.dropout_probability = config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.true_vocab_size,
            config.padded_vocab_size(parallel.tp.size()),
            config.hidden_size,
            group=parallel.tp,
            sequence_parallel=parallel.sequence_parallel,
            placement=placement,
            init_std=config.init_method_std,
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
        """Tokens [b, s] -> [s, b, h], both replicated; one all-reduce over tp.

        Args:
            tokens: ids of the true vocabulary.
            position_ids: [b, s], replicated; None stands for 0..s-1.
            stream: of this micro-batch; its dropout is the same on all tensor-parallel ranks.
        """
        # Looked up in [s, b] order, the output needs no transposition.
        hidden_states: torch.Tensor = self.word_embeddings(tokens.t())  # [s, b, h]
        if self.position_embeddings is not None:
            hidden_states = hidden_states + self.position_embeddings(tokens.size(1), position_ids)
        return dropout(
            hidden_states, self.dropout_probability, stream.fold("embedding"), training=self.training
        )
