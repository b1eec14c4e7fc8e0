"""Full activation recomputation: keep a unit's input, run its layers again in the backward pass.

Narayanan et al. 2021, section 3.5. A unit's forward is repeated with its collectives. No generator state is
kept for it: dropout streams are derived, so that a layer which runs again draws the same masks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.config import TransformerConfig


def recompute_units(config: TransformerConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Cut a stage's layers into consecutive units, each with whether it is recomputed.

    Args:
        config: its ``recompute_*`` fields decide. ``uniform`` cuts units of ``recompute_num_layers`` layers
            (1 if not given; the last unit may be shorter) and recomputes all of them, ``block`` recomputes
            the first ``recompute_num_layers`` layers, each by itself, and keeps the others' activations.
        num_layers: layers of the stage.

    Returns:
        (positions within the stage, recomputed) for each unit, in order; every layer is in exactly one.

    Raises:
        ValueError: if full recomputation is asked for without a method.
    """
    if config.recompute_granularity is None:
        return [(range(num_layers), False)]
    count = 1 if config.recompute_num_layers is None else config.recompute_num_layers
    if config.recompute_method == "uniform":
        starts = range(0, num_layers, count)
        return [(range(start, min(start + count, num_layers)), True) for start in starts]
    if config.recompute_method == "block":
        kept_from = min(count, num_layers)
        units = [(range(layer, layer + 1), True) for layer in range(kept_from)]
        return [*units, (range(kept_from, num_layers), False)]
    raise ValueError("--recompute-granularity full needs --recompute-method uniform or block")


def run_layers(
    layers: Sequence[nn.Module],
    units: list[tuple[range, bool]],
    hidden_states: torch.Tensor,
    *layer_args: Any,
) -> torch.Tensor:
    """Send [s, b, h] (replicated) through all ``layers``, keeping no activations inside recomputed units.

    Args:
        layers: called as ``layer(hidden_states, *layer_args)``.
        units: from :func:`recompute_units`. Without gradients nothing is kept anyway and they don't matter.
        hidden_states: input of the first layer.
        layer_args: passed to every layer.
    """
    for positions, recomputed in units:
        unit = _chain([layers[position] for position in positions])
        if recomputed and torch.is_grad_enabled():
            hidden_states = checkpoint(
                unit, hidden_states, *layer_args, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden_states = unit(hidden_states, *layer_args)
    return hidden_states


def _chain(layers: Sequence[nn.Module]) -> Callable[..., torch.Tensor]:
    def run(hidden_states: torch.Tensor, *layer_args: Any) -> torch.Tensor:
        for layer in layers:
            hidden_states = layer(hidden_states, *layer_args)
        return hidden_states

    return run
