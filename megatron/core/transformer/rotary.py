"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4.2), in the rotate-half form.

Element i of a head's first half is paired with element i of its second half, as Llama's published weights
expect; the paper pairs neighbours, which is the same up to an order of the query and key rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.tensor_parallel.mappings import apply_function


@dataclass(frozen=True)
class RotaryAngles:
    """Cosines and sines of the angles of some positions, shared by all layers.

    Both are [s, b or 1, 1, r/2], r being the rotated width of a head, replicated, and in at least float32.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class RotaryEmbedding:
    """The frequencies ``base^(-2i/r)`` of the first r elements of a head; the others aren't rotated."""

    rotated_size: int
    """Width that is rotated (r), an even number."""
    base: float

    @staticmethod
    def for_heads(head_dim: int, percent: float, base: float) -> "RotaryEmbedding":
        """Rotate the share ``percent`` of a head of ``head_dim`` elements, rounded down to an even width.

        Raises:
            ValueError: if nothing would be rotated.
        """
        rotated = int(head_dim * percent) // 2 * 2
        if rotated == 0:
            raise ValueError(
                f"--rotary-percent {percent} of a head of {head_dim} elements leaves nothing to rotate; "
                f"give at least {2 / head_dim:g} (heads need 2 elements or more, see --kv-channels)"
            )
        return RotaryEmbedding(rotated, base)

    def angles(
        self, seq_length: int, position_ids: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> RotaryAngles:
        """Cosines and sines for a sequence.

        Args:
            seq_length: s; the positions are 0..s-1 unless ``position_ids`` are given.
            position_ids: [b, s], replicated, or None.
            dtype: format of the activations; the angles are in at least float32.
            device: where to.
        """
        exact = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.rotated_size, 2, dtype=exact, device=device) / self.rotated_size
        frequencies = self.base**-exponents  # [r/2]
        if position_ids is None:
            positions = torch.arange(seq_length, device=device).unsqueeze(1)  # [s, 1]
        else:
            positions = position_ids.t()  # [s, b]
        angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(2)  # [s, b or 1, 1, r/2]
        return RotaryAngles(angles.cos(), angles.sin())


def apply_rotary(heads: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Turn every pair of elements of every head by its position's angle.

    Args:
        heads: [s, b, n, d], replicated or sharded on dim 2 over tp.
        angles: of the same positions.

    Returns:
        The same shape and layout, contiguous.
    """
    return apply_function(_Rotate, heads, angles.cos, angles.sin)


def split_heads(
    fused: torch.Tensor, angles: RotaryAngles | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut the fused projection into queries, keys and values, turning the first two if there are angles.

    The results are tensors of their own, so that ``fused`` need not be kept; the backward writes the three
    gradients into one tensor.

    Args:
        fused: [s, b, g, q + 2, d], sharded on dim 2 over tp: of each group q query heads, its key head, its
            value head.
        angles: of the same positions, or None.

    Returns:
        Queries [s, b, g * q, d], keys and values [s, b, g, d], contiguous, sharded on dim 2 over tp.
    """
    cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _SplitHeads.apply
    return apply(fused, cos, sin)


class _Rotate(torch.autograd.Function):
    """forward: turn by the angle. backward: turn by its negative. Keeps nothing but the angles."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        _turn(heads, cos, sin, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _turn(grads[0], cos, -sin, out)
        return out, None, None


class _SplitHeads(torch.autograd.Function):
    """forward: cut and turn. backward: turn back and join. Keeps nothing but the angles."""

    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        s, b, g, heads, d = fused.shape
        query = fused.new_empty((s, b, g, heads - 2, d))
        key, value = fused.new_empty((s, b, g, d)), fused.new_empty((s, b, g, d))
        _turn_groups(fused[..., :-2, :], cos, sin, query)
        _turn_groups(fused[..., -2:-1, :], cos, sin, key.unsqueeze(3))
        value.copy_(fused[..., -1, :])
        return query.view(s, b, -1, d), key, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        back = None if sin is None else -sin
        query, key, value = grads
        s, b, g, d = key.shape
        query = query.reshape(s, b, g, -1, d)
        fused = query.new_empty((s, b, g, query.size(3) + 2, d))
        _turn_groups(query, cos, back, fused[..., :-2, :])
        _turn_groups(key.unsqueeze(3), cos, back, fused[..., -2:-1, :])
        fused[..., -1, :] = value
        return fused, None, None


def _turn_groups(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, out: torch.Tensor
) -> None:
    """:func:`_turn` on [s, b, g, q, d]; copies without angles."""
    if cos is None or sin is None:
        out.copy_(heads)
    else:
        _turn(heads, cos.unsqueeze(3), sin.unsqueeze(3), out)


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    half = cos.size(-1)
    first, second, rest = heads.tensor_split((half, 2 * half), dim=-1)
    # Products with cos and sin are in their format (at least float32); the assignment rounds once.
    out[..., :half] = torch.addcmul(first * cos, second, sin, value=-1)
    out[..., half : 2 * half] = torch.addcmul(second * cos, first, sin)
    if rest.size(-1):
        out[..., 2 * half :] = rest
