"""Recomputation on several ranks: the same numbers bit for bit, and the collectives that it repeats."""

import torch

from megatron.core.communication import Meter, MeteredGroup
from megatron.core.context_parallel import take_local
from megatron.core.distributed.fully_sharded import FullyShardedStore
from megatron.core.parameter import named_parameters
from megatron.core.transformer.recompute import divides_saved_inputs_over
from tests.harness import make_state, run_ranks
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape, over

DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "seq_length": 8}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
DIVIDED = {**FULL, "distribute_saved_activations": True}
PAIR = {"recompute_num_layers": 2}


def _selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _run(shape, layout, changes):
    """Loss, gradients, and the calls and bytes that this rank sent, by axis and kind."""
    config = shape(**DROPOUT, **changes)
    meter = Meter()
    state = make_state(cp=2) if layout == "cp" else make_state(tp=2)
    parallel = over(
        MeteredGroup(state.group("tp"), "tp", meter),
        MeteredGroup(state.group("cp"), "cp", meter),
        sequence_parallel=layout == "sp",
    )
    model = build(config, parallel=parallel)
    data = {name: take_local(x, 1, parallel.cp) for name, x in batch(config).items()}
    loss = model(**data, stream=STREAM)
    loss.backward()
    sent = {key: (traffic.calls, traffic.moved_bytes) for key, traffic in meter.take().items()}
    return loss.detach(), {n.name: n.parameter.grad for n in named_parameters(model)}, sent


def _what_recomputation_adds(shape, layout, cases):
    """Calls and bytes more than without it, of each case, after comparing loss and gradients."""
    loss, grads, sent = _run(shape, layout, {})
    added = []
    for changes in cases:
        again_loss, again_grads, again_sent = _run(shape, layout, changes)
        assert torch.equal(loss, again_loss), changes
        for name, grad in grads.items():
            assert torch.equal(grad, again_grads[name]), f"{changes}: {name}"
        more = {}
        for key, (calls, moved) in again_sent.items():
            before = sent.get(key, (0, 0.0))
            if (calls, moved) != before:
                more[key] = (calls - before[0], moved - before[1])
        added.append(more)
    return added


# What one rank of two sends, in bytes: all of [s, b, h] in an all-reduce, half of it in the others.
HIDDEN = 8 * 3 * 32 * 8


def _added(layout, **calls):
    share = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}
    return {(layout, kind): (count, count * share[kind] * HIDDEN) for kind, count in calls.items()}


def test_tensor_parallel_ranks_repeat_the_forward_s_all_reduces():
    cases = [FULL, {**FULL, **PAIR}, DIVIDED, {**DIVIDED, **PAIR}]
    cases += [_selective("core_attn"), _selective("layernorm"), _selective("mlp")]
    both_layers = _added("tp", all_reduce=4)
    expected = [both_layers, both_layers]
    # Each unit fetches its input from the ranks that share it.
    expected += [{**both_layers, **_added("tp", all_gather=2)}, {**both_layers, **_added("tp", all_gather=1)}]
    expected += [{}, {}, _added("tp", all_reduce=2)]
    for added in run_ranks(2, _what_recomputation_adds, gpt2_shape, "tp", cases):
        assert added == expected


def test_sequence_parallel_ranks_repeat_the_forward_s_gathers_and_scatters():
    cases = [FULL, DIVIDED, _selective("core_attn", "layernorm"), _selective("mlp")]
    both_layers = _added("tp", all_gather=4, reduce_scatter=4)
    # A rank keeps its own part of an input already: there is nothing to divide.
    expected = [both_layers, both_layers, {}, _added("tp", all_gather=2, reduce_scatter=2)]
    for added in run_ranks(2, _what_recomputation_adds, llama_shape, "sp", cases):
        assert added == expected


def test_context_parallel_ranks_repeat_keys_and_values_only_with_whole_layers():
    cases = [FULL, _selective("core_attn", "layernorm", "mlp")]
    for full, selective in run_ranks(2, _what_recomputation_adds, llama_shape, "cp", cases):
        assert selective == {}
        # To the other rank of the ring: keys and values, [s/2, b, g d] each with g d = h/2, of both layers.
        assert {axis for axis, _ in full} == {"cp"}
        assert sum(moved for _, moved in full.values()) == 2 * 2 * HIDDEN / 4


def _refusal():
    tp = make_state(tp=2).group("tp")
    try:
        divides_saved_inputs_over(gpt2_shape(**DIVIDED, hidden_size=5, kv_channels=2), over(tp))
    except ValueError as error:
        return str(error)
    return None


def test_a_hidden_size_that_does_not_divide_is_refused():
    for message in run_ranks(2, _refusal):
        assert message.startswith("--distribute-saved-activations: --hidden-size 5 does not divide")


def _run_fully_sharded(changes):
    """Losses of two micro-batches and this rank's gradients, weights being gathered layer by layer."""
    config = gpt2_shape(**DROPOUT, **changes)
    model, state = build(config), make_state()
    store = FullyShardedStore([model], [list(model.decoder.layers.values())], state.data_group)
    store.zero_grad(2)
    losses = [model(**batch(config), stream=STREAM.fold(number, state.rank("dp"))) for number in range(2)]
    for loss in losses:
        loss.backward()
    store.finish()
    return [loss.detach() for loss in losses], [bucket.gradients.clone() for bucket in store.buckets]


def _compare_fully_sharded(cases):
    losses, grads = _run_fully_sharded({})
    for changes in cases:
        again_losses, again_grads = _run_fully_sharded(changes)
        for value, again in zip(losses + grads, again_losses + again_grads, strict=True):
            assert torch.equal(value, again), changes


def test_layers_whose_weights_are_gathered_run_again_too():
    cases = [FULL, {**FULL, **PAIR}, _selective("core_attn", "mlp", "layernorm")]
    run_ranks(2, _compare_fully_sharded, cases)
