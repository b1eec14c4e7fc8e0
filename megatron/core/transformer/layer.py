"""One Transformer layer, norms before attention and MLP."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream
from megatron.core.transformer.attention import AttentionContext, SelfAttention
from megatron.core.transformer.dropout import dropout
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import recompute, recomputed_modules, recomputed_where_saved


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added.

    Shoeybi et al. 2019, figure 1. Costs two all-reduces of [s, b, h] over the tensor-parallel group in the
    forward and two in the backward (figure 4 there); under sequence parallelism two all-gathers and two
    reduce-scatters in each, and two all-gathers for weight gradients (Korthikanti et al. 2022, section 4.2).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        parallel: ModelParallel,
        placement: Placement,
        causal: bool,
    ) -> None:
        """Make the layer.

        Args:
            config: shape of the model.
            layer_number: number of the layer in the whole model, from 0; dropout depends on it.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            causal: whether a token sees only itself and earlier tokens.
        """
        super().__init__()
        self.layer_number = layer_number
        self.dropout_probability = config.hidden_dropout
        h = config.hidden_size
        self.input_layernorm = build_norm(config, h, parallel=parallel, placement=placement)
        self.self_attention = SelfAttention(config, parallel=parallel, placement=placement, causal=causal)
        self.pre_mlp_layernorm = build_norm(config, h, parallel=parallel, placement=placement)
        self.mlp = MLP(config, parallel=parallel, placement=placement)
        self.recomputed = recomputed_modules(config)

    def forward(
        self, hidden_states: torch.Tensor, context: AttentionContext, stream: RandomStream
    ) -> torch.Tensor:
        """[s, b, h] replicated -> [s, b, h] replicated; [s/tp, b, h] both under sequence parallelism.

        Args:
            hidden_states: the residual stream.
            context: angles and segments, shared by all layers.
            stream: of this micro-batch; the layer's number is folded in here.
        """
        stream = stream.fold("layer", self.layer_number)
        normed = self.input_layernorm(hidden_states)
        with self._saving(self.input_layernorm, hidden_states, normed):
            attended = self.self_attention(normed, context, stream)
        hidden_states = hidden_states + self._drop(attended, stream.fold("attention"))
        normed = self.pre_mlp_layernorm(hidden_states)
        with self._saving(self.pre_mlp_layernorm, hidden_states, normed):
            transformed = recompute(self.mlp, normed) if "mlp" in self.recomputed else self.mlp(normed)
        return hidden_states + self._drop(transformed, stream.fold("mlp"))

    def _saving(self, norm: nn.Module, x: torch.Tensor, normed: torch.Tensor) -> AbstractContextManager[None]:
        """How what runs inside keeps its input ``normed``."""
        if "layernorm" in self.recomputed and torch.is_grad_enabled():
            return recomputed_where_saved(norm, x, normed)
        return nullcontext()

    def _drop(self, branch: torch.Tensor, stream: RandomStream) -> torch.Tensor:
        return dropout(branch, self.dropout_probability, stream, training=self.training)
