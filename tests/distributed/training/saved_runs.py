"""Runs with metrics files and checkpoints, and how a test reads what they leave."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from megatron.training.setup import attach_metrics
from megatron.training.training import build_hooks, train
from tests.training_harness import start

EXACT = (
    "iteration",
    "consumed_samples",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "weight_decay",
    "loss_scale",
    "skipped",
    "nan",
)
"""What of a record does not depend on the clock."""


def metered_runs(command_lines: list[list[str]]) -> None:
    """Several runs, one after the other, on the ranks that are already there, with their metrics files."""
    for argv in command_lines:
        run = start(argv)
        attach_metrics(run)
        train(run, build_hooks(run))


def layout(tp: int = 1, pp: int = 1) -> list[str]:
    """Flags of a layout; what is left of the world is data parallel."""
    return [f"--tensor-model-parallel-size={tp}", f"--pipeline-model-parallel-size={pp}"]


def resuming(root: Path | str) -> list[str]:
    """Flags of a job that goes on with what it finds in ``root``, and saves there."""
    return ["--save", str(root), "--load", str(root)]


def iterations(metrics_file: Path) -> list[dict]:
    """The iteration records, in the order in which they were written, without what depends on the clock."""
    return [
        {name: record[name] for name in EXACT}
        for record in map(json.loads, metrics_file.read_text().splitlines())
        if "split" not in record
    ]


def evaluations(metrics_file: Path) -> list[dict]:
    """The evaluation records, in the order in which they were written."""
    return [record for record in map(json.loads, metrics_file.read_text().splitlines()) if "split" in record]


def column(records: list[dict], name: str) -> list:
    """One field of every record."""
    return [record[name] for record in records]


def manifest_of(root: Path, iteration: int) -> dict:
    """A checkpoint's manifest, as the file says."""
    return json.loads((root / f"iter_{iteration:07d}" / "manifest.json").read_text())


def read_checkpoint(root: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every whole tensor of a checkpoint, put together by nothing but its manifest and safetensors."""
    folder = root / f"iter_{iteration:07d}"
    whole = {}
    for name, entry in manifest_of(root, iteration)["tensors"].items():
        counts = torch.zeros(entry["shape"], dtype=torch.int64)
        tensor = None
        for shard in entry["shards"]:
            with safe_open(folder / shard["file"], "pt") as file:
                part = file.get_tensor(shard["key"])
            place = tuple(
                slice(first, first + size)
                for first, size in zip(shard["offset"], shard["shape"], strict=True)
            )
            if tensor is None:
                tensor = torch.empty(entry["shape"], dtype=part.dtype)
            tensor[place] = part.view(shard["shape"])
            counts[place] += 1
        assert tensor is not None, name
        assert bool((counts == 1).all()), name
        whole[name] = tensor
    return whole


def assert_equal_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same tensors by name, number format and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
