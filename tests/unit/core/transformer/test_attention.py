"""Which heads a rank has, segment masks, derived dropout."""

import math

import pytest
import torch

from megatron.core.config import TransformerConfig
from megatron.core.tensor_parallel import RandomStream, initialize_parameters
from megatron.core.transformer import AttentionContext, RotaryEmbedding, SelfAttention
from megatron.core.transformer.attention import HeadShare
from tests.unit.core.models.shapes import FLOAT64, over


def _config(heads, groups, **changes):
    shape = {
        "num_layers": 1,
        "hidden_size": heads * 2,
        "num_attention_heads": heads,
        "seq_length": 4,
        "group_query_attention": True,
        "num_query_groups": groups,
    }
    return TransformerConfig(**{**shape, **changes})


def _rows(share):
    """Whole-weight row of every local row."""
    rows = {}
    for piece in share.pieces:
        rows |= {piece.local + i: piece.start + i for i in range(piece.length)}
    return [rows[i] for i in sorted(rows)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_every_row_of_the_fused_weight_has_one_primary_owner(tp, groups):
    config = _config(8, groups)
    owners = torch.zeros((8 + 2 * groups) * 2, dtype=torch.int)
    for rank in range(tp):
        for piece in HeadShare.of(config, rank, tp).pieces:
            if piece.primary:
                owners[piece.start : piece.start + piece.length] += 1
    assert owners.tolist() == [1] * len(owners)


def test_ranks_that_outnumber_the_groups_share_key_and_value_heads():
    # 4 heads of width 2 in 2 groups: rows q0 q1 k0 v0 | q2 q3 k1 v1, two rows each.
    shares = [HeadShare.of(_config(4, 2), rank, 4) for rank in range(4)]
    assert [_rows(share) for share in shares] == [
        [0, 1, 4, 5, 6, 7],
        [2, 3, 4, 5, 6, 7],
        [8, 9, 12, 13, 14, 15],
        [10, 11, 12, 13, 14, 15],
    ]
    assert [[piece.primary for piece in share.pieces] for share in shares] == [
        [True, True],
        [True, False],
        [True, True],
        [True, False],
    ]
    assert {(share.groups, share.queries_per_group) for share in shares} == {(1, 1)}


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "message"),
    [(6, 6, 4, "--num-attention-heads 6"), (12, 6, 4, "--num-query-groups 6"), (12, 3, 2, "must divide")],
)
def test_heads_that_do_not_divide_are_refused(heads, groups, tp, message):
    with pytest.raises(ValueError, match=message):
        HeadShare.of(_config(heads, groups), 0, tp)


def _attention(causal, **changes):
    config = _config(4, 2, **changes)
    attention = SelfAttention(config, parallel=over(), placement=FLOAT64, causal=causal)
    initialize_parameters(attention, seed=2)
    return attention


@pytest.mark.parametrize("causal", [True, False])
def test_causal_order_and_its_absence(causal):
    attention = _attention(causal, attention_dropout=0.0)
    hidden = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stream = RandomStream.root(0)
    before = attention(hidden, AttentionContext(), stream)
    hidden[3] += 1
    changed = (attention(hidden, AttentionContext(), stream) != before).any(-1).any(-1)
    assert changed.tolist() == ([False] * 3 + [True] if causal else [True] * 4)
    one_segment = torch.zeros(2, 4, dtype=torch.int64)
    same = attention(hidden, AttentionContext(segment_ids=one_segment), stream)
    torch.testing.assert_close(same, attention(hidden, AttentionContext(), stream), rtol=1e-12, atol=1e-12)


def test_probabilities_are_dropped_by_the_stream_alone():
    attention = _attention(causal=True, attention_dropout=0.4)
    hidden = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(seed):
        return attention(hidden, AttentionContext(), RandomStream.root(seed))

    first = run(1)
    torch.rand(3)  # whatever else was drawn
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)
    average = sum(run(seed) for seed in range(64)) / 64
    attention.eval()
    exact = run(1)
    assert torch.equal(exact, run(2))
    # Dropout keeps expectations: an output's spread over draws is about its own size, over sqrt(64) draws.
    assert (average - exact).norm() / exact.norm() < 3 / math.sqrt(64)


def _attend_with_gradient(hidden, context, **changes):
    attention = _attention(True, **changes)
    output = attention(hidden, context, RandomStream.root(3))
    output.square().sum().backward()
    return output.detach(), [parameter.grad for parameter in attention.parameters()]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("qk_layernorm", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_every_backend_computes_the_same(groups, qk_layernorm, rotary):
    hidden = torch.randn(4, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = RotaryEmbedding.for_heads(2, 1.0, 10000).angles(4, None, torch.float64, hidden.device)
    shape = {"num_query_groups": groups, "qk_layernorm": qk_layernorm, "attention_dropout": 0.0}
    whole = AttentionContext(angles if rotary else None)
    # One segment through the blocks of the context-parallel kernels, on one rank.
    segments = AttentionContext(whole.rotary, torch.zeros(2, 4, dtype=torch.int64))
    expected, expected_grads = _attend_with_gradient(hidden, whole, **shape)
    for context, backend in ((whole, "unfused"), (segments, "auto")):
        output, grads = _attend_with_gradient(hidden, context, **shape, attention_backend=backend)
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-13)
        for grad, reference in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-13)
