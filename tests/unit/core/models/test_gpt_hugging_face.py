"""The same weights in Hugging Face's models: logits, loss and every gradient."""

import pytest
import torch

from megatron.core.parameter import Placement, named_parameters
from tests.hugging_face import hugging_face_model, to_hugging_face
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape


def _without_key_bias(config, kind, name, tensor):
    """Softmax takes no notice of a key bias (without RoPE): the true gradient is zero, ours is rounding."""
    if kind == "gpt2" and name.endswith("c_attn.bias"):
        h = config.hidden_size
        return torch.cat((tensor[:h], tensor[2 * h :]))
    return tensor


CASES = {
    "gpt2": ("gpt2", gpt2_shape(), torch.float32),
    "gpt2_float64": ("gpt2", gpt2_shape(), torch.float64),
    "llama": ("llama", llama_shape(), torch.float32),
    "llama_tied": ("llama", llama_shape(untie_embeddings_and_output_weights=False), torch.float32),
    "qwen2": ("qwen2", llama_shape(add_qkv_bias=True, rotary_base=1000000), torch.float32),
    "qwen3": ("qwen3", llama_shape(qk_layernorm=True, kv_channels=16), torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_hugging_face(case):
    kind, config, dtype = CASES[case]
    model, data = build(config, Placement(dtype, torch.device("cpu"))), batch(config)
    named = list(named_parameters(model))
    reference = hugging_face_model(config, kind).to(dtype)
    weights = {n.name: n.parameter.detach()[: n.facts.global_shape[0]] for n in named}
    missing = reference.load_state_dict(to_hugging_face(config, kind, weights), strict=False)
    tied = not config.untie_embeddings_and_output_weights
    assert missing.missing_keys == (["lm_head.weight"] if tied else [])
    assert not missing.unexpected_keys
    reference.tie_weights()

    expected_logits = reference(data["tokens"]).logits  # [b, s, v]
    losses = torch.nn.functional.cross_entropy(
        expected_logits.flatten(0, 1), data["labels"].flatten(), reduction="none"
    )
    expected = (losses * data["loss_mask"].flatten()).sum()
    expected.backward()
    loss = model(**data, stream=STREAM)
    loss.backward()

    exact = dtype == torch.float64
    logits = model(tokens=data["tokens"], stream=STREAM).transpose(0, 1)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-11 if exact else 1e-4)
    tokens = data["loss_mask"].sum()
    torch.testing.assert_close(loss / tokens, expected / tokens, rtol=0, atol=1e-12 if exact else 1e-5)
    grads = {n.name: n.parameter.grad[: n.facts.global_shape[0]] for n in named}
    translated = to_hugging_face(config, kind, grads)
    parameters = dict(reference.named_parameters())
    assert set(translated) == set(parameters)
    for name, parameter in parameters.items():
        own = _without_key_bias(config, kind, name, translated[name])
        theirs = _without_key_bias(config, kind, name, parameter.grad)
        bound = (1e-10 if exact else 1e-4) * theirs.abs().max().item()
        torch.testing.assert_close(own, theirs, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
