"""Small models, whole on one rank, for the tests of this folder and of the distributed ones."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config import TransformerConfig
from megatron.core.models import GPTModel, ModelStage
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement, named_parameters
from megatron.core.tensor_parallel import RandomStream, initialize_parameters

FLOAT64 = Placement(torch.float64, torch.device("cpu"))
FLOAT32 = Placement(torch.float32, torch.device("cpu"))
STREAM = RandomStream.root(7)

_SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 9,
    "vocab_size": 53,
    "make_vocab_size_divisible_by": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def gpt2_shape(**changes: Any) -> TransformerConfig:
    """Learned positions, LayerNorm, GELU, biases, one matrix for both ends."""
    return TransformerConfig(**{**_SMALL, "max_position_embeddings": 12, **changes})


def llama_shape(**changes: Any) -> TransformerConfig:
    """RoPE, RMSNorm, SwiGLU, no biases, grouped queries, a separate output layer."""
    llama = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 40,
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    }
    return TransformerConfig(**{**_SMALL, **llama, **changes})


def one_rank_group() -> dist.ProcessGroup:
    """A group of this process alone, whatever other groups it is in."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=10))


def over(
    tp: dist.ProcessGroup | None = None, cp: dist.ProcessGroup | None = None, **options: Any
) -> ModelParallel:
    """A layout over these groups; what is not given is this process alone."""
    return ModelParallel(tp or one_rank_group(), cp or one_rank_group(), **options)


def whole_stage(config: TransformerConfig) -> ModelStage:
    return ModelStage(range(config.num_layers), pre_process=True, post_process=True)


def build(
    config: TransformerConfig,
    placement: Placement = FLOAT64,
    stage: ModelStage | None = None,
    parallel: ModelParallel | None = None,
    word_embeddings: torch.nn.Parameter | None = None,
) -> GPTModel:
    """A model filled from seed 5, its biases and norms moved off zero and one (the same in every layout)."""
    parallel = over() if parallel is None else parallel
    model = GPTModel(
        config,
        stage or whole_stage(config),
        parallel=parallel,
        placement=placement,
        word_embeddings=word_embeddings,
    )
    initialize_parameters(model, seed=5)
    with torch.no_grad():
        for named in named_parameters(model):
            if named.facts.init_std is None:
                whole = torch.empty(named.facts.global_shape, dtype=torch.float64)
                whole.normal_(0, 0.3, generator=RandomStream.root(3).fold(named.name).generator())
                for piece in named.facts.pieces:
                    local = named.parameter.narrow(0, piece.local, piece.length)
                    local += whole.narrow(0, piece.start, piece.length).to(local.dtype)
            else:
                named.parameter.mul_(4)  # 0.02 leaves attention almost uniform, which hides errors
    return model


def batch(config: TransformerConfig, size: int = 3) -> dict[str, torch.Tensor]:
    """Tokens, labels and a mask that leaves some tokens out."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, config.seq_length)
    tokens = torch.randint(config.true_vocab_size, shape, generator=generator)
    labels = torch.randint(config.true_vocab_size, shape, generator=generator)
    loss_mask = (torch.rand(shape, generator=generator) < 0.7).float()
    return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


def true_weights(model: GPTModel) -> dict[str, torch.Tensor]:
    """Whole-model tensors without padding, copied, that require gradients; of a model on one rank."""
    return {
        named.name: named.parameter.detach()[: named.facts.global_shape[0]].double().clone().requires_grad_()
        for named in named_parameters(model)
    }
