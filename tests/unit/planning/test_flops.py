import pytest

from megatron.core.config import TransformerConfig
from megatron.planning.flops import training_flops

GPT3 = {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}


def eq_3_without_recomputation(batch, s, h, layers, v):
    """Narayanan et al. 2021, eq. 3 without the second forward, attention scores halved for causality."""
    return 72 * batch * s * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h))


@pytest.mark.parametrize(
    ("layers", "h", "heads"), [(24, 2304, 24), (48, 8192, 64), (105, 20480, 128), (128, 25600, 160)]
)
def test_equals_the_published_formula(layers, h, heads):
    config = TransformerConfig(
        num_layers=layers, hidden_size=h, num_attention_heads=heads, seq_length=2048, vocab_size=51200
    )
    expected = eq_3_without_recomputation(512, 2048, h, layers, 51200)
    assert training_flops(config, 512, 51200) == pytest.approx(expected, rel=1e-12)


def test_published_throughput_is_reached_in_the_published_time():
    """GPT-3, 300B tokens on 1,024 GPUs at 140 TFLOP/s with full recomputation: 34 days (eq. 4: 8TP/nX)."""
    config = TransformerConfig(**GPT3, vocab_size=51200)
    # Recomputation repeats the forward pass, and the paper counts attention scores without halving.
    scores = 6 * 12288 * 96 * 1536 * 2048**2
    counted = training_flops(config, 1536, 51200) + scores
    logits = 6 * 1536 * 2048 * 12288 * 51200
    with_recomputation = (counted - logits) * 4 / 3 + logits
    iterations = 300e9 / (1536 * 2048)
    days = iterations * with_recomputation / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1)


def test_swiglu_grouped_queries_and_wide_heads_by_hand():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        kv_channels=3,
        group_query_attention=True,
        num_query_groups=2,
        seq_length=5,
        ffn_hidden_size=10,
        swiglu=True,
        vocab_size=7,
    )
    # Multiply-adds of one token: queries 8 x 12, keys and values 8 x 12, output 12 x 8, MLP 3 x 8 x 10.
    layer = 8 * 12 + 8 * 12 + 12 * 8 + 3 * 8 * 10
    tokens = 4 * 5
    # Scores and their use: 12 wide, 5 x 5 positions, half of them masked; twice (QK and AV).
    scores = 4 * 2 * 5 * 5 * 12
    assert training_flops(config, 4, 16) == 6 * (tokens * (2 * layer + 8 * 16) + 2 * scores / 2)
