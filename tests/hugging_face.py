"""Our weights under the names of Hugging Face's models."""

import torch
import transformers


def hugging_face_model(config, kind):
    """A model of Hugging Face's with the shape of ``config``, on random weights."""
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


def to_hugging_face(config, kind, tensors):
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
