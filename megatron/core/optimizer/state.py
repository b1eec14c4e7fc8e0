"""What of an optimizer goes into a checkpoint: flat runs of parameters' elements, and where they belong."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.checkpoint import ShardedTensor, sharded_slice
from megatron.core.parameter import NamedParameter


@dataclass(frozen=True)
class StatePart:
    """The run of a tensor like a parameter (its main weight, a moment) that this rank updates."""

    named: NamedParameter
    values: torch.Tensor
    """[k], a view of the optimizer's storage."""
    start: int
    """Index of its first element in the parameter's flattened local tensor."""

    def sharded(self, name: str, *, primary_only: bool) -> ShardedTensor:
        """The run as a part of the whole model's tensor ``name``, backed by views of ``values``.

        Args:
            name: in the checkpoint.
            primary_only: True to save, False to load.
        """
        return sharded_slice(
            name,
            self.values,
            self.named.facts,
            self.named.parameter.shape,
            self.start,
            primary_only=primary_only,
        )


def sharded_states(
    states: Mapping[str, Sequence[StatePart]], prefix: str, *, primary_only: bool
) -> list[ShardedTensor]:
    """All of an optimizer's tensors as parts of the whole model's, to save or to load into.

    Ranks that update disjoint slices all save theirs; of ranks that update the same, one alone does
    (:func:`megatron.core.checkpoint.share_among_replicas`).

    Args:
        states: what :meth:`Optimizer.state_tensors` gives, or some of it.
        prefix: what a name in the checkpoint begins with; then come the kind of state, a dot, and the
            parameter's name.
        primary_only: True to save, False to load.
    """
    return [
        part.sharded(f"{prefix}{kind}.{part.named.name}", primary_only=primary_only)
        for kind, parts in states.items()
        for part in parts
    ]
