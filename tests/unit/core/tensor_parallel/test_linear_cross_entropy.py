import importlib

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import VocabShard, linear_cross_entropy
from tests.unit.core.tensor_parallel.single import single_rank_group

# The package exports a function of the module's name.
module = importlib.import_module("megatron.core.tensor_parallel.linear_cross_entropy")

S, B, H, V, PADDED = 7, 3, 16, 101, 104


def example(dtype):
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(S, B, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, H, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (S, B), generator=generator)
    token_weights = torch.rand(S, B, generator=generator)
    token_weights[0] = 0.0
    token_weights[3, 1] = 0.0
    return hidden, weight, labels, token_weights


def dense(hidden, weight, labels, token_weights, smoothing, upstream):
    """Losses and gradients of full logits in float64."""
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = F.linear(hidden, weight[:V])
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(S, B)
    (losses * token_weights).sum().mul(upstream).backward()
    return losses.detach(), hidden.grad, weight.grad


@pytest.fixture(params=[1, 2**27], ids=["many blocks", "one block"])
def block_bytes(request, monkeypatch):
    # One row of bfloat16 logits takes 208 bytes: with 1000 a block is of 1 to 5 tokens.
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000 if request.param == 1 else request.param)
    monkeypatch.setattr(module, "COLUMNS", 32)
    monkeypatch.setattr(module, "elementwise_tile", lambda device: 2 * V)
    return request.param


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 1e-5, 1e-6), (torch.bfloat16, 0.1, 0.03)],
    ids=str,
)
def test_equals_full_logits_in_float64(block_bytes, smoothing, weighted, dtype, loss_error, gradient_error):
    hidden, weight, labels, token_weights = example(dtype)
    if not weighted:
        token_weights = torch.ones(S, B)
    group = single_rank_group()
    total, losses = linear_cross_entropy(
        hidden,
        weight,
        labels,
        group,
        VocabShard.of(V, PADDED, group),
        token_weights=token_weights if weighted else None,
        label_smoothing=smoothing,
    )
    (total * 3).backward()
    expected, grad_hidden, grad_weight = dense(hidden, weight, labels, token_weights, smoothing, 3.0)
    counted = token_weights != 0
    assert total.dtype == losses.dtype == torch.promote_types(dtype, torch.float32)
    assert not losses.requires_grad
    torch.testing.assert_close(losses[counted].double(), expected[counted], rtol=0, atol=loss_error)
    assert losses[~counted].eq(0).all()
    assert total.item() == pytest.approx((losses * token_weights).sum().item(), rel=1e-6)
    for found, reference in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        assert (found.double() - reference).abs().max() <= gradient_error * reference.abs().max()
    assert weight.grad[V:].eq(0).all()
    assert hidden.grad[~counted].eq(0).all()


def test_many_blocks_sum_the_bfloat16_gradient_in_float32(monkeypatch):
    # 512 equal tokens in blocks of one: a bfloat16 sum would stop growing at 256 times one share.
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    hidden = torch.ones(512, 1, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    group = single_rank_group()
    labels = torch.zeros(512, 1, dtype=torch.long)
    total, _ = linear_cross_entropy(hidden, weight, labels, group, VocabShard.of(2, 2, group))
    total.backward()
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]  # half a probability too little for each token


def test_tokens_of_no_weight_may_have_any_label_and_state():
    hidden, weight, labels, token_weights = example(torch.float64)
    group = single_rank_group()
    labels[token_weights == 0] = -100
    with torch.no_grad():
        hidden[0] = torch.nan
    total, losses = linear_cross_entropy(
        hidden, weight, labels, group, VocabShard.of(V, PADDED, group), token_weights=token_weights
    )
    total.backward()
    assert total.isfinite()
    assert losses.isfinite().all()
    assert weight.grad.isfinite().all()
    assert hidden.grad.isfinite().all()


def test_no_counted_token_gives_zero_loss_and_gradient():
    hidden, weight, labels, _ = example(torch.float32)
    group = single_rank_group()
    total, losses = linear_cross_entropy(
        hidden, weight, labels, group, VocabShard.of(V, PADDED, group), token_weights=torch.zeros(S, B)
    )
    total.backward()
    assert total.item() == 0.0
    assert losses.eq(0).all()
    assert hidden.grad.eq(0).all()
    assert weight.grad.eq(0).all()


def test_large_logits_stay_finite():
    hidden, weight, labels, _ = example(torch.float64)
    hidden = (hidden.detach() * 1000).requires_grad_()
    group = single_rank_group()
    total, losses = linear_cross_entropy(hidden, weight, labels, group, VocabShard.of(V, PADDED, group))
    total.backward()
    expected, grad_hidden, grad_weight = dense(hidden, weight, labels, torch.ones(S, B), 0.0, 1.0)
    assert expected.max() > 1000
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(hidden.grad, grad_hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(weight.grad, grad_weight, rtol=1e-9, atol=1e-9)


def test_evaluation_forms_no_gradient(monkeypatch):
    hidden, weight, labels, _ = example(torch.float32)
    group = single_rank_group()
    shard = VocabShard.of(V, PADDED, group)
    trained, _ = linear_cross_entropy(hidden, weight, labels, group, shard)
    monkeypatch.delattr(module, "_write_product")  # what the weight's gradient needs
    with torch.no_grad():
        evaluated, _ = linear_cross_entropy(hidden, weight, labels, group, shard)
    assert evaluated.item() == trained.item()
    assert not evaluated.requires_grad
    frozen, _ = linear_cross_entropy(hidden, weight.detach(), labels, group, shard)
    frozen.backward()
    _, grad_hidden, _ = dense(hidden, weight, labels, torch.ones(S, B), 0.0, 1.0)
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=1e-5, atol=1e-5)


def test_a_second_backward_is_refused_not_wrong():
    # The first one scales the stored gradients in place.
    hidden, weight, labels, _ = example(torch.float32)
    group = single_rank_group()
    total, _ = linear_cross_entropy(hidden, weight, labels, group, VocabShard.of(V, PADDED, group))
    total.mul(2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_wrong_input_is_refused():
    hidden, weight, labels, _ = example(torch.float32)
    group = single_rank_group()
    with pytest.raises(ValueError, match=r"104 rows .* has 52"):
        linear_cross_entropy(hidden, weight, labels, group, VocabShard(0, 52, 52, V))
    shard = VocabShard.of(V, PADDED, group)
    with pytest.raises(ValueError, match=r"label smoothing is -0.1"):
        linear_cross_entropy(hidden, weight, labels, group, shard, label_smoothing=-0.1)
    with pytest.raises(ValueError, match="hidden states of 6 tokens on each of 1 ranks for 7 labels"):
        linear_cross_entropy(hidden[1:], weight, labels, group, shard)
    with pytest.raises(RuntimeError, match="a label is outside the vocabulary of 101"):
        linear_cross_entropy(hidden, weight, labels + V, group, shard)
