"""What a stack of layers keeps for its backward pass, measured with hooks on saved tensors."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.core.transformer import AttentionContext, RotaryEmbedding, TransformerBlock

BF16 = Placement(torch.bfloat16, torch.device("cpu"))
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "seq_length": 64}
"""h, a and s of the models that are measured; of a token's 34 h bytes, statistics of norms are 0.2%."""
MICRO_BATCH = 2


def measured_shape(num_layers: int, **changes: Any) -> TransformerConfig:
    """What table 2 of Korthikanti et al. 2022 is for: dropout, GELU, attention in plain steps."""
    table = {"attention_backend": "unfused", "attention_dropout": 0.1, "hidden_dropout": 0.1}
    return TransformerConfig(**{**SIZES, **table, "num_layers": num_layers, **changes})


def bytes_per_layer(parallel: ModelParallel, **changes: Any) -> int:
    """Bytes that one more layer keeps: of a third layer, so that what all layers share cancels out."""
    return _kept_bytes(parallel, 3, changes) - _kept_bytes(parallel, 2, changes)


def _kept_bytes(parallel: ModelParallel, num_layers: int, changes: dict[str, Any]) -> int:
    config = measured_shape(num_layers, **changes)
    block = TransformerBlock(
        config, range(num_layers), parallel=parallel, placement=BF16, causal=True, final_norm=False
    )
    initialize_parameters(block, seed=0)
    s = config.seq_length // (parallel.tp.size() if parallel.sequence_parallel else 1)
    hidden = torch.randn(s, MICRO_BATCH, config.hidden_size).to(BF16.dtype).requires_grad_()
    rotary = None
    if config.position_embedding_type == "rope":
        embedding = RotaryEmbedding.for_heads(config.head_dim, 1.0, 1e4)
        rotary = embedding.angles(config.seq_length, None, BF16.dtype, BF16.device)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(hidden, AttentionContext(rotary), RandomStream.root(1))
    for parameter in block.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    output.backward(torch.ones_like(output))  # what was kept must do
    assert all(parameter.grad is not None for parameter in block.parameters())
    return measured
