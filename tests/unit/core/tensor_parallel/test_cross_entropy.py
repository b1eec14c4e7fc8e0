import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import VocabShard, vocab_parallel_cross_entropy
from tests.unit.core.tensor_parallel.single import single_rank_group


def test_a_loss_worked_out_by_hand():
    # Logits 0, log 2, log 5 have probabilities 1/8, 2/8, 5/8; the fourth column is padding, however large.
    logits = torch.tensor([[[0.0, 2.0, 5.0, 0.0]]], dtype=torch.float64)
    logits[..., 1:3] = logits[..., 1:3].log()
    logits[..., 3] = 50.0
    logits.requires_grad_()
    group = single_rank_group()
    shard = VocabShard.of(3, 4, group)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), group, shard)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(4.0, dtype=torch.float64)).item(), rel=1e-15)
    loss.backward(torch.tensor([[2.0]], dtype=torch.float64))
    assert logits.grad.flatten().tolist() == pytest.approx([0.25, -1.5, 1.25, 0.0], rel=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_pytorch_in_float64(smoothing, scale, dtype):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(3, 2, 104, generator=generator) * scale).to(dtype).requires_grad_()
    labels = torch.randint(0, 101, (3, 2), generator=generator)
    upstream = torch.rand(3, 2, generator=generator)
    group = single_rank_group()
    found = vocab_parallel_cross_entropy(logits, labels, group, VocabShard.of(101, 104, group), smoothing)
    found.backward(upstream.to(found.dtype))

    dense = logits.detach()[..., :101].double().requires_grad_()
    expected = F.cross_entropy(
        dense.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(3, 2)
    expected.backward(upstream.double())
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    rounding = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=rounding)
    step = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(logits.grad[..., :101].double(), dense.grad, rtol=step, atol=step * 1e-2)
    assert logits.grad[..., 101:].eq(0).all()


def test_wrong_input_is_refused():
    group = single_rank_group()
    labels = torch.zeros(3, 2, dtype=torch.long)
    shard = VocabShard(first=0, valid=52, rows=52, vocab_size=101)  # as on rank 0 of 2
    with pytest.raises(ValueError, match=r"104 columns .* has 52; .*gathered"):
        vocab_parallel_cross_entropy(torch.randn(3, 2, 104), labels, group, shard)
    whole = VocabShard.of(101, 104, group)
    with pytest.raises(ValueError, match="label smoothing is 1"):
        vocab_parallel_cross_entropy(torch.randn(3, 2, 104), labels, group, whole, 1.0)
    with pytest.raises(RuntimeError, match="a label is outside the vocabulary of 101"):
        vocab_parallel_cross_entropy(torch.randn(3, 2, 104), labels + 101, group, whole)
