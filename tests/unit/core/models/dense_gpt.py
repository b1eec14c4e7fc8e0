"""A GPT written out in plain float64 tensor algebra, one sequence and one head at a time: the reference.

It shares nothing with the library but the names and shapes of whole-model parameters.
"""

import math

import torch

from megatron.core.config import TransformerConfig

Weights = dict[str, torch.Tensor]


def logits(
    config: TransformerConfig,
    weights: Weights,
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens [b, s] -> [b, s, v]."""
    rows = []
    for row, ids in enumerate(tokens):
        positions = torch.arange(len(ids)) if position_ids is None else position_ids[row]
        segments = torch.zeros(len(ids)) if segment_ids is None else segment_ids[row]
        rows.append(_sequence(config, weights, ids, positions, segments))
    return torch.stack(rows)


def loss_sum(
    config: TransformerConfig,
    weights: Weights,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    scores = logits(config, weights, tokens, position_ids, segment_ids)
    log_probabilities = scores - torch.exp(scores).sum(-1, keepdim=True).log()
    e, v = config.label_smoothing, config.true_vocab_size
    targets = (1 - e) * torch.eye(v, dtype=torch.float64)[labels] + e / v  # [b, s, v]
    return -((targets * log_probabilities).sum(-1) * loss_mask).sum()


def _sequence(config, weights, ids, positions, segments):
    x = weights["embedding.word_embeddings.weight"][ids]  # [s, h]
    if config.position_embedding_type == "learned_absolute":
        x = x + weights["embedding.position_embeddings.weight"][positions]
    for number in range(config.num_layers):
        layer = f"decoder.layers.{number}"
        normed = _norm(config, weights, f"{layer}.input_layernorm", x)
        x = x + _attention(config, weights, f"{layer}.self_attention", normed, positions, segments)
        normed = _norm(config, weights, f"{layer}.pre_mlp_layernorm", x)
        x = x + _mlp(config, weights, f"{layer}.mlp", normed)
    x = _norm(config, weights, "decoder.final_layernorm", x)
    tied = not config.untie_embeddings_and_output_weights
    return x @ weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"].T


def _linear(weights, name, x):
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def _norm(config, weights, name, x):
    weight = weights[f"{name}.weight"]
    if config.normalization == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) ** 0.5 * weight
    centred = x - x.mean(-1, keepdim=True)
    spread = (centred.pow(2).mean(-1, keepdim=True) + config.norm_epsilon) ** 0.5
    return centred / spread * weight + weights[f"{name}.bias"]


def _attention(config, weights, name, x, positions, segments):
    heads, groups, d = config.num_attention_heads, config.num_kv_groups, config.head_dim
    fused = _linear(weights, f"{name}.linear_qkv", x)  # [s, (n + 2g) d]
    per_group = (heads // groups + 2) * d
    outputs = []
    for head in range(heads):
        group, position = divmod(head, heads // groups)
        start = group * per_group
        query = fused[:, start + position * d : start + (position + 1) * d]
        key = fused[:, start + per_group - 2 * d : start + per_group - d]
        value = fused[:, start + per_group - d : start + per_group]
        if config.qk_layernorm:
            query = _norm(config, weights, f"{name}.q_layernorm", query)
            key = _norm(config, weights, f"{name}.k_layernorm", key)
        if config.position_embedding_type == "rope":
            query, key = _rope(config, query, positions), _rope(config, key, positions)
        scores = query @ key.T / math.sqrt(d)
        order = torch.arange(len(x))
        hidden = (order[None, :] > order[:, None]) | (segments[None, :] != segments[:, None])  # [query, key]
        outputs.append(torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ value)
    return _linear(weights, f"{name}.linear_proj", torch.cat(outputs, -1))


def _rope(config, x, positions):
    """Pairs (i, i + r/2) as complex numbers, multiplied by exp(i * position * frequency)."""
    rotated = int(config.head_dim * config.rotary_percent)
    half = rotated // 2
    exponents = torch.arange(half, dtype=torch.float64) * 2 / rotated
    angles = positions[:, None] * torch.tensor(float(config.rotary_base), dtype=torch.float64) ** -exponents
    turned = torch.complex(x[:, :half], x[:, half:rotated]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[:, rotated:]), -1)


def _mlp(config, weights, name, x):
    inner = _linear(weights, f"{name}.linear_fc1", x)
    if config.swiglu:
        gate, up = inner[:, : config.ffn_size], inner[:, config.ffn_size :]
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    return _linear(weights, f"{name}.linear_fc2", inner)
