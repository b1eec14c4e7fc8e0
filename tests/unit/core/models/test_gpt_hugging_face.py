"""The same weights in Hugging Face's models: logits, loss and every gradient."""

import pytest
import torch
import transformers

from megatron.core.parameter import Placement, named_parameters
from tests.unit.core.models.shapes import STREAM, batch, build, gpt2_shape, llama_shape


def _hugging_face(config, kind):
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.num_positions,
        "attn_implementation": "eager",
    }
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **common,
                activation_function="gelu",
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    common |= {
        "intermediate_size": config.ffn_size,
        "num_key_value_heads": config.num_kv_groups,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.rotary_base)},
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    return model_class(config_class(**common))


def _split_qkv(config, fused):
    """Rows [g * (n/g + 2) * d, ...] of the fused matrix or bias -> query, key and value rows, apart."""
    groups, d = config.num_kv_groups, config.head_dim
    queries = config.num_attention_heads // groups * d
    query, key, value = fused.unflatten(0, (groups, -1)).split((queries, d, d), dim=1)
    return [part.flatten(0, 1) for part in (query, key, value)]


def _to_hugging_face(config, kind, tensors):
    """Whole-model tensors under our names -> the same (as they lie) under Hugging Face's."""
    out = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        if words[0] == "embedding":
            table = {
                "word_embeddings": ("wte", "embed_tokens"),
                "position_embeddings": ("wpe", None),
            }[words[1]]
            out[f"transformer.{table[0]}.weight" if kind == "gpt2" else f"model.{table[1]}.weight"] = tensor
        elif words[0] == "output_layer":
            out["lm_head.weight"] = tensor
        elif words[1] == "final_layernorm":
            out[f"transformer.ln_f.{words[2]}" if kind == "gpt2" else f"model.norm.{words[2]}"] = tensor
        elif kind == "gpt2":
            out |= _gpt2_layer(config, words, tensor)
        else:
            out |= _llama_layer(config, words, tensor)
    return out


def _gpt2_layer(config, words, tensor):
    prefix, module, leaf = f"transformer.h.{words[2]}", words[-2], words[-1]
    if module == "linear_qkv":
        tensor = torch.cat(_split_qkv(config, tensor))
    names = {
        "input_layernorm": "ln_1",
        "linear_qkv": "attn.c_attn",
        "linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "linear_fc1": "mlp.c_fc",
        "linear_fc2": "mlp.c_proj",
    }
    if module.startswith("linear") and leaf == "weight":
        tensor = tensor.T  # its linear layers keep [in, out]
    return {f"{prefix}.{names[module]}.{leaf}": tensor}


def _llama_layer(config, words, tensor):
    prefix, module, leaf = f"model.layers.{words[2]}", words[-2], words[-1]
    if module == "linear_qkv":
        parts = zip("qkv", _split_qkv(config, tensor), strict=True)
        return {f"{prefix}.self_attn.{letter}_proj.{leaf}": part for letter, part in parts}
    if module == "linear_fc1":
        parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
        return {f"{prefix}.mlp.{part_name}.{leaf}": part for part_name, part in parts}
    names = {
        "input_layernorm": "input_layernorm",
        "linear_proj": "self_attn.o_proj",
        "q_layernorm": "self_attn.q_norm",
        "k_layernorm": "self_attn.k_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "linear_fc2": "mlp.down_proj",
    }
    return {f"{prefix}.{names[module]}.{leaf}": tensor}


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
    reference = _hugging_face(config, kind).to(dtype)
    weights = {n.name: n.parameter.detach()[: n.facts.global_shape[0]] for n in named}
    missing = reference.load_state_dict(_to_hugging_face(config, kind, weights), strict=False)
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
    translated = _to_hugging_face(config, kind, grads)
    parameters = dict(reference.named_parameters())
    assert set(translated) == set(parameters)
    for name, parameter in parameters.items():
        own = _without_key_bias(config, kind, name, translated[name])
        theirs = _without_key_bias(config, kind, name, parameter.grad)
        bound = (1e-10 if exact else 1e-4) * theirs.abs().max().item()
        torch.testing.assert_close(own, theirs, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
