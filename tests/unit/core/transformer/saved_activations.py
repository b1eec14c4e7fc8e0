"""What a stack of layers keeps for its backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def saved_bytes_per_layer(parallel: ModelParallel, **changes: Any) -> int:
    """Bytes of distinct storages that autograd saves for one more layer, by hooks on saved tensors.

    Parameters don't count, nor does what all layers share.
    """
    one, two = (_saved_bytes(measured_shape(layers, **changes), parallel) for layers in (1, 2))
    return two - one


def live_bytes_per_layer(parallel: ModelParallel, **changes: Any) -> int:
    """Bytes that one more layer leaves alive between forward and backward, whoever holds them."""
    one, two = (_live_bytes(measured_shape(layers, **changes), parallel) for layers in (1, 2))
    return two - one


def stack(
    config: TransformerConfig, parallel: ModelParallel
) -> tuple[TransformerBlock, Callable[[], torch.Tensor]]:
    """Some layers, and their forward on an input that the function keeps."""
    layers = range(config.num_layers)
    block = TransformerBlock(config, layers, parallel=parallel, placement=BF16, causal=True, final_norm=False)
    initialize_parameters(block, seed=0)
    s = config.seq_length // (parallel.tp.size() if parallel.sequence_parallel else 1)
    hidden = torch.randn(s, MICRO_BATCH, config.hidden_size).to(BF16.dtype).requires_grad_()
    rotary = None
    if config.position_embedding_type == "rope":
        embedding = RotaryEmbedding.for_heads(config.head_dim, 1.0, 10000)
        rotary = embedding.angles(config.seq_length, None, BF16.dtype, BF16.device)
    return block, lambda: block(hidden, AttentionContext(rotary), RandomStream.root(1))


def _saved_bytes(config: TransformerConfig, parallel: ModelParallel) -> int:
    block, forward = stack(config, parallel)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    for parameter in block.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    _backward(block, output)
    return sum(saved.values())


class _Allocations(TorchDispatchMode):
    """Remembers, without keeping it alive, every storage that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


def _live_bytes(config: TransformerConfig, parallel: ModelParallel) -> int:
    block, forward = stack(config, parallel)
    with _Allocations() as allocations:
        output = forward()
    for parameter in block.parameters():
        allocations.made.pop(parameter.untyped_storage()._cdata, None)
    live = sum(size for storage, size in allocations.made.values() if not storage.expired())
    _backward(block, output)
    return live


def _backward(block: TransformerBlock, output: torch.Tensor) -> None:
    """What was kept must do."""
    output.backward(torch.ones_like(output))
    assert all(parameter.grad is not None for parameter in block.parameters())
