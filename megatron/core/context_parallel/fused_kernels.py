"""PyTorch's fused attention kernels, in the form that :class:`~...kernels.Kernel` asks for.

They compute tile by tile inside (Dao et al. 2022; Rabe & Staats 2021), so no scores are ever held. None of
them is used with dropout: its masks would depend on the kernel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

aten = torch.ops.aten


@dataclass(frozen=True)
class CpuFlash:
    """Flash attention on a CPU: any floating format, keys of fewer heads than queries."""

    budget: None = None
    """Scores are never held."""

    def supports(self, query: Tensor, key: Tensor) -> bool:
        """Whether it can attend among such tensors."""
        return query.is_floating_point() and query.dtype == key.dtype

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, place: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.forward`."""
        query, key, value = _rows(query), _rows(key), _rows(value)
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return output, lse

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        *,
        causal: bool,
        place: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.backward`."""
        query, key, value = (_rows(x) for x in inputs)
        output, lse = results
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _rows(gradient), query, key, value, _rows(output), lse, 0.0, causal
        )
        return of_query, of_key, of_value


@dataclass(frozen=True)
class CudaFlash:
    """Flash attention on a GPU: float16 and bfloat16, keys of fewer heads than queries."""

    budget: None = None
    """Scores are never held."""

    def supports(self, query: Tensor, key: Tensor) -> bool:
        """Whether this GPU and build can attend among such tensors."""
        many = query.shape[1] != key.shape[1]
        return bool(query.shape[-1] % 8 == 0 and can_use_flash_attention(_parameters(query, key, many)))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, place: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.forward`."""
        query, key, value = _rows(query), _rows(key), _rows(value)
        output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
        return output, lse

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        *,
        causal: bool,
        place: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.backward`."""
        query, key, value = (_rows(x) for x in inputs)
        output, lse = results
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # state of dropout
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_backward(
            _rows(gradient),
            query,
            key,
            value,
            _rows(output),
            lse.contiguous(),  # read without strides
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
        )
        return of_query, of_key, of_value


@dataclass(frozen=True)
class CudaEfficient:
    """Memory-efficient attention on a GPU (Rabe & Staats 2021): float32 too, and older GPUs."""

    budget: None = None
    """Scores are never held."""

    def supports(self, query: Tensor, key: Tensor) -> bool:
        """Whether this GPU and build can attend among such tensors."""
        query, key = _grouped(query, key)
        return bool(query.shape[-1] % 8 == 0 and can_use_efficient_attention(_parameters(query, key, False)))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, place: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.forward`."""
        heads = query.shape[:2]
        query, key, value = _grouped(_rows(query), _rows(key), _rows(value))
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal
        )
        # The lse comes padded to whole blocks of queries.
        return output.reshape(*heads, *output.shape[2:]), lse[..., : query.shape[2]].reshape(*heads, -1)

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        *,
        causal: bool,
        place: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`~megatron.core.context_parallel.kernels.Kernel.backward`."""
        key_shape = inputs[1].shape
        query, key, value = _grouped(*(_rows(x) for x in inputs))
        output, lse = results
        padded = F.pad(lse.reshape(*query.shape[:3]), (0, -query.shape[2] % 32), value=float("inf"))
        unused = torch.empty((), dtype=torch.long, device=query.device)  # state of dropout
        of_query, of_key, of_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient.reshape(query.shape),
            query,
            key,
            value,
            None,
            # Read as [b, q, n, d] without strides for q.
            output.reshape(query.shape).transpose(1, 2).contiguous().transpose(1, 2),
            padded,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
        )
        of_key, of_value = of_key.sum(dim=1), of_value.sum(dim=1)
        return of_query.reshape(inputs[0].shape), of_key.view(key_shape), of_value.view(key_shape)


def _rows(x: Tensor) -> Tensor:
    """The tensor with each head's numbers side by side, as the kernels want it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _grouped(query: Tensor, *others: Tensor) -> list[Tensor]:
    """Let as many heads look as are looked at: [b g, n/g, q, d] and [b g, n/g, k, d].

    A key head is a batch entry of its own, repeated by a stride of 0: where the memory allows (always where
    queries lie as [s, b, n, d]) nothing is copied.
    """
    groups = others[0].shape[1]
    query = torch.unflatten(query, 1, (groups, -1)).flatten(0, 1)
    return [query, *(x.flatten(0, 1).unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in others)]


def _parameters(query: Tensor, key: Tensor, fewer_key_heads: bool) -> SDPAParams:
    return SDPAParams(query, key, key, None, 0.0, False, fewer_key_heads)
