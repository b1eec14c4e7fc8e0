"""Time and memory of the fused output layer and loss against full logits, on one rank of a CPU.

    python benchmarks/linear_cross_entropy.py --dtype bfloat16 --tokens 2048 --hidden-size 384

Both run forward and backward in turn in one process; medians and the median of the rounds' ratios are
printed. Memory is what the resident set grows by at its peak (Linux).
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import memory_statistics
from megatron.core.tensor_parallel import VocabShard, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of losses from all logits at once, in float32 as is usual. hidden: [n, 1, h]; weight: [v, h]."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels.flatten(), reduction="sum")


def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same sum without ever holding all logits."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=10))
    shard = VocabShard.of(weight.shape[0], weight.shape[0], group)
    return linear_cross_entropy(hidden, weight, labels, group, shard)[0]


def forward_backward(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Seconds of one forward and backward."""
    hidden.grad = weight.grad = None
    start = time.perf_counter()
    loss(hidden, weight, labels).backward()
    return time.perf_counter() - start


def peak_bytes(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> int:
    """Bytes that the resident set grows by at its peak in a forward and backward."""
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory_statistics(hidden.device)["allocated"]
    loss(hidden, weight, labels).backward()
    return memory_statistics(hidden.device)["max_allocated"] - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1234)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, 1, options.hidden_size).to(dtype).requires_grad_()
    weight = (torch.randn(options.vocab_size, options.hidden_size) * 0.02).to(dtype).requires_grad_()
    labels = torch.randint(options.vocab_size, (options.tokens, 1))
    variants: dict[str, Loss] = {"full logits": full_logits, "fused": fused}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for loss in variants.values():  # libraries allocate what they keep
        forward_backward(loss, hidden, weight, labels)
    peaks = {name: peak_bytes(loss, hidden, weight, labels) for name, loss in variants.items()}
    for _ in range(options.rounds):
        for name, loss in variants.items():
            seconds[name].append(forward_backward(loss, hidden, weight, labels))
    for name, times in seconds.items():
        print(
            f"{name:>12}: median {statistics.median(times):.3f} s, best {min(times):.3f} s, "
            f"peak {peaks[name] / 2**20:.0f} MiB"
        )
    ratio = statistics.median(a / b for a, b in zip(seconds["full logits"], seconds["fused"], strict=True))
    print(
        f"{options.dtype} [{options.tokens}, {options.hidden_size}] x [{options.hidden_size}, "
        f"{options.vocab_size}], {options.threads} threads: fused is {ratio:.2f} times as fast "
        f"with {peaks['fused'] / peaks['full logits']:.2f} of the memory"
    )


if __name__ == "__main__":
    main()
