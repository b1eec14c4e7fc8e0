"""Attention among a few queries and keys, with the numbers that let several results be merged.

The softmax over all keys follows from softmaxes over blocks of them, given the log of the sum of the
exponentials of each block's scores ("lse"; Milakov & Gimelshein 2018). With the lse over *all* keys a block's
probabilities are exp(score - lse), so the backward pass needs no other block (Dao et al. 2022, section 3.1
and appendix B.2).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.context_parallel.dropout import ProbabilityDropout
from megatron.core.context_parallel.fused_kernels import CpuFlash, CudaEfficient, CudaFlash
from megatron.core.device import elementwise_tile


class Kernel(Protocol):
    """softmax(Q K^T / sqrt(d)) V over one block of keys, every query seeing a key at least.

    Queries have n heads, keys and values g, which divides n.
    """

    @property
    def budget(self) -> int | None:
        """Scores that may be held at once: larger blocks have to be cut. None: scores are never held."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, place: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            query: [b, n, q, d], any strides.
            key: [b, g, k, d].
            value: [b, g, k, d].
            causal: whether query i sees only keys up to i; then q = k.
            place: of this block, for dropout.

        Returns:
            The output [b, n, q, d] and the lse [b, n, q] in at least float32.
        """

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        *,
        causal: bool,
        place: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate.

        Args:
            gradient: of the output over all blocks, [b, n, q, d].
            inputs: query, key and value of this block.
            results: output and lse over all blocks.
            causal: as in the forward pass.
            place: as in the forward pass.

        Returns:
            This block's part of the gradients of query, key and value, in their shapes.
        """


FUSED: Mapping[str, tuple[CpuFlash | CudaFlash | CudaEfficient, ...]] = {
    "cpu": (CpuFlash(),),
    "cuda": (CudaFlash(), CudaEfficient()),
}
"""PyTorch's fused kernels by device, the fastest first."""


def choose_kernel(query: Tensor, key: Tensor, dropout: ProbabilityDropout | None) -> Kernel:
    """The fastest kernel that can attend among such tensors, [b, n, q, d] and [b, g, k, d]."""
    if dropout is None:
        for kernel in FUSED.get(query.device.type, ()):
            if kernel.supports(query, key):
                return kernel
    return TiledKernel(elementwise_tile(query.device), dropout)


@dataclass(frozen=True)
class TiledKernel:
    """Matrix products and elementwise passes, for any device and format, with dropout.

    All arithmetic is in ``promote_types(dtype, float32)``.
    """

    budget: int
    """Scores that may be held at once."""
    dropout: ProbabilityDropout | None = None
    """Of the probabilities; the lse is that without dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, place: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Kernel.forward`."""
        groups = key.shape[1]
        scores = self._scores(_by_group(query, groups), key, causal)
        top = scores.amax(dim=-1, keepdim=True)
        probabilities = scores.sub_(top).exp_()  # not yet divided by their sum
        total = probabilities.sum(dim=-1, keepdim=True)
        lse = (total.log() + top).view(query.shape[:3])
        if self.dropout is not None:
            probabilities.mul_(self._mask(probabilities, place, self.dropout))
            total.mul_(self.dropout.kept)
        output = (probabilities @ value.to(probabilities.dtype)).div_(total)
        return output.view(query.shape).to(query.dtype), lse

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        results: tuple[Tensor, Tensor],
        *,
        causal: bool,
        place: tuple[int, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`Kernel.backward`."""
        query, key, value = inputs
        output, lse = results
        groups = key.shape[1]
        stacked = _by_group(query, groups)
        scores = self._scores(stacked, key, causal)
        probabilities = scores.sub_(lse.reshape(scores.shape[:3]).unsqueeze(-1)).exp_()
        upstream = _by_group(gradient, groups)
        # The sum over keys of probability x its gradient, dropout included (Dao et al. 2022, appendix B.4).
        delta = (upstream * _by_group(output, groups)).sum(dim=-1, keepdim=True)
        of_scores = upstream @ value.to(upstream.dtype).mT
        kept = probabilities
        if self.dropout is not None:
            mask = self._mask(probabilities, place, self.dropout).div_(self.dropout.kept)
            of_scores.mul_(mask)
            kept = mask.mul_(probabilities)
        of_value = kept.mT @ upstream
        of_scores.sub_(delta).mul_(probabilities).div_(math.sqrt(query.shape[-1]))
        of_query = (of_scores @ key.to(of_scores.dtype)).view(query.shape)
        return of_query, of_scores.mT @ stacked, of_value

    def _scores(self, stacked: Tensor, key: Tensor, causal: bool) -> Tensor:
        """Scores [b, g, (n/g) q, k] of stacked queries [b, g, (n/g) q, d], -inf where a key is not seen."""
        scores = (stacked @ key.to(stacked.dtype).mT).div_(math.sqrt(key.shape[-1]))
        if causal:
            side = key.shape[2]
            later = torch.ones(side, side, dtype=torch.bool, device=key.device).triu_(1)
            torch.unflatten(scores, 2, (-1, side)).masked_fill_(later, -math.inf)
        return scores

    def _mask(self, scores: Tensor, place: tuple[int, ...], dropout: ProbabilityDropout) -> Tensor:
        return dropout.mask(tuple(scores.shape), place, scores.dtype, scores.device)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Stack the heads of each group along the sequence: [b, n, q, d] -> [b, g, (n/g) q, d].

    So the heads of a group meet their key head in one product, and no key is repeated. The result is in the
    type of accumulation.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)).reshape(x.shape[0], groups, -1, x.shape[-1])
