"""Dropout whose mask is derived from a stream instead of drawn from carried state."""

import math
from typing import Any

import torch

from megatron.core.device import fuses_dropout
from megatron.core.tensor_parallel import RandomStream
from megatron.core.tensor_parallel.mappings import apply_function


def dropout(
    hidden_states: torch.Tensor, probability: float, stream: RandomStream, *, training: bool
) -> torch.Tensor:
    """Zero a share of the elements and scale the others up by 1 / (1 - ``probability``).

    Args:
        hidden_states: any shape and layout.
        probability: share of elements to zero.
        stream: decides the mask. Equal streams give equal masks, so it must depend on the rank along an axis
            just where the tensor is split along it, and a layer that the backward runs again repeats its
            mask.
        training: False gives the input back and draws nothing.

    Returns:
        The same shape and layout.
    """
    if not training or probability == 0:
        return hidden_states
    stream.seed_default(hidden_states.device)
    return drop(hidden_states, probability)


def drop(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Zero a share of the elements of ``x`` and scale the others up; any shape and layout.

    The mask is drawn from the default generator of the device. It is all that is kept for the backward, one
    byte an element (Korthikanti et al. 2022, section 4.1).
    """
    if fuses_dropout(x.device):
        return torch.native_dropout(x, probability, True)[0]
    return apply_function(_Drop, x, probability)


class _Drop(torch.autograd.Function):
    """forward: keep a random share, scaled. backward: keep and scale the same elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probability: float) -> torch.Tensor:
        kept = _draw(x.shape, probability, x.device)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / (1 - probability)
        return torch.where(kept, x, 0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return torch.where(kept, grads[0], 0).mul_(ctx.scale), None


def _draw(shape: torch.Size, probability: float, device: torch.device) -> torch.Tensor:
    """True with 1 - ``probability``, to 32 bits; two a random number, twice as fast as ``bernoulli_``."""
    count = math.prod(shape)
    numbers = torch.empty(-(-count // 2), dtype=torch.int64, device=device).random_(-(2**63), None)
    dropped_below = min(round(probability * 2**32) - 2**31, 2**31 - 1)
    return (numbers.view(torch.int32)[:count] >= dropped_below).view(shape)
