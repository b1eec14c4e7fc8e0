"""Dropout whose mask is derived from a stream instead of drawn from carried state."""

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import RandomStream


def dropout(
    hidden_states: torch.Tensor, probability: float, stream: RandomStream, *, training: bool
) -> torch.Tensor:
    """Zero a share of the elements and scale the others up by 1 / (1 - ``probability``).

    Args:
        hidden_states: any shape and layout.
        probability: share of elements to zero.
        stream: decides the mask. Equal streams give equal masks, so for a replicated tensor it must not
            depend on the tensor-parallel rank, and a layer that the backward runs again repeats its mask.
        training: False gives the input back and draws nothing.

    Returns:
        The same shape and layout.
    """
    if not training or probability == 0:
        return hidden_states
    stream.seed_default(hidden_states.device)
    return F.dropout(hidden_states, probability)
