"""Bytes that a layer keeps on two tensor-parallel ranks, against table 2 of Korthikanti et al. 2022."""

from torch.multiprocessing.reductions import StorageWeakRef

from tests.harness import make_state, run_ranks
from tests.unit.core.models.shapes import over
from tests.unit.core.transformer.saved_activations import (
    MICRO_BATCH,
    SIZES,
    measured_shape,
    saved_bytes_per_layer,
    stack,
)

H, A, S = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["seq_length"]
SBH = S * MICRO_BATCH * H
SCORES = 5 * A * S / H

SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
FUSED = {"attention_backend": "fused", "attention_dropout": 0.0}
# (sequence parallel, changes, units of s b h) for t = 2.
TABLE = [
    (False, {}, 10 + 24 / 2 + SCORES / 2),
    (True, {}, (34 + SCORES) / 2),
    (False, SELECTIVE, 10 + 24 / 2),
    (True, SELECTIVE, 34 / 2),
    (False, FULL, 2),
    (True, FULL, 2 / 2),
    (False, {**FULL, "distribute_saved_activations": True}, 2 / 2),
    (False, FUSED, 10 + 24 / 2 + 4 * A / H / 2),
    (True, FUSED, (34 + 4 * A / H) / 2),
]


def _measure(table):
    tp = make_state(tp=2).group("tp")
    return [
        saved_bytes_per_layer(over(tp, sequence_parallel=sequence_parallel), **changes)
        for sequence_parallel, changes, _ in table
    ]


def test_what_is_kept_is_what_the_table_says():
    for measured in run_ranks(2, _measure, TABLE):
        for saved, (sequence_parallel, changes, of_sbh) in zip(measured, TABLE, strict=True):
            # The excess is the norms' statistics, at most 16 bytes a token.
            excess = saved - of_sbh * SBH
            assert 0 <= excess <= 16 * S * MICRO_BATCH, f"{changes}, {sequence_parallel=}: {excess} bytes"


def _inputs_left():
    """Of each layer of a stack, whether its input is still there after the forward; undivided and divided."""
    return [_inputs_left_when(divided) for divided in (False, True)]


def _inputs_left_when(divided):
    config = measured_shape(3, **FULL, distribute_saved_activations=divided)
    block, forward = stack(config, over(make_state(tp=2).group("tp")))
    inputs = []
    for layer in block.layers.values():
        layer.register_forward_pre_hook(lambda _, args: inputs.append(_weak_reference(args[0])))
    output = forward()
    assert output.requires_grad
    return [not storage.expired() for storage in inputs]


def _weak_reference(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def test_divided_inputs_of_layers_do_not_live_on_whole():
    # The first layer's input belongs to the caller.
    for whole, divided in run_ranks(2, _inputs_left):
        assert whole == [True, True, True]
        assert divided == [True, False, False]
