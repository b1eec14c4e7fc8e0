"""A model over several ranks against plain float64 algebra."""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.communication import all_reduce
from megatron.core.config import TransformerConfig
from megatron.core.models import GPTModel
from megatron.core.parameter import NamedParameter, named_parameters
from tests.unit.core.models import dense_gpt
from tests.unit.core.models.shapes import build, gpt2_shape, llama_shape, true_weights


def shapes(**changes: Any) -> dict[str, TransformerConfig]:
    """Models that differ in all that matters for how they are split."""
    return {
        "gpt2": gpt2_shape(label_smoothing=0.1, **changes),
        "gpt2_qk_norm": gpt2_shape(qk_layernorm=True, untie_embeddings_and_output_weights=True, **changes),
        "llama": llama_shape(add_qkv_bias=True, qk_layernorm=True, **changes),
        "llama_one_group_tied": llama_shape(
            num_query_groups=1, add_bias_linear=True, untie_embeddings_and_output_weights=False, **changes
        ),
        # Three tokens padded to 4 or 8 leave ranks with one true token or none.
        "tiny_vocabulary": gpt2_shape(vocab_size=3, make_vocab_size_divisible_by=2, **changes),
    }


def dense_loss_and_weights(
    config: TransformerConfig, data: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dense_gpt.Weights]:
    """The loss of the whole model, and its whole weights with their gradients."""
    weights = true_weights(build(config))
    loss = dense_gpt.loss_sum(config, weights, **data)
    loss.backward()
    return loss.detach(), weights


def whole_gradient(named: NamedParameter, group: dist.ProcessGroup) -> torch.Tensor:
    """The gradient of the whole parameter: pieces of all ranks, added where several hold partial sums."""
    facts, grad = named.facts, named.parameter.grad
    assert grad is not None
    if not facts.split and facts.global_shape == tuple(grad.shape):
        return all_reduce(grad.clone(), group) if facts.partial_over_tp else grad
    assert not facts.partial_over_tp
    whole = torch.zeros(facts.global_shape, dtype=grad.dtype)
    for piece in facts.pieces:
        rows = grad.narrow(facts.dim, piece.local, piece.length)
        whole.narrow(facts.dim, piece.start, piece.length).add_(rows)
    return all_reduce(whole, group)


def assert_gradients(
    model: GPTModel, weights: dense_gpt.Weights, group: dist.ProcessGroup, what: str = ""
) -> None:
    """Every gradient is that of the dense model; padding has none."""
    for named in named_parameters(model):
        reference = weights[named.name].grad
        assert reference is not None
        bound = 1e-11 * max(1.0, reference.abs().max().item())
        assert_close(whole_gradient(named, group), reference, bound, f"{what}: {named.name}")
        if not named.facts.pieces:
            assert not named.parameter.any()
            assert not named.parameter.grad.any()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    # Not torch.testing.assert_close, whose first call on every rank imports 800 modules.
    assert actual.shape == expected.shape, what
    assert (actual - expected).abs().max() <= bound, what
