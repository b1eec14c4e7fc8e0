"""What is compared with what."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORLD = 2
"""Ranks of each side."""


@dataclass(frozen=True)
class Shape:
    """A GPT-2-shaped model."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocab: int
    tied: bool


WIDE = Shape(layers=6, hidden=384, heads=6, seq_length=256, vocab=50304, tied=True)
"""30 million parameters, most of them word embeddings."""
DEEP = Shape(layers=12, hidden=384, heads=6, seq_length=256, vocab=8192, tied=False)
"""28 million parameters, most of them in layers, so that stages can be even. Untied, as a pipeline that knows
nothing of the model needs it. Here both sides spend nearly all of their time in the same matrix products, and
the output layer, where ours saves most, counts for little: engines are compared, and nothing may be lost."""

WIDE_UNTIED = replace(WIDE, layers=8, tied=False)
"""The first one as a pipeline: most of its work is the last stage's, in the output layer."""
TINY = Shape(layers=4, hidden=64, heads=2, seq_length=32, vocab=512, tied=True)
"""To see that everything runs; its times mean nothing."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    ours: str
    """Flags that split our run over two ranks."""
    theirs: str
    """Which of the other sides (see ``SIDES`` of ``torch_sides`` and ``own_module``)."""
    at_least: float
    """What tokens a second, ours over theirs, are held to."""
    shape: Shape
    batch: int = 8
    """Sequences of a step, of both ranks together."""
    microbatches: int = 1
    """Parts in which a rank works through its share of them."""
    own: bool = False
    """Whether the other side runs our module, so that engines are compared; in float32 alone."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.shape.seq_length


_TP = "--tensor-model-parallel-size 2"
_PP = "--pipeline-model-parallel-size 2"
_INTERLEAVED = f"{_PP} --num-virtual-stages-per-pipeline-rank 2"
_ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
_ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

CASES = {
    "dp": Case("--overlap-grad-reduce", "ddp", 1.15, WIDE),
    "dp-own": Case("--overlap-grad-reduce", "own-ddp", 1.0, WIDE, own=True),
    "tp": Case(_TP, "tp", 1.15, WIDE, batch=4),
    "tp-loss-parallel": Case(_TP, "tp-loss-parallel", 1.15, WIDE, batch=4),
    "tp-sp": Case(f"{_TP} --sequence-parallel", "tp-sp", 1.15, WIDE, batch=4),
    "pp": Case(_PP, "pp", 1.15, WIDE_UNTIED, microbatches=8),
    "pp-own": Case(_PP, "own-pp", 1.0, DEEP, microbatches=8, own=True),
    "pp-interleaved": Case(_INTERLEAVED, "pp-interleaved", 1.15, WIDE_UNTIED, microbatches=8),
    "pp-interleaved-own": Case(_INTERLEAVED, "own-pp-interleaved", 1.0, DEEP, microbatches=8, own=True),
    "pp-deep": Case(_PP, "pp", 1.0, DEEP, microbatches=8),
    "pp-interleaved-deep": Case(_INTERLEAVED, "pp-interleaved", 1.0, DEEP, microbatches=8),
    "zero3": Case(_ZERO3, "fully-shard", 1.15, WIDE),
    "zero3-own": Case(_ZERO3, "own-fully-shard", 1.0, WIDE, own=True),
    "zero1": Case(_ZERO1, "fully-shard", 1.15, WIDE),
    "zero1-own": Case(_ZERO1, "own-fully-shard", 1.0, WIDE, own=True),
}


def case_of(name: str, *, tiny: bool) -> Case:
    """The case of that name, in its own shape or a tiny one."""
    case = CASES[name]
    return replace(case, shape=replace(TINY, tied=case.shape.tied)) if tiny else case


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step, [batch, s] each: random, the same on all ranks and both sides."""
    draws = torch.Generator().manual_seed(0)
    size = (case.batch, case.shape.seq_length + 1)
    text = torch.randint(0, case.shape.vocab, size, generator=draws)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
