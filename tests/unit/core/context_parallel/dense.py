"""Attention as the formula has it, with all scores in memory: what the others are compared to."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Problem:
    """Whole-sequence inputs, the gradient of the output, and who sees whom."""

    query: Tensor  # [s, b, n, d]
    key: Tensor  # [s, b, g, d]
    value: Tensor
    gradient: Tensor
    causal: bool
    segment_ids: Tensor | None  # [b, s]


# Documents of 5, 13, 1 and 13 tokens; and one that goes on after another. None ends where a chunk does.
SEGMENTS = torch.tensor([[0] * 5 + [1] * 13 + [2] + [3] * 13, [7] * 9 + [2] * 12 + [7] * 11])


def make_problem(
    *,
    groups: int = 4,
    causal: bool = True,
    segments: bool = False,
    dtype: torch.dtype = torch.float64,
    heads: int = 4,
    d: int = 8,
) -> Problem:
    """A problem of 2 sequences of 32 tokens."""
    generator = torch.Generator().manual_seed(groups)

    def draw(n: int) -> Tensor:
        return torch.randn(32, 2, n, d, dtype=torch.float64, generator=generator).to(dtype)

    tensors = draw(heads), draw(groups), draw(groups), draw(heads)
    return Problem(*tensors, causal=causal, segment_ids=SEGMENTS if segments else None)


def dense(problem: Problem, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value, in float64.

    Args:
        problem: what to attend.
        mask: [b, n, s, s], multiplied with the probabilities.
    """
    inputs = [x.double().detach().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    query, key, value = (x.permute(1, 2, 0, 3) for x in inputs)  # [b, n, s, d]
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    s = scores.shape[-1]
    allowed = torch.ones(1, 1, s, s, dtype=torch.bool)
    if problem.causal:
        allowed = allowed.tril()
    if problem.segment_ids is not None:
        ids = problem.segment_ids
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])[:, None]
    probabilities = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    if mask is not None:
        probabilities = probabilities * mask
    output = (probabilities @ value).permute(2, 0, 1, 3)
    output.backward(problem.gradient.double())
    return output.detach(), *(x.grad for x in inputs)


def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest deviation, over the largest element of each tensor."""
    pairs = zip(found, expected, strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
