"""The layers of one pipeline stage."""

import torch
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement
from megatron.core.tensor_parallel import RandomStream
from megatron.core.transformer.attention import AttentionContext
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.recompute import divides_saved_inputs_over, recompute_units, run_layers


class TransformerBlock(nn.Module):
    """A run of layers, possibly none, and on the last stage the final norm.

    ``layers`` is keyed by each layer's number in the whole model, so that a parameter's path is its name
    there.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layers: range,
        *,
        parallel: ModelParallel,
        placement: Placement,
        causal: bool,
        final_norm: bool,
    ) -> None:
        """Make the layers.

        Args:
            config: shape of the whole model.
            layers: numbers of this stage's layers in the whole model, from 0.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            causal: whether a token sees only itself and earlier tokens.
            final_norm: normalise the output of the last layer.

        Raises:
            ValueError: if the shape does not divide over the group, or recomputation lacks a method.
        """
        super().__init__()
        assert 0 <= layers.start <= layers.stop <= config.num_layers, (
            f"{layers} of {config.num_layers} layers"
        )
        self.units = recompute_units(config, len(layers))
        self.inputs_divided_over = divides_saved_inputs_over(config, parallel)
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(
                    config, number, parallel=parallel, placement=placement, causal=causal
                )
                for number in layers
            }
        )
        self.final_layernorm: nn.Module | None = None
        if final_norm:
            self.final_layernorm = build_norm(
                config, config.hidden_size, parallel=parallel, placement=placement
            )

    def forward(
        self, hidden_states: torch.Tensor, context: AttentionContext, stream: RandomStream
    ) -> torch.Tensor:
        """[s, b, h] replicated -> [s, b, h] replicated; [s/tp, b, h] both under sequence parallelism.

        Args:
            hidden_states: output of the embedding or of the stage before.
            context: angles and segments, shared by all layers.
            stream: of this micro-batch.
        """
        layers = list(self.layers.values())
        hidden_states = run_layers(
            layers, self.units, hidden_states, context, stream, divided_over=self.inputs_divided_over
        )
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states
