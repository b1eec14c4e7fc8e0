"""Memory formulas against table 2 of Korthikanti et al. 2022, published examples and ZeRO's sums."""

import pytest

from megatron.core.config import ParallelConfig, TransformerConfig
from megatron.planning.memory import activation_bytes_per_layer, model_state_bytes_per_parameter

S, B, H, A = 2048, 4, 6144, 64
"""The 22B model of Korthikanti et al. 2022, table 3."""
SBH = S * B * H
SCORES = 5 * A * S / H


def _bytes(parallel=None, micro_batch_size=B, position=0, **changes):
    shape = {
        "num_layers": 48,
        "hidden_size": H,
        "num_attention_heads": A,
        "seq_length": S,
        "attention_backend": "unfused",
    }
    config = TransformerConfig(**{**shape, **changes})
    return activation_bytes_per_layer(
        config, parallel or ParallelConfig(), micro_batch_size, position=position
    )


def _tp(size, sequence_parallel=False):
    return ParallelConfig(tensor_model_parallel_size=size, sequence_parallel=sequence_parallel)


SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize(
    ("parallel", "changes", "of_sbh"),
    [
        (_tp(1), {}, 34 + SCORES),
        (_tp(8), {}, 10 + 24 / 8 + SCORES / 8),
        (_tp(8, True), {}, (34 + SCORES) / 8),
        (_tp(8), SELECTIVE, 10 + 24 / 8),
        (_tp(8, True), SELECTIVE, 34 / 8),
        (_tp(8), FULL, 2),
        (_tp(8, True), FULL, 2 / 8),
        (_tp(8), {**FULL, "distribute_saved_activations": True}, 2 / 8),
        (_tp(8), {**FULL, "recompute_num_layers": 4}, 2 / 4),
        (_tp(1), {"attention_backend": "auto"}, 34 + 4 * A / H),
        (_tp(8), {"attention_backend": "auto"}, 10 + 24 / 8 + 4 * A / (8 * H)),
        (_tp(8, True), {"attention_backend": "flash"}, (34 + 4 * A / H) / 8),
        (ParallelConfig(context_parallel_size=2), {}, (34 + 4 * A / H) / 2),
        # Section 4.1: the MLP keeps 19 s b h, 16 of them inside; norms' outputs are 2 s b h each.
        (_tp(1), {**SELECTIVE, "recompute_modules": ("mlp",)}, 34 + SCORES - 16),
        (_tp(1), {**SELECTIVE, "recompute_modules": ("layernorm", "core_attn")}, 34 - 4),
    ],
)
def test_table_2(parallel, changes, of_sbh):
    assert _bytes(parallel, **changes) == pytest.approx(of_sbh * SBH, rel=1e-12)


def test_core_attention_is_70_percent_of_gpt_3():
    # Section 5: 5 a s/h is 80 for GPT-3 (a 96, s 2048, h 12288), so 70% of 114 are spared.
    gpt_3 = {"hidden_size": 12288, "num_attention_heads": 96, "num_layers": 96}
    spared = 1 - _bytes(**gpt_3, **SELECTIVE) / _bytes(**gpt_3)
    assert spared == pytest.approx(80 / 114)


def test_blocks_recompute_the_first_layers_of_a_stage():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    kept = [_bytes(position=position, **block) / SBH for position in range(4)]
    assert kept == pytest.approx([2, 2, 34 + SCORES, 34 + SCORES])


def test_other_shapes_than_the_table_s():
    # Llama-like, by hand, bytes a token over h = 1024, 16 heads of 64: norms in 4, linear inputs 4; queries
    # 2, keys and values 2 * 2 * 4/16 = 1, output 2; f = 2816: gate, up and their product 3 * 2 * 2.75.
    llama = {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "group_query_attention": True,
        "num_query_groups": 4,
        "swiglu": True,
        "ffn_hidden_size": 2816,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    a_token = S * B * 1024
    assert _bytes(**llama) == pytest.approx((13 + 16.5 + 2 * 16 * S / 1024) * a_token)
    fused = _bytes(**llama, attention_backend="auto")
    assert fused == pytest.approx((13 + 16.5 + 4 * 16 / 1024) * a_token)
    # Eight ranks share four key-value heads: each holds one, whole.
    eight = _bytes(_tp(8), **llama, attention_backend="auto")
    assert eight == pytest.approx((8 + (6 + 16.5 + 4 * 16 / 1024) / 8) * a_token)
    norms = _bytes(**llama, attention_backend="auto", qk_layernorm=True)
    assert norms - fused == pytest.approx((2 + 0.5) * a_token)


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        ("no_shard", 64, 18),
        ("optim", 1, 18),
        ("optim", 64, 6 + 12 / 64),
        ("optim_grads", 64, 2 + 16 / 64),
        ("optim_grads_params", 64, 16 / 64),
    ],
)
def test_model_state(strategy, ranks, expected):
    assert model_state_bytes_per_parameter(strategy, ranks) == pytest.approx(expected)
