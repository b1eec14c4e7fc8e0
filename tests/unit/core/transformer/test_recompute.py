"""Recomputation changes what is kept, never what comes out."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.config import TransformerConfig
from megatron.core.parameter import named_parameters
from megatron.core.tensor_parallel import defer_weight_gradients
from megatron.core.transformer import MLP, SelfAttention, TransformerLayer
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.recompute import recompute, recompute_units, recomputed_where_saved
from megatron.core.weight_gradients import DeferredGradients
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape

DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "num_layers": 3}


def _full(method, count):
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": count,
    }


def _selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules or None}


FULL = [("uniform", 1), ("uniform", 2), ("block", 1), ("block", 2), ("block", 3), ("uniform", None)]
SELECTIVE = [(), ("core_attn",), ("mlp",), ("layernorm",), ("core_attn", "mlp", "layernorm")]
ALL = [_full(*choice) for choice in FULL] + [_selective(*choice) for choice in SELECTIVE]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (_full("uniform", 2), [([0, 1], True), ([2, 3], True), ([4], True)]),
        (_full("uniform", 9), [([0, 1, 2, 3, 4], True)]),
        (_full("uniform", None), [([i], True) for i in range(5)]),
        (_full("block", 2), [([0], True), ([1], True), ([2, 3, 4], False)]),
        (_full("block", 7), [([i], True) for i in range(5)] + [([], False)]),
        (_selective(), [([0, 1, 2, 3, 4], False)]),
        ({}, [([0, 1, 2, 3, 4], False)]),
    ],
)
def test_units(changes, expected):
    units = recompute_units(gpt2_shape(**changes), 5)
    assert [(list(layers), recomputed) for layers, recomputed in units] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (_selective("mlp", "moe", "attn"), "attn moe: unknown; valid are core_attn, mlp, layernorm"),
        ({"recompute_modules": ("mlp",)}, "--recompute-granularity selective"),
        ({**_full("uniform", 1), "recompute_modules": ("mlp",)}, "--recompute-granularity selective"),
        ({"distribute_saved_activations": True}, "--recompute-granularity full"),
        ({**_selective(), "distribute_saved_activations": True}, "--recompute-granularity full"),
    ],
)
def test_flags_without_effect_and_unknown_modules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gpt2_shape(**changes)


def test_full_recomputation_without_a_method_is_refused():
    with pytest.raises(ValueError, match="--recompute-method"):
        recompute_units(gpt2_shape(recompute_granularity="full"), 2)


def _run(config: TransformerConfig, deferred=None):
    """Loss and gradients, and how often what ran: layers by number, other modules by kind."""
    model, data = build(config), batch(config)
    calls, arrivals = Counter(), Counter()
    for module in model.decoder.layers.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_pre_hook(lambda layer, _: calls.update([layer.layer_number]))
        kind = next((kind for kind in (SelfAttention, MLP, Norm) if isinstance(module, kind)), None)
        if kind is not None:
            module.register_forward_pre_hook(lambda _, args, kind=kind: calls.update([kind]))

    def arrived(parameter, name):
        if parameter.grad is not None:  # hooks run, too, where a gradient is left for later
            arrivals.update([name])

    for named in named_parameters(model):
        hook = partial(arrived, name=named.name)
        named.parameter.register_post_accumulate_grad_hook(hook)
    if deferred is not None:
        defer_weight_gradients(model, deferred)
        deferred.deferring = True
    loss = model(**data, stream=STREAM)
    forward_calls = calls.copy()
    loss.backward()
    if deferred is not None:
        assert not any(name.endswith("linear_fc1.weight") for name in arrivals)
        deferred.close_pass()
        deferred.run_pass()
    grads = {named.name: named.parameter.grad for named in named_parameters(model)}
    assert arrivals == dict.fromkeys(grads, 1)
    return loss.detach(), grads, calls - forward_calls


@pytest.fixture(scope="module", params=[gpt2_shape, llama_shape])
def kept(request):
    """A shape, and what it gives where everything is kept."""
    backend = "unfused" if request.param is gpt2_shape else "auto"

    def shape(**changes):
        return request.param(**DROPOUT, attention_backend=backend, **changes)

    loss, grads, repeated = _run(shape())
    assert not repeated
    return shape, loss, grads


@pytest.mark.parametrize("changes", ALL, ids=str)
@pytest.mark.parametrize("defer", [False, True])
def test_loss_and_gradients_are_the_same_bit_for_bit_and_arrive_once(kept, changes, defer):
    shape, loss, grads = kept
    again_loss, again_grads, repeated = _run(shape(**changes), DeferredGradients() if defer else None)
    assert torch.equal(loss, again_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, again_grads[name]), name
    if changes["recompute_granularity"] == "full":
        block = changes["recompute_method"] == "block"
        again = range(changes["recompute_num_layers"] if block else 3)
        assert {number: repeated[number] for number in range(3)} == {i: int(i in again) for i in range(3)}
    else:
        modules = changes["recompute_modules"] or ()
        # Of the layers' modules only those named run again; what is recomputed of attention is inside it.
        expected = {MLP: 3 * ("mlp" in modules), Norm: 6 * ("layernorm" in modules)}
        assert repeated == Counter({kind: count for kind, count in expected.items() if count})


@pytest.mark.parametrize("changes", [_full("uniform", 2), _selective("core_attn", "mlp", "layernorm")])
def test_a_graph_may_run_backward_twice(changes):
    config = gpt2_shape(**DROPOUT, **changes)
    model = build(config)
    total = model(tokens=batch(config)["tokens"], stream=STREAM).sum()
    total.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    total.backward()
    assert all(
        torch.equal(parameter.grad, 2 * grad)
        for parameter, grad in zip(model.parameters(), once, strict=True)
    )


@pytest.mark.parametrize("changes", [_full("uniform", 1), _selective("core_attn", "mlp", "layernorm")])
def test_nothing_is_repeated_without_gradients(changes):
    config = gpt2_shape(**changes)
    model, data = build(config), batch(config)
    with torch.no_grad():
        assert not model(**data, stream=STREAM).requires_grad


def test_calls_nest_and_only_their_inputs_are_kept():
    kept, runs = [], []
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True)

    def inner(y):
        runs.append("inner")
        return y.sin().exp()

    def outer(y, factor):
        runs.append("outer")
        return recompute(inner, y * factor).cos()

    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = recompute(outer, x, 3.0)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    result.sum().backward()
    sine = (3 * x).sin()
    expected = -sine.exp().sin() * sine.exp() * (3 * x).cos() * 3
    torch.testing.assert_close(x.grad, expected.detach(), rtol=1e-12, atol=0)
    assert runs == ["outer", "inner", "outer", "inner", "inner"]


def test_a_second_run_ends_when_all_that_was_saved_is_found():
    x = torch.ones(3, requires_grad=True)
    finished = []

    def function(y):
        y = y.exp() + 1  # a sum saves nothing
        finished.append(True)
        return y

    recompute(function, x).sum().backward()
    assert finished == [True]
    assert torch.equal(x.grad, torch.ones(3).exp())


def test_an_input_changed_in_place_is_noticed():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    result = recompute(torch.exp, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_an_output_is_made_again_where_it_was_saved_even_as_a_view():
    norm = torch.nn.LayerNorm(6, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    kept = []

    def run(spare):
        normed = norm(x)
        if not spare:
            return normed.view(3, 8)[:, 4:].mul(weight).sum()
        with recomputed_where_saved(norm, x, normed):
            return normed.view(3, 8)[:, 4:].mul(weight).sum()

    (expected,) = torch.autograd.grad(run(False), weight)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = run(True)
    assert not any(tensor.shape == (3, 4) for tensor in kept)
    norm.register_forward_hook(lambda *_: kept.append("again"))
    (gradient,) = torch.autograd.grad(result, weight)
    assert torch.equal(gradient, expected)
    assert kept.count("again") == 1
