"""The one place that asks which kind of device there is."""

import torch


def device_type() -> str:
    """``"cuda"`` where torch sees a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_backend(kind: str) -> str:
    """The communication library for a device kind: nccl for ``"cuda"``, gloo for ``"cpu"``."""
    return "nccl" if kind == "cuda" else "gloo"


def local_device(kind: str, local_rank: int) -> torch.device:
    """Bind this process to its device and return it.

    Raises:
        ValueError: if a GPU is asked for that this node does not have.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: this node has {torch.cuda.device_count()}; "
            "start at most that many ranks a node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def seed_default_generator(device: torch.device, seed: int) -> None:
    """Seed the generator that dropout on ``device`` draws from."""
    if device.type == "cuda":
        index = device.index if device.index is not None else 0
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def fuses_dropout(device: torch.device) -> bool:
    """Whether PyTorch's kernels for ``device`` drop in one pass, by itself or inside fused attention.

    Elsewhere it takes several passes and keeps masks in the format of what is dropped, or wider.
    """
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_statistics(device: torch.device) -> dict[str, int]:
    """Memory of this process in bytes: ``allocated``, ``max_allocated``, ``reserved``, ``max_reserved``.

    On a CPU all four come from the resident set of the process.
    """
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "max_allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "max_reserved": torch.cuda.max_memory_reserved(device),
        }
    current, peak = _resident_bytes()
    return {"allocated": current, "max_allocated": peak, "reserved": current, "max_reserved": peak}


def _resident_bytes() -> tuple[int, int]:
    """Resident set of this process, now and at its peak, in bytes (Linux's /proc)."""
    found = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return found["VmRSS"], found["VmHWM"]


def elementwise_tile(device: torch.device) -> int:
    """Elements to handle at a time where several elementwise passes follow each other.

    On a CPU what fits its last cache (8 MB of float32); on a GPU so many that launching costs nothing.
    """
    return 2**26 if device.type == "cuda" else 2**21
