"""Recomputation changes what is kept, never what comes out."""

import pytest
import torch

from megatron.core.parameter import named_parameters
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.recompute import recompute_units
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape

DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "num_layers": 3}
METHODS = [("uniform", 1), ("uniform", 2), ("block", 1), ("block", 2), ("block", 3), ("uniform", None)]


def _recomputed(method, count):
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": count,
    }


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [
        ("uniform", 2, [([0, 1], True), ([2, 3], True), ([4], True)]),
        ("uniform", 9, [([0, 1, 2, 3, 4], True)]),
        ("uniform", None, [([i], True) for i in range(5)]),
        ("block", 2, [([0], True), ([1], True), ([2, 3, 4], False)]),
        ("block", 7, [([i], True) for i in range(5)] + [([], False)]),
    ],
)
def test_units(method, count, expected):
    units = recompute_units(gpt2_shape(**_recomputed(method, count)), 5)
    assert [(list(layers), recomputed) for layers, recomputed in units] == expected


def test_full_recomputation_without_a_method_is_refused():
    with pytest.raises(ValueError, match="--recompute-method"):
        recompute_units(gpt2_shape(recompute_granularity="full"), 2)


def _run(config):
    model, data = build(config), batch(config)
    calls, kept = [], []
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_pre_hook(lambda layer, _: calls.append(layer.layer_number))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(**data, stream=STREAM)
    loss.backward()
    grads = {named.name: named.parameter.grad for named in named_parameters(model)}
    return loss.detach(), grads, calls, sum(kept)


@pytest.mark.parametrize("shape", [gpt2_shape, llama_shape])
@pytest.mark.parametrize(("method", "count"), METHODS)
def test_loss_and_gradients_are_the_same_bit_for_bit_with_dropout_on(shape, method, count):
    loss, grads, calls, kept = _run(shape(**DROPOUT))
    assert calls == [0, 1, 2]
    again_loss, again_grads, again_calls, again_kept = _run(shape(**DROPOUT, **_recomputed(method, count)))
    assert torch.equal(loss, again_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, again_grads[name]), name
    repeated = again_calls[3:]
    assert sorted(repeated) == list(range(count if method == "block" else 3))
    assert again_kept < kept


def test_nothing_is_repeated_without_gradients():
    config = gpt2_shape(**_recomputed("uniform", 1))
    model, data = build(config), batch(config)
    with torch.no_grad():
        assert not model(**data, stream=STREAM).requires_grad
