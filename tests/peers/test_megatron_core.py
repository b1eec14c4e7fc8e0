"""Our layouts against Megatron Core's GPT in one process: same weights, same batches.

It counts padded vocabulary columns among the probabilities, so it gets a vocabulary without padding, which it
can hold on one rank whatever its size. Ours are padded, which must not show.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness import run_ranks
from tests.training_harness import SHAPES, VOCAB, flags, start, train_run, whole_weights, write_corpus

PEER = Path(sys.prefix, "peers", "megatron_core")
PROGRAM = Path(__file__).with_name("megatron_core_gpt.py")
STEPS = 3
LEARNING_RATE = 0.5

pytestmark = pytest.mark.skipif(
    not (PEER / "megatron" / "core").is_dir(),
    reason=f"no Megatron Core in {PEER}: scripts/install_peers.sh fetches it",
)

COMMON = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "layernorm_epsilon": 1e-5}
CONFIGS = {
    "gpt2": {**COMMON, "activation": "gelu", "normalization": "LayerNorm", "add_bias_linear": True},
    "llama": {
        **COMMON,
        "activation": "silu",
        "gated_linear_unit": True,
        "ffn_hidden_size": 96,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
}
"""The same shapes in Megatron Core's words."""
MODELS = {
    "gpt2": {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
    "llama": {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
}

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2-vpp2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}


@dataclass
class Start:
    """What one rank would start from."""

    weights: dict[str, torch.Tensor]
    """Whole model, float64."""
    batches: dict[str, torch.Tensor]
    """Tokens, labels and loss mask, [steps, global batch, s] each."""


def command_line(prefix: str, shape: str, layout: str = "") -> list[str]:
    sgd = f"--optimizer sgd --sgd-momentum 0 --weight-decay 0 --clip-grad 0 --lr {LEARNING_RATE}"
    return flags(prefix, SHAPES[shape], *sgd.split(), "--train-iters", str(STEPS), *layout.split())


def starts(command_lines: list[list[str]]) -> list[Start]:
    found = []
    for argv in command_lines:
        run = start(argv)
        steps = [run.readers.train.take(run.division.batch.num_microbatches) for _ in range(STEPS)]
        batches = {
            name: torch.stack([torch.cat([micro[name] for micro in step]) for step in steps])
            for name in ("tokens", "labels", "loss_mask")
        }
        found.append(Start(whole_weights(run), batches))
    return found


def curves(command_lines: list[list[str]]) -> list[tuple[list[float], list[float]]]:
    """Losses and gradient norms of each run."""
    return [(record.losses, record.norms) for record in map(train_run, command_lines)]


def write_case(folder: Path, shape: str, begin: Start) -> None:
    folder.mkdir()
    length = begin.batches["tokens"].shape[-1]
    model = {**MODELS[shape], "vocab_size": VOCAB, "max_sequence_length": length}
    case = {"config": CONFIGS[shape], "model": model, "lr": LEARNING_RATE}
    (folder / "case.json").write_text(json.dumps(case))
    weights = {name: weight.float() for name, weight in begin.weights.items()}
    save_file(weights, folder / "weights.safetensors")
    save_file(begin.batches, folder / "batches.safetensors")


def run_peer(folder: Path, shapes: list[str]) -> dict[str, dict[str, list[float]]]:
    """Losses and gradient norms of Megatron Core, by shape."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *shapes],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PEER), "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(zip(shapes, map(json.loads, ended.stdout.splitlines()[-len(shapes) :]), strict=True))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """By shape: Megatron Core's figures, and ours by layout."""
    folder = tmp_path_factory.mktemp("peers")
    prefix = write_corpus(folder / "corpus")
    begins = run_ranks(1, starts, [command_line(prefix, shape) for shape in SHAPES])[0]
    cases = [(shape, layout) for shape in SHAPES for layout in LAYOUTS]
    ours = run_ranks(
        2,
        curves,
        [command_line(prefix, shape, LAYOUTS[layout]) for shape, layout in cases],
        timeout_seconds=120,
    )[0]
    for shape, begin in zip(SHAPES, begins, strict=True):
        write_case(folder / shape, shape, begin)
    peers = run_peer(folder, list(SHAPES))
    return peers, dict(zip(cases, ours, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradient_norms_are_those_of_megatron_core(compared, shape, layout):
    peers, ours = compared
    losses, norms = ours[shape, layout]
    assert len(losses) == STEPS
    assert losses == pytest.approx(peers[shape]["losses"], rel=1e-6)
    assert norms == pytest.approx(peers[shape]["norms"], rel=1e-5)
    # Not all the same: the weights have moved, by gradients that both sides found.
    assert abs(losses[-1] - losses[0]) > 1e-2
