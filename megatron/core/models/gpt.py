"""GPT: a causal Transformer that predicts the next token."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.context_parallel import take_local
from megatron.core.models.embedding import LanguageModelEmbedding
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement, facts_of, make_parameter
from megatron.core.tensor_parallel import (
    RandomStream,
    VocabShard,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    linear_cross_entropy,
    vocab_facts,
)
from megatron.core.transformer import AttentionContext, RotaryEmbedding, TransformerBlock

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
"""Name in the whole model of the table that tied models use as their output layer too."""


@dataclass(frozen=True)
class ModelStage:
    """Which part of a model one pipeline stage, or one of its chunks, holds."""

    layers: range
    """Numbers of its layers in the whole model, from 0; there may be none."""
    pre_process: bool
    """Whether it holds the embeddings: the first part."""
    post_process: bool
    """Whether it holds the final norm, the output layer and the loss: the last part."""


class OutputLayer(nn.Module):
    """The matrix that turns hidden states into logits, sharded on the vocabulary over tp."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        parallel: ModelParallel,
        placement: Placement,
        copy_of: str | None = None,
        shared: nn.Parameter | None = None,
    ) -> None:
        """Make or take ``weight`` [v_pad/tp, h].

        Args:
            config: shape of the model.
            parallel: how ranks share the model.
            placement: format and device of the weight.
            copy_of: name of the parameter on another stage that it copies; None for a matrix of its own.
            shared: a parameter on this rank to use instead, which then is tied to no other stage.
        """
        super().__init__()
        padded = config.padded_vocab_size(parallel.tp.size())
        self.shard = VocabShard.of(config.true_vocab_size, padded, parallel.tp)
        if shared is None:
            facts = vocab_facts(
                self.shard,
                config.hidden_size,
                config.init_method_std,
                copy_of=copy_of,
                tied=copy_of is not None,
            )
            shared = make_parameter((self.shard.rows, config.hidden_size), facts, placement)
        else:
            shared.facts = replace(facts_of(shared), tied=False)  # type: ignore[attr-defined]
        self.weight = shared

    def extra_repr(self) -> str:
        """Local and whole size, for ``print(model)``."""
        return f"rows={self.shard.rows} holding {self.shard.valid} of {self.shard.vocab_size} tokens"


class SharedEmbedding(nn.Module):
    """The embedding of another chunk of this rank where it serves as the output matrix.

    It gives the matrix the path, and so the name, that it has in the other chunk.
    """

    def __init__(self, word_embeddings: OutputLayer) -> None:
        """Hold ``word_embeddings``."""
        super().__init__()
        self.word_embeddings = word_embeddings


class GPTModel(nn.Module):
    """One pipeline stage of a GPT (Radford et al. 2019), or a chunk of one, or all of it.

    A tied model on one stage has one matrix for both ends. Over several stages the last one holds a copy,
    whose gradient is to be added to the original's; where both ends are chunks of one stage, they share the
    parameter itself.
    """

    def __init__(
        self,
        config: TransformerConfig,
        stage: ModelStage,
        *,
        parallel: ModelParallel,
        placement: Placement,
        word_embeddings: nn.Parameter | None = None,
    ) -> None:
        """Make the stage's layers, their weights not yet filled (see ``initialize_parameters``).

        Args:
            config: shape of the whole model.
            stage: this stage's part of it.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            word_embeddings: those of a tied model, if another chunk of this rank has them and this one is the
                last part.

        Raises:
            ValueError: if the shape does not divide over the group.
        """
        super().__init__()
        self.group = parallel.tp
        self.cp_group = parallel.cp
        self.sequence_parallel = parallel.sequence_parallel and parallel.tp.size() > 1
        self.label_smoothing = config.label_smoothing
        self.vocab_size = config.true_vocab_size
        self.rotary: RotaryEmbedding | None = None
        if config.position_embedding_type == "rope" and stage.layers:
            self.rotary = RotaryEmbedding.for_heads(
                config.head_dim, config.rotary_percent, config.rotary_base
            )
        tied = not config.untie_embeddings_and_output_weights
        self.embedding: LanguageModelEmbedding | SharedEmbedding | None = None
        if stage.pre_process:
            self.embedding = LanguageModelEmbedding(
                config, parallel=parallel, placement=placement, tied=tied and not stage.post_process
            )
        self.decoder = TransformerBlock(
            config,
            stage.layers,
            parallel=parallel,
            placement=placement,
            causal=True,
            final_norm=stage.post_process,
        )
        self.post_process = stage.post_process
        self.output_layer: OutputLayer | None = None
        if word_embeddings is not None:
            assert tied, "an untied model has nothing to share"
            assert stage.post_process > stage.pre_process, "only the last part has use for it"
            self.embedding = SharedEmbedding(
                OutputLayer(config, parallel=parallel, placement=placement, shared=word_embeddings)
            )
        elif stage.post_process and not (tied and stage.pre_process):
            self.output_layer = OutputLayer(
                config, parallel=parallel, placement=placement, copy_of=WORD_EMBEDDINGS if tied else None
            )

    def forward(
        self,
        *,
        tokens: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        stream: RandomStream,
    ) -> torch.Tensor:
        """Run this stage on one micro-batch.

        Every tensor is replicated over tp, but hidden states under sequence parallelism: [s/cp/tp, b, h],
        sharded on dim 0. All but ``segment_ids`` are of the tokens that this context-parallel rank has, in
        the order of :func:`megatron.core.context_parallel.local_positions`.

        Args:
            tokens: [b, s/cp], read by the first stage alone.
            position_ids: [b, s/cp]; None stands for 0..s-1. All stages take them (rotary positions).
            hidden_states: [s/cp, b, h] from the stage before, read by all stages but the first.
            labels: [b, s/cp], the token that each position is to predict, read by the last stage alone.
            loss_mask: [b, s/cp], what each token's loss counts; None counts all of them once.
            segment_ids: [b, s], of whole sequences, on the CPU at best; tokens see only tokens of an equal
                number. None: one segment.
            stream: of this iteration and micro-batch; dropout derives from it, the same on all stages.

        Returns:
            Before the last stage hidden states [s/cp, b, h]. On the last one with ``labels`` the sum (not the
            mean) of masked token losses of this rank's tokens, a scalar in at least float32; without, logits
            [s/cp, b, v] of the true vocabulary.

        Raises:
            ValueError: if the stage's input is missing, or a sequence is longer than the learned positions,
                or does not divide over the ranks that share it.
        """
        stream = self._own_stream(stream)
        if isinstance(self.embedding, LanguageModelEmbedding):
            if tokens is None:
                raise ValueError("the first stage of a model needs tokens")
            position_ids = self._own_positions(tokens.size(1), position_ids, tokens.device)
            hidden_states = self.embedding(tokens, position_ids, stream)
        elif hidden_states is None:
            raise ValueError("a stage after the first needs the hidden states of the stage before")
        context = self._attention_context(hidden_states, position_ids, segment_ids)
        output: torch.Tensor = self.decoder(hidden_states, context, stream)
        if not self.post_process:
            return output
        if labels is None:
            return self.logits(output)
        return self.loss_sum(output, labels, loss_mask)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scores of every true token: [s, b, h] -> [s, b, v], both replicated; one all-gather over tp.

        Under sequence parallelism from [s/tp, b, h], sharded on dim 0, with one more all-gather.
        """
        weight, _ = self._output_weight()
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, self.group)
        else:
            hidden_states = copy_to_tensor_parallel_region(hidden_states, self.group)
        local = F.linear(hidden_states, weight)  # [s, b, v_pad/tp]
        return gather_from_tensor_parallel_region(local, self.group, -1)[..., : self.vocab_size]

    def loss_sum(
        self, hidden_states: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Sum of masked cross entropies, replicated, without ever holding all logits.

        Args:
            hidden_states: output of the last layer, normalised: [s, b, h] replicated, or [s/tp, b, h] sharded
                on dim 0 under sequence parallelism.
            labels: [b, s].
            loss_mask: [b, s], or None.
        """
        weight, shard = self._output_weight()
        total, _ = linear_cross_entropy(
            hidden_states,
            weight,
            labels.t(),
            self.group,
            shard,
            token_weights=None if loss_mask is None else loss_mask.t(),
            label_smoothing=self.label_smoothing,
            sequence_parallel=self.sequence_parallel,
        )
        return total

    def _output_weight(self) -> tuple[torch.Tensor, VocabShard]:
        """The [v_pad/tp, h] matrix of the output, sharded on dim 0, and which tokens its rows are."""
        if self.output_layer is not None:
            return self.output_layer.weight, self.output_layer.shard
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight, self.embedding.word_embeddings.shard

    def _attention_context(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None,
        segment_ids: torch.Tensor | None,
    ) -> AttentionContext:
        rotary = None
        if self.rotary is not None:
            # Attention sees all of this context-parallel rank's tokens, under sequence parallelism too.
            length = hidden_states.size(0) * (self.group.size() if self.sequence_parallel else 1)
            positions = self._own_positions(length, position_ids, hidden_states.device)
            rotary = self.rotary.angles(length, positions, hidden_states.dtype, hidden_states.device)
        return AttentionContext(rotary, segment_ids)

    def _own_positions(
        self, length: int, position_ids: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """``position_ids``, or those of this context-parallel rank's tokens, [1, s/cp]; None for 0..s-1.

        Args:
            length: s/cp.
            position_ids: as the caller gave them.
            device: where to.
        """
        if position_ids is not None or self.cp_group.size() == 1:
            return position_ids
        whole = torch.arange(length * self.cp_group.size(), device=device)
        return take_local(whole, 0, self.cp_group).unsqueeze(0)

    def _own_stream(self, stream: RandomStream) -> RandomStream:
        """The stream of this rank's part of the sequence: ranks that hold the same part share it."""
        if self.cp_group.size() == 1 and not self.sequence_parallel:
            return stream
        tp_rank = self.group.rank() if self.sequence_parallel else 0
        return stream.fold("sequence shard", self.cp_group.rank(), tp_rank)
