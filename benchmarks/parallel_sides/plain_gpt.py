"""The GPT that a user of PyTorch would write: full logits, and PyTorch's own cross entropy on them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_sides.cases import Shape


class Block(nn.Module):
    """Pre-norm attention and MLP. Heads are counted from what the projection gives, so it may be split."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden
        self.head_dim = h // shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc, self.out = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        return self.mlp(self.attend(x))

    def attend(self, x: Tensor) -> Tensor:
        """The attention half."""
        fused = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_dim))  # [b, s, n, 3, d]
        query, key, value = fused.permute(3, 0, 2, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.proj(attended.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        """The feed-forward half."""
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class PlainGPT(nn.Module):
    """All of the model, or a run of its layers with what belongs before and after them."""

    def __init__(self, shape: Shape, layers: range, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.positions = nn.Embedding(shape.seq_length, shape.hidden) if first else None
        self.blocks = nn.ModuleList(Block(shape) for _ in layers)
        self.norm = nn.LayerNorm(shape.hidden) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None
        self.apply(_initialize)
        if shape.tied and first and last:
            self.tie()

    def tie(self) -> None:
        """Let the output matrix be the word embeddings'."""
        assert self.embed is not None
        assert self.head is not None
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, s], or hidden states [b, s, h], -> hidden states, or logits [b, s, v]."""
        if self.embed is not None and self.positions is not None:
            x = self.embed(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        torch.nn.init.zeros_(module.bias)
