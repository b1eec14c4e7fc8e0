"""NVIDIA apex's fused layer norm: one kernel for statistics, scale and shift."""

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.extensions.signatures import LayerNormFunction


def load() -> LayerNormFunction:
    """The function of apex, with the signature of the plain one.

    Raises:
        ImportError: if what is installed under the name of apex is another package, or lacks its kernels.
    """
    try:
        module = importlib.import_module("apex.normalization.fused_layer_norm")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "apex":
            raise ImportError(f"the installed package is not NVIDIA's apex ({error})") from None
        raise
    # apex itself looks for its kernels at the first call only: an installation without them must show now.
    importlib.import_module("fused_layer_norm_cuda")
    fused = module.fused_layer_norm_affine

    def fused_layer_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        # By keyword: the order of the arguments differs between versions of apex.
        output: Tensor = fused(
            input=input, weight=weight, bias=bias, normalized_shape=torch.Size(normalized_shape), eps=eps
        )
        return output

    return fused_layer_norm


def check(function: LayerNormFunction, device: torch.device) -> None:
    """Compare a layer norm and its gradients with PyTorch's on a small input.

    Raises:
        ArithmeticError: if they are not the same up to rounding.
    """
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        own, plain = (_norm_and_gradients(one, device, dtype) for one in (function, F.layer_norm))
        for found, expected in zip(own, plain, strict=True):
            difference = (found.double() - expected.double()).abs().max().item()
            if not difference <= tolerance * expected.double().abs().max().item():
                raise ArithmeticError(f"it differs from PyTorch's layer norm by {difference:.2g} in {dtype}")


def _norm_and_gradients(
    function: LayerNormFunction, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Output [4, 3, 256] of a norm, and the gradients of its input, weight and bias."""
    values = torch.linspace(-2, 3, 4 * 3 * 256, dtype=torch.float64).cos().view(4, 3, 256)
    hidden = values.to(device, dtype).requires_grad_()
    weight = values[0, 0].to(device, dtype).requires_grad_()
    bias = values[1, 1].to(device, dtype).requires_grad_()
    output = function(hidden, [256], weight, bias, 1e-5)
    gradients = torch.autograd.grad(output, (hidden, weight, bias), values.flip(0).to(device, dtype))
    return output.detach(), *gradients
