"""What an accelerated function must look like to take the place of the plain one."""

from typing import Protocol

from torch import Tensor


class LayerNormFunction(Protocol):
    """A layer norm over the last dims, as :func:`torch.nn.functional.layer_norm` defines it."""

    def __call__(
        self, input: Tensor, normalized_shape: list[int], weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Normalise ``input`` [..., size] over ``normalized_shape``; weight and bias are [size]."""
