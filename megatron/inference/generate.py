"""Continue a text, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NextLogits = Callable[[Tensor], Tensor]
"""From tokens [b, s] to the logits [b, v] of the token after the last, equal on every rank."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_new_tokens: int = 64
    """Tokens to add at most."""
    temperature: float = 1.0
    """Logits are divided by this; 0 always takes the most likely token."""
    top_k: int = 0
    """Choose among the k most likely tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the most likely tokens that together have this probability."""
    seed: int = 1234
    """Seed of the draws; equal seeds give equal texts in any layout."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"--temperature {self.temperature}: must be 0 or above")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be 0 (off) or above")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed}: must lie in [0, 2^63)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must lie in (0, 1]")


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompt: Sequence[int],
    options: SamplingOptions,
    *,
    context_length: int,
    eod: int | None = None,
) -> list[int]:
    """Continue ``prompt``; the oldest tokens fall out of the model's view beyond ``context_length``.

    Args:
        next_logits: the model.
        prompt: at least one token.
        options: how to choose.
        context_length: tokens that the model can look at.
        eod: the token that ends a text; None never ends early.

    Returns:
        The new tokens alone, without the one that ended the text.
    """
    if not prompt:
        raise ValueError("the prompt holds no token; give some text to continue")
    draws = torch.Generator().manual_seed(options.seed)
    tokens = list(prompt)
    for _ in range(options.max_new_tokens):
        window = torch.tensor([tokens[-context_length:]])  # [1, s]
        token = _choose(next_logits(window)[0].cpu(), options, draws)
        if token == eod:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _choose(logits: Tensor, options: SamplingOptions, draws: torch.Generator) -> int:
    """One token from logits [v]."""
    if options.temperature == 0:
        return int(logits.argmax())
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / options.temperature
    if options.top_k:
        floor = scaled.topk(min(options.top_k, scaled.numel())).values[-1]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    if options.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= options.top_p  # the first token past the mass stays in
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=draws))
