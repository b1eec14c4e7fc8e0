#!/usr/bin/env python3
"""Pretrain a GPT-style language model.

    python pretrain_gpt.py --num-layers 2 ...                                  # one rank
    torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8 ...
    srun --ntasks-per-node 8 python pretrain_gpt.py ...

``--help`` lists every flag.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.context_parallel import take_local
from megatron.core.models import GPTModel, ModelStage
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import RunConfig
from megatron.training.gpt_data import gpt_datasets
from megatron.training.task import Batch, SplitDatasets, Stage
from megatron.training.training import main


class GPTTask:
    """Next-token prediction over documents packed one after the other."""

    loss_names = ("lm loss",)
    host_tensors = frozenset({"segment_ids"})

    def build_model(
        self,
        config: RunConfig,
        stage: Stage,
        parallel: ModelParallel,
        placement: Placement,
        others: Sequence[nn.Module],
    ) -> nn.Module:
        """The layers of ``stage``, with embeddings on the first and output layer on the last."""
        part = ModelStage(stage.layers, pre_process=stage.first, post_process=stage.last)
        embeddings = [other.embedding for other in others if isinstance(other, GPTModel) and other.embedding]
        shares = stage.last and not config.model.untie_embeddings_and_output_weights
        shared = embeddings[0].word_embeddings.weight if embeddings and shares else None
        return GPTModel(config.model, part, parallel=parallel, placement=placement, word_embeddings=shared)

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer | None, samples: tuple[int, int | None, int]
    ) -> SplitDatasets:
        """Samples of ``seq_length`` tokens from ``.bin``/``.idx`` files or made-up ones."""
        splits = gpt_datasets(config, tokenizer, samples)
        return SplitDatasets(
            splits.train,
            splits.valid,
            splits.test,
            splits.description,
            valid_sets=splits.valid_sets,
            fingerprint=splits.fingerprint,
            laid_out=splits.laid_out,
        )

    def reads_data(self, config: RunConfig, stage: Stage) -> bool:
        """First stage: tokens; last: labels; every stage where attention or positions restart."""
        restarts = config.data.reset_attention_mask or config.data.reset_position_ids
        return stage.first or stage.last or restarts

    def own_tokens(self, batch: Batch, cp_group: ProcessGroup) -> Batch:
        """This rank's tokens of every sequence; the segments of all of it, since attention looks at all."""
        return {
            name: tensor if name == "segment_ids" else take_local(tensor, 1, cp_group)
            for name, tensor in batch.items()
        }

    def loss_counts(self, batch: Batch) -> Tensor:
        """Tokens that count: float64 [1]."""
        return batch["loss_mask"].sum(dtype=torch.float64).reshape(1)

    def forward(
        self, model: nn.Module, batch: Batch | None, hidden_states: Tensor | None, stream: RandomStream
    ) -> Tensor:
        """Hidden states [s, b, h] for the next stage, or the sum of token losses [1]."""
        part = batch or {}
        output = model(
            tokens=part.get("tokens"),
            position_ids=part.get("position_ids"),
            labels=part.get("labels"),
            loss_mask=part.get("loss_mask"),
            segment_ids=part.get("segment_ids"),
            hidden_states=hidden_states,
            stream=stream,
        )
        assert isinstance(output, Tensor)
        return output.reshape(1) if output.dim() == 0 else output


if __name__ == "__main__":
    main(GPTTask(), "Pretrain a GPT-style language model.")
