"""The dry count against formulas of papers; against real runs in ``tests/distributed/planning``."""

import pytest

from megatron.core.config import ParallelConfig, TransformerConfig
from megatron.core.distributed.buffers import ALIGNMENT
from megatron.core.tensor_parallel.linear_cross_entropy import BLOCK_BYTES
from megatron.planning import flat_buckets, traffic
from megatron.planning.traffic import Iteration, Sent, iteration_traffic, total

S, H, LAYERS, V = 128, 256, 4, 1024
B, M = 2, 8
BSH = B * S * H * 2
"""Bytes of an activation in 16 bits."""


def model(**changes):
    shape = {
        "num_layers": LAYERS,
        "hidden_size": H,
        "num_attention_heads": 4,
        "seq_length": S,
        "vocab_size": V,
        "untie_embeddings_and_output_weights": True,
    }
    return TransformerConfig(**{**shape, **changes})


def count(layout, world, stage=0, data_rank=0, **changes):
    iteration = Iteration(B, M, world)
    return iteration_traffic(
        model(**changes), ParallelConfig(**layout), iteration, stage=stage, data_rank=data_rank
    )


def tp(size, **more):
    return {"tensor_model_parallel_size": size, **more}


def pp(size, **more):
    return {"pipeline_model_parallel_size": size, **more}


def of_one_layer(layout, world, **changes):
    """Calls and bytes of a layer and micro-batch: what a model of twice the layers has more."""
    few = count(layout, world, **changes)
    many = count(layout, world, **{**changes, "num_layers": 2 * LAYERS})
    units = LAYERS * M
    return {
        kind: (
            (many[axis, kind].calls - sent.calls) / units,
            (many[axis, kind].moved_bytes - sent.moved_bytes) / units,
        )
        for (axis, kind), sent in few.items()
        if axis == "tp"
    }


@pytest.mark.parametrize("t", [2, 4])
def test_a_layer_all_reduces_four_activations(t):
    assert of_one_layer(tp(t), t) == {"all_reduce": (4, 4 * 2 * (t - 1) / t * BSH)}


def test_recomputed_layers_all_reduce_six():
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    assert of_one_layer(tp(2), 2, **full) == {"all_reduce": (6, 6 * BSH)}


@pytest.mark.parametrize("t", [2, 4])
def test_a_layer_with_split_sequences_makes_ten_passes(t):
    layout = tp(t, sequence_parallel=True)
    found = of_one_layer(layout, t)
    # Norms and biases of a layer are summed once an iteration: 4 norm vectors and 2 biases.
    vectors = found.pop("all_reduce")
    assert vectors == (0, 2 * (t - 1) / t * 6 * H * 4 / M)
    assert found == {"all_gather": (6, 6 * (t - 1) / t * BSH), "reduce_scatter": (4, 4 * (t - 1) / t * BSH)}


def test_the_loss_reduces_three_numbers_a_token_and_the_gradient_of_its_input():
    layers = 4 * LAYERS * M
    found = count(tp(2), 2)["tp", "all_reduce"]
    # The embedding's output, the gradient before the head, and the two calls of the loss in float32.
    assert found == Sent(layers + 4 * M, (layers + 2 * M) * BSH + M * 3 * B * S * 4)


@pytest.mark.parametrize(
    ("layout", "world", "size"),
    [
        (pp(2), 2, BSH),
        (pp(2, tensor_model_parallel_size=2), 4, BSH / 2),
        (pp(2, tensor_model_parallel_size=4, scatter_gather_tensors_in_pipeline=False), 8, BSH),
        (pp(2, tensor_model_parallel_size=4, sequence_parallel=True), 8, BSH / 4),
        (pp(2, context_parallel_size=2), 4, BSH / 2),
    ],
)
def test_a_boundary_takes_one_activation_each_way(layout, world, size):
    for stage in (0, 1):
        assert count(layout, world, stage)["pp", "send"] == Sent(M, M * size)


@pytest.mark.parametrize(
    ("layout", "neighbours"),
    [
        (pp(4), [1, 2, 2, 1]),
        (pp(4, num_virtual_stages_per_pipeline_rank=2), [3, 4, 4, 3]),
        (pp(4, pipeline_schedule="zb-v"), [2, 4, 4, 2]),
    ],
)
def test_stages_send_over_every_boundary_of_their_parts(layout, neighbours):
    for stage, expected in enumerate(neighbours):
        assert count(layout, 4, stage, num_layers=8)["pp", "send"] == Sent(M * expected, M * expected * BSH)


def test_receivers_gather_the_slices_of_what_crosses_a_boundary():
    assert count(pp(2, tensor_model_parallel_size=4), 8)["tp", "all_gather"] == Sent(M, M * 3 / 4 * BSH)
    whole = pp(2, tensor_model_parallel_size=4, scatter_gather_tensors_in_pipeline=False)
    assert ("tp", "all_gather") not in count(whole, 8)


def parameters_of_gpt(layers):
    """Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)); and the final norm."""
    return 12 * layers * H**2 + 13 * layers * H + (V + S) * H + 2 * H


@pytest.mark.parametrize("d", [2, 8])
def test_data_parallelism_sends_what_zero_says(d):
    tied = {"untie_embeddings_and_output_weights": False}
    parameters = parameters_of_gpt(LAYERS)
    share = (d - 1) / d
    plain = count({}, d, **tied)
    # And 8 bytes to agree on whether the gradients are finite.
    assert plain["dp", "all_reduce"] == Sent(2, 2 * share * (4 * parameters + 8))
    optim = count({"use_distributed_optimizer": True}, d, **tied)
    assert optim["dp", "reduce_scatter"] == Sent(1, share * 4 * parameters)
    assert optim["dp", "all_gather"] == Sent(1, share * 2 * parameters)
    grads = count({"data_parallel_sharding_strategy": "optim_grads"}, d, **tied)
    assert grads["dp", "reduce_scatter"] == Sent(M, M * share * 4 * parameters)
    assert grads["dp", "all_gather"] == Sent(1, share * 2 * parameters)
    weights = count({"data_parallel_sharding_strategy": "optim_grads_params"}, d, **tied)
    # Rajbhandari et al. 2020, section 7.2.2: weights for the forward and for the backward, and gradients. On
    # one stage the embeddings are kept from one to the other.
    layers = LAYERS * (12 * H**2 + 13 * H)
    assert weights["dp", "all_gather"].moved_bytes == M * share * 2 * (parameters + layers)
    assert weights["dp", "reduce_scatter"].moved_bytes == M * share * 4 * parameters


def test_both_ends_of_a_tied_embedding_add_up_in_float32():
    tied = {"untie_embeddings_and_output_weights": False}
    for stage in (0, 1):
        assert count(pp(2), 2, stage, **tied)["pp", "all_reduce"] == Sent(1, V * H * 4)
    assert ("pp", "all_reduce") not in count(pp(2), 2)
    assert ("pp", "all_reduce") not in count(pp(2, pipeline_schedule="zb-v"), 2, **tied)


def test_ranks_of_a_divided_optimizer_add_up_what_their_slices_hold():
    tied = {"untie_embeddings_and_output_weights": False}
    layout = pp(2, use_distributed_optimizer=True)
    parts = [count(layout, 4, data_rank=rank, **tied)["pp", "all_reduce"] for rank in (0, 1)]
    assert total([{("pp", "all_reduce"): part} for part in parts]) == {
        ("pp", "all_reduce"): Sent(2, V * H * 4)
    }


def test_overlapped_reductions_go_bucket_by_bucket():
    layout = {"overlap_grad_reduce": True, "ddp_bucket_size": 3 * H * H}
    buckets = count(layout, 2)["dp", "all_reduce"].calls - 1
    assert buckets > LAYERS
    assert count(layout, 2)["dp", "all_reduce"].moved_bytes == count({}, 2)["dp", "all_reduce"].moved_bytes


def test_one_rank_sends_nothing():
    assert count({}, 1) == {}


def test_a_world_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="world size 6 does not divide"):
        count(tp(4), 6)


def test_the_constants_are_those_of_what_is_counted():
    assert traffic.LOSS_BLOCK_BYTES == BLOCK_BYTES
    assert flat_buckets.ALIGNMENT == ALIGNMENT


def test_a_trillion_parameters_are_counted_at_once():
    """The largest model of Narayanan et al. 2021, table 1."""
    large = TransformerConfig(
        num_layers=128, hidden_size=25600, num_attention_heads=160, seq_length=2048, vocab_size=51200
    )
    layout = ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=64)
    found = iteration_traffic(large, layout, Iteration(1, 512, 3072), stage=5)
    activation = 2048 * 25600 * 2
    assert found["pp", "send"] == Sent(2 * 512, 2 * 512 * activation / 8)
    assert found["tp", "all_reduce"] == Sent(4 * 2 * 512, 4 * 2 * 512 * 2 * 7 / 8 * activation)
