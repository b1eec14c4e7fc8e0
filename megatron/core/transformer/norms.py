"""Layer norm and root-mean-square norm over the last dim."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import TransformerConfig
from megatron.core.extensions import LayerNormFunction
from megatron.core.parallel_state import ModelParallel
from megatron.core.parameter import Placement, facts_of, make_parameter, replicated_facts


class Norm(nn.Module):
    """What both norms have: a weight over the last dim, replicated over tp, and an epsilon."""

    def __init__(
        self,
        size: int,
        *,
        epsilon: float,
        parallel: ModelParallel,
        placement: Placement,
        over_local_heads: bool = False,
    ) -> None:
        """Make ``weight`` [size], one at first, replicated over tp.

        Args:
            size: width of the last dim.
            epsilon: added to the mean square under the root.
            parallel: how ranks share the model.
            placement: format and device of the parameters.
            over_local_heads: the input is sharded over tp on the heads, as without it only under sequence
                parallelism (on the sequence). Where it is sharded, the gradients are partial.
        """
        super().__init__()
        self.epsilon = epsilon
        sharded = parallel.tp.size() > 1 and (parallel.sequence_parallel or over_local_heads)
        facts = replicated_facts((size,), parallel.tp.rank(), init_fill=1.0, partial_over_tp=sharded)
        self.weight = make_parameter((size,), facts, placement)

    def extra_repr(self) -> str:
        """Width and epsilon, for ``print(model)``."""
        return f"{self.weight.numel()}, epsilon={self.epsilon}"


class RMSNorm(Norm):
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim (Zhang and Sennrich 2019, eq. 4).

    The mean is taken in at least float32 (torch's kernels do so inside).
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size], replicated or sharded on a dim before the last; the output likewise."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.epsilon)


class LayerNorm(Norm):
    """``(x - mean) / sqrt(variance + epsilon) * weight + bias`` over the last dim (Ba et al. 2016, eq. 4).

    Mean and variance are taken in at least float32 (torch's kernels do so inside).
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float,
        parallel: ModelParallel,
        placement: Placement,
        over_local_heads: bool = False,
    ) -> None:
        """Make ``weight`` and, zero at first, ``bias`` [size]; arguments as in :class:`Norm`."""
        super().__init__(
            size, epsilon=epsilon, parallel=parallel, placement=placement, over_local_heads=over_local_heads
        )
        facts = replace(facts_of(self.weight), init_fill=0.0)
        self.bias = make_parameter((size,), facts, placement)
        self.function: LayerNormFunction = F.layer_norm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., size], replicated or sharded on a dim before the last; the output likewise."""
        return self.function(hidden_states, list(self.weight.shape), self.weight, self.bias, self.epsilon)


def use_layer_norm(module: nn.Module, function: LayerNormFunction) -> None:
    """Let every :class:`LayerNorm` in ``module`` compute by ``function``, as good as the plain one."""
    for norm in module.modules():
        if isinstance(norm, LayerNorm):
            norm.function = function


def build_norm(
    config: TransformerConfig,
    size: int,
    *,
    parallel: ModelParallel,
    placement: Placement,
    over_local_heads: bool = False,
) -> Norm:
    """The norm that ``config.normalization`` names, over ``size`` elements."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(
        size,
        epsilon=config.norm_epsilon,
        parallel=parallel,
        placement=placement,
        over_local_heads=over_local_heads,
    )
