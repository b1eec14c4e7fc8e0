"""Rotary positions against complex numbers; scores depend on distances alone."""

import pytest
import torch

from megatron.core.transformer import RotaryEmbedding, apply_rotary
from megatron.core.transformer.rotary import split_heads


def _heads(s=6, b=2, n=3, d=8, seed=0):
    return torch.randn(s, b, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _complex_rotation(heads, positions, rotated, base):
    half = rotated // 2
    angles = positions[..., None].double() * base ** (-torch.arange(half).double() * 2 / rotated)
    turned = torch.complex(heads[..., :half], heads[..., half:rotated]) * torch.exp(1j * angles)[..., None, :]
    return torch.cat((turned.real, turned.imag, heads[..., rotated:]), -1)


@pytest.mark.parametrize("percent", [1.0, 0.5, 0.3])
def test_rotation_equals_complex_multiplication(percent):
    heads = _heads()
    rotary = RotaryEmbedding.for_heads(8, percent, 100.0)
    assert rotary.rotated_size == {1.0: 8, 0.5: 4, 0.3: 2}[percent]
    result = apply_rotary(heads, rotary.angles(6, None, torch.float64, heads.device))
    expected = _complex_rotation(heads, torch.arange(6)[:, None].expand(6, 2), rotary.rotated_size, 100.0)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)

    position_ids = torch.tensor([[0, 1, 0, 1, 2, 3], [5, 4, 3, 2, 1, 0]])
    result = apply_rotary(heads, rotary.angles(6, position_ids, torch.float64, heads.device))
    expected = _complex_rotation(heads, position_ids.T, rotary.rotated_size, 100.0)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_scores_depend_on_distance_alone():
    query, key = _heads(seed=1), _heads(seed=2)
    rotary = RotaryEmbedding.for_heads(8, 1.0, 10000.0)

    def scores(shift):
        positions = (torch.arange(6) + shift).expand(2, 6)
        angles = rotary.angles(6, positions, torch.float64, query.device)
        return torch.einsum("sbnd,tbnd->bnst", apply_rotary(query, angles), apply_rotary(key, angles))

    torch.testing.assert_close(scores(0), scores(1000), rtol=0, atol=1e-10)


def test_gradient():
    rotary = RotaryEmbedding.for_heads(8, 0.5, 100.0)
    angles = rotary.angles(6, None, torch.float64, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda heads: apply_rotary(heads, angles), (_heads().requires_grad_(),))


def test_bf16_heads_are_turned_in_float32_and_rounded_once():
    heads = _heads(s=300).bfloat16()
    rotary = RotaryEmbedding.for_heads(8, 1.0, 10000.0)
    result = apply_rotary(heads, rotary.angles(300, None, torch.bfloat16, heads.device))
    expected = _complex_rotation(heads.double(), torch.arange(300)[:, None].expand(300, 2), 8, 10000.0)
    assert result.dtype == torch.bfloat16
    # 2^-8 is the unit roundoff of bf16; float32 arithmetic before adds next to nothing.
    assert ((result.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()


def test_nothing_to_rotate_is_refused():
    with pytest.raises(ValueError, match=r"--rotary-percent 0\.1"):
        RotaryEmbedding.for_heads(8, 0.1, 10000.0)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("percent", [1.0, 0.5, None])
def test_heads_are_cut_and_turned_at_once(queries, percent):
    fused = torch.randn(
        6, 2, 2, queries + 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    fused.requires_grad_()
    angles = None
    if percent is not None:
        angles = RotaryEmbedding.for_heads(8, percent, 100.0).angles(6, None, torch.float64, fused.device)
    query, key, value = split_heads(fused, angles)
    parts = fused[..., :queries, :].reshape(6, 2, 2 * queries, 8), fused[..., -2, :]
    expected = [part if angles is None else apply_rotary(part, angles) for part in parts]
    for result, reference in zip((query, key, value), (*expected, fused[..., -1, :]), strict=True):
        assert torch.equal(result, reference)
        assert result.is_contiguous()
        assert result.untyped_storage().nbytes() == result.nbytes  # none holds the fused tensor
    assert torch.autograd.gradcheck(lambda fused: split_heads(fused, angles), (fused,))
