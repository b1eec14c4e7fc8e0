"""What an entry script hands to the training loop.

The loop knows batches, named losses and stages of a model; it knows nothing of GPT or BERT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream
from megatron.core.tokenizers import Tokenizer
from megatron.training.config import RunConfig

Batch = Mapping[str, Tensor]
"""One micro-batch, by name; the first dim of every tensor counts samples."""


@dataclass(frozen=True)
class Stage:
    """The part of a model that one pipeline stage holds."""

    layers: range
    """Global numbers of its layers, from 0."""
    first: bool
    """Whether it holds the embeddings."""
    last: bool
    """Whether it holds the output layer and the losses."""


@dataclass(frozen=True)
class SplitDatasets:
    """The datasets of a run; None where a split is empty or not asked for."""

    train: Dataset[dict[str, Tensor]] | None
    valid: Dataset[dict[str, Tensor]] | None
    test: Dataset[dict[str, Tensor]] | None
    description: Sequence[str] = ()
    """Lines about documents, tokens and epochs, for the log."""
    valid_sets: Sequence[tuple[str, Dataset[dict[str, Tensor]]]] = ()
    """With --multiple-validation-sets, in place of ``valid``: each dataset with its name."""
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """What the order of training samples depends on, by name: plain values that are equal on resume."""
    laid_out: Mapping[str, str] = field(default_factory=dict)
    """What of each training dataset is shuffled together, which the length of a run decides."""


class Task(Protocol):
    """One kind of pretraining: how to build a model, its data, and its losses."""

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses in the order in which :meth:`forward` gives them, such as ``("lm loss",)``."""

    @property
    def host_tensors(self) -> frozenset[str]:
        """Names in a batch that stay in the host's memory, since the host decides by them what to launch."""

    def build_model(
        self,
        config: RunConfig,
        stage: Stage,
        parallel: ModelParallel,
        placement: Placement,
        others: Sequence[nn.Module],
    ) -> nn.Module:
        """The uninitialised part of the model that ``stage`` holds.

        Args:
            config: the settings of the run.
            stage: which part of the model.
            parallel: how ranks share it.
            placement: format and device of the parameters.
            others: the parts that this rank holds already, which come earlier in the model: a tied output
                layer shares the embeddings of one of them.
        """

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer | None, samples: tuple[int, int | None, int]
    ) -> SplitDatasets:
        """Datasets of at least so many samples for training, validation and test.

        None stands for every sample once, and 0 for no dataset.
        """

    def reads_data(self, config: RunConfig, stage: Stage) -> bool:
        """Whether :meth:`forward` on ``stage`` looks at the batch at all."""

    def own_tokens(self, batch: Batch, cp_group: ProcessGroup) -> Batch:
        """What this rank of a context-parallel group works on of a micro-batch of whole sequences."""

    def loss_counts(self, batch: Batch) -> Tensor:
        """How many items each loss of a micro-batch is summed over: float64 [number of losses]."""

    def forward(
        self, model: nn.Module, batch: Batch | None, hidden_states: Tensor | None, stream: RandomStream
    ) -> Tensor:
        """One micro-batch through one stage.

        Args:
            model: what :meth:`build_model` gave.
            batch: the micro-batch, or None where :meth:`reads_data` is False.
            hidden_states: [s, b, h] from the stage before, or None on the first stage.
            stream: where this micro-batch's dropout draws from.

        Returns:
            [s, b, h] for the next stage; on the last stage the loss sums, [number of losses].
        """


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """The number format that a run computes in."""
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32
