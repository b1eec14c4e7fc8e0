import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.tensor_parallel import (
    VocabShard,
    gather_from_tensor_parallel_region,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from tests.distributed.core.models.collectives import recorded_collectives
from tests.harness import make_state, run_ranks

S, B, H = 4, 2, 6
CASES = [(1.0, 0.0), (1.0, 0.1), (1000.0, 0.0), (1000.0, 0.1)]
"""What the hidden states are multiplied by, and the label smoothing."""


def _example(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab_size, (S, B), generator=generator)
    token_weights = torch.tensor([[1.0, 0.0], [0.5, 1.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    return hidden, weight, labels, token_weights


def _padded(weight, padded_size):
    # What lies in padding must not matter.
    return torch.cat([weight, torch.full((padded_size - len(weight), H), 3.0, dtype=weight.dtype)])


def _counting(log):
    original = dist.all_reduce

    def count(tensor, *args, **kwargs):
        log.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    return original, count


def _from_logits(vocab_size, padded_size):
    group = make_state(tp=dist.get_world_size()).group("tp")
    shard = VocabShard.of(vocab_size, padded_size, group)
    hidden, weight, labels, token_weights = _example(vocab_size)
    found = []
    for scale, smoothing in CASES:
        logits = F.linear(hidden * scale, _padded(weight, padded_size))
        own = logits[..., shard.first : shard.first + shard.rows].clone().requires_grad_()
        sizes = []
        original, dist.all_reduce = _counting(sizes)
        try:
            losses = vocab_parallel_cross_entropy(own, labels, group, shard, smoothing)
            losses.backward(token_weights)
        finally:
            dist.all_reduce = original
        found.append((losses.detach(), own.grad, sum(sizes)))
    return shard, found


def _from_hidden(vocab_size, padded_size):
    module = importlib.import_module("megatron.core.tensor_parallel.linear_cross_entropy")
    module.BLOCK_BYTES = 2 * padded_size * 8 // dist.get_world_size()  # blocks of two tokens
    group = make_state(tp=dist.get_world_size()).group("tp")
    shard = VocabShard.of(vocab_size, padded_size, group)
    found = []
    for scale, smoothing in CASES:
        hidden, weight, labels, token_weights = _example(vocab_size)
        hidden = (hidden * scale).requires_grad_()
        own = _padded(weight, padded_size)[shard.first :][: shard.rows].clone().requires_grad_()
        total, losses = linear_cross_entropy(
            hidden, own, labels, group, shard, token_weights=token_weights, label_smoothing=smoothing
        )
        total.backward()
        found.append((total.detach(), losses, hidden.grad, own.grad))
    return shard, found


def _dense(vocab_size, scale, smoothing, mask=None):
    hidden, weight, labels, token_weights = _example(vocab_size)
    token_weights = token_weights if mask is None else mask
    hidden = (hidden * scale).requires_grad_()
    weight.requires_grad_()
    logits = F.linear(hidden, weight)
    logits.retain_grad()
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing
    ).view(S, B)
    (losses * token_weights).sum().backward()
    return losses.detach(), logits.grad, hidden.grad, weight.grad


# (vocabulary, padded, ranks): one that nothing divides, padded a little and a lot (ranks of padding alone)
SHAPES = [(8, 8, 2), (101, 102, 2), (101, 112, 2), (101, 104, 4), (101, 512, 4)]


@pytest.mark.parametrize(("vocab_size", "padded_size", "tp"), SHAPES)
def test_loss_of_split_logits_is_the_dense_loss(vocab_size, padded_size, tp):
    dense = [_dense(vocab_size, *case) for case in CASES]
    for shard, found in run_ranks(tp, _from_logits, vocab_size, padded_size):
        own = slice(shard.first, shard.first + shard.valid)
        for (expected, grad_logits, _, _), (losses, gradient, size) in zip(dense, found, strict=True):
            assert losses.isfinite().all()
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(
                gradient[..., : shard.valid], grad_logits[..., own], rtol=1e-11, atol=1e-12
            )
            assert gradient[..., shard.valid :].eq(0).all()
            assert size == 3 * S * B  # three reductions of b * s elements, two of them in one call


@pytest.mark.parametrize(("vocab_size", "padded_size", "tp"), SHAPES)
def test_loss_fused_with_a_split_output_layer_is_the_dense_loss(vocab_size, padded_size, tp):
    dense = [_dense(vocab_size, *case) for case in CASES]
    counts = _example(vocab_size)[3]
    for shard, found in run_ranks(tp, _from_hidden, vocab_size, padded_size):
        own = slice(shard.first, shard.first + shard.valid)
        for (expected, _, grad_hidden, grad_weight), result in zip(dense, found, strict=True):
            total, losses, hidden_gradient, gradient = result
            torch.testing.assert_close(total, (expected * counts).sum(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses, expected * (counts != 0), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(hidden_gradient, grad_hidden, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(gradient[: shard.valid], grad_weight[own], rtol=1e-10, atol=1e-10)
            assert gradient[shard.valid :].eq(0).all()


def _from_shards(vocab_size, padded_size):
    """With a part of the sequence on each rank; masks that leave tokens out, none, and all but one block."""
    module = importlib.import_module("megatron.core.tensor_parallel.linear_cross_entropy")
    tp = dist.get_world_size()
    module.BLOCK_BYTES = 3 * padded_size * 8 // tp  # blocks of at most three tokens
    group = make_state(tp=tp).group("tp")
    shard = VocabShard.of(vocab_size, padded_size, group)
    found = []
    for scale, smoothing in CASES:
        hidden, weight, labels, token_weights = _example(vocab_size)
        for mask in (token_weights, None, torch.zeros_like(token_weights)):
            own_hidden = (hidden * scale).chunk(tp)[group.rank()].clone().requires_grad_()
            own = _padded(weight, padded_size)[shard.first :][: shard.rows].clone().requires_grad_()
            with recorded_collectives() as seen:
                total, losses = linear_cross_entropy(
                    own_hidden,
                    own,
                    labels,
                    group,
                    shard,
                    token_weights=mask,
                    label_smoothing=smoothing,
                    sequence_parallel=True,
                )
                total.mul(3).backward()
            names = [collective.name for collective in seen if collective.name != "all_reduce"]
            found.append((total.detach(), losses, own_hidden.grad, own.grad, names))
    return shard, found


@pytest.mark.parametrize(("vocab_size", "padded_size", "tp"), [(101, 102, 2), (101, 512, 4)])
def test_loss_of_a_split_sequence_is_the_dense_loss(vocab_size, padded_size, tp):
    token_weights = _example(vocab_size)[3]
    masks = (token_weights, torch.ones_like(token_weights), torch.zeros_like(token_weights))
    dense = [(_dense(vocab_size, *case, mask), mask) for case in CASES for mask in masks]
    for rank, (shard, found) in enumerate(run_ranks(tp, _from_shards, vocab_size, padded_size)):
        own = slice(shard.first, shard.first + shard.valid)
        for ((expected, _, grad_hidden, grad_weight), mask), result in zip(dense, found, strict=True):
            total, losses, hidden_gradient, gradient, names = result
            torch.testing.assert_close(total, (expected * mask).sum(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses, expected * (mask != 0), rtol=1e-12, atol=1e-12)
            part = grad_hidden.chunk(tp)[rank]
            torch.testing.assert_close(hidden_gradient, 3 * part, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(gradient[: shard.valid], 3 * grad_weight[own], rtol=1e-10, atol=1e-10)
            assert gradient[shard.valid :].eq(0).all()
            # However many blocks there are; with no token that counts there is no gradient to send.
            assert names == ["all_gather_single", "reduce_scatter_single"][: 2 if mask.any() else 1]


def _gathered():
    group = make_state(tp=2).group("tp")
    shard = VocabShard.of(8, 8, group)
    labels = torch.zeros(S, B, dtype=torch.long)
    own = torch.zeros(S, B, 4, dtype=torch.float64)
    gathered = gather_from_tensor_parallel_region(own, group, -1)
    try:
        vocab_parallel_cross_entropy(gathered, labels, group, shard)
    except ValueError as error:
        return str(error), vocab_parallel_cross_entropy(own, labels, group, shard).mean().item()
    return "accepted", 0.0


def test_gathered_logits_are_refused():
    # Summing the whole vocabulary on both ranks would make the loss log(16) in place of log(8).
    for message, loss in run_ranks(2, _gathered):
        assert "8 columns where the shard of this tensor-parallel rank has 4" in message
        assert loss == pytest.approx(torch.tensor(8.0, dtype=torch.float64).log().item(), rel=1e-14)
