"""No GPU, no or broken optional packages: a run finishes, or is refused by name, with the same numbers."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import launch
from tests.training_harness import LLAMA_SHAPE, flags, write_corpus

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
LAYOUTS = {
    "alone": (1, ["--deterministic-mode"]),
    "TP2": (2, ["--tensor-model-parallel-size", "2"]),
    "PP2": (2, ["--pipeline-model-parallel-size", "2"]),
    "DP2": (2, ["--overlap-grad-reduce"]),
}
FORMATS = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16", "--initial-loss-scale", "1024"]}
EVERYTHING = (
    "--train-iters 3 --eval-iters 1 --eval-interval 2 --log-interval 1 --log-params-norm --log-throughput "
    "--log-num-zeros-in-grad --log-timers-to-tensorboard --log-memory-to-tensorboard --manual-gc "
    "--manual-gc-interval 2 --hidden-dropout 0.1 --attention-dropout 0.1"
).split()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


def hide_gpus():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def losses(metrics):
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["lm_loss"] for record in records if "split" not in record]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_format_trains_on_cpus(prefix, tmp_path, layout):
    world, more = LAYOUTS[layout]
    found = {}
    for name, precision in FORMATS.items():
        metrics = tmp_path / f"{name}.jsonl"
        outputs = ["--metrics-file", str(metrics), "--tensorboard-dir", str(tmp_path / name)]
        shape = [*LLAMA_SHAPE, "--num-layers", "2"] if name == "fp16" else TINY
        argv = flags(prefix, shape, *more, *precision, *EVERYTHING, *outputs)
        job = launch(world, argv, tmp_path, hide_gpus).wait()
        assert job.codes == [0] * world, job.errors
        assert job.errors == [""] * world
        assert not any("cuda" in output.lower() for output in job.outputs)
        found[name] = losses(metrics)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [(one["iteration"], one.get("split")) for one in records] == [
            (1, None),
            (2, None),
            (2, "valid"),
            (3, None),
            (3, "valid"),
        ]
        assert all(math.isfinite(one["lm_loss"]) for one in records)
        assert not any(one.get("skipped") or one.get("nan") for one in records)
        assert all(one["peak_memory_bytes"] > 10**7 for one in records if "split" not in one)
    assert found["bf16"] == pytest.approx(found["fp32"], rel=2e-2)


def test_what_needs_a_gpu_is_refused_by_name(prefix, tmp_path):
    job = launch(1, flags(prefix, TINY, "--distributed-backend", "nccl"), tmp_path, hide_gpus).wait()
    assert job.codes == [2]
    said = "--distributed-backend nccl needs GPUs, and this machine shows none: leave it out, or give gloo"
    assert job.errors == [f"error: {said}\n"]


FAKES = {
    "raises on import": "raise RuntimeError('built for another CUDA')",
    "exits on import": "import sys; sys.exit(3)",
    "is another package": "from types import SimpleNamespace as Configurator",
}


def with_apex(folder):
    sys.path.insert(0, str(folder))


def test_a_broken_apex_costs_one_line_and_no_number(prefix, tmp_path):
    """What goes by the name of apex may be anything: the plain path gives the same numbers."""
    metrics = tmp_path / "plain.jsonl"
    argv = flags(prefix, TINY, "--train-iters", "3", "--tensor-model-parallel-size", "2", "--metrics-file")
    job = launch(2, [*argv, str(metrics)], tmp_path).wait()
    assert job.codes == [0, 0], job.errors
    assert "> optional extensions in use: none\n" in job.outputs[0]
    assert "apex" not in "".join(job.outputs)
    for number, (what, source) in enumerate(FAKES.items()):
        folder = tmp_path / str(number)
        (folder / "apex").mkdir(parents=True)
        (folder / "apex" / "__init__.py").write_text(source)
        found = tmp_path / f"{number}.jsonl"
        job = launch(2, [*argv, str(found)], tmp_path, functools.partial(with_apex, folder)).wait()
        assert job.codes == [0, 0], (what, job.errors)
        said = [line for line in "".join(job.outputs).splitlines() if "apex" in line]
        assert len(said) == 1, what
        assert said[0].startswith("apex is installed but not fit for use (")
        assert said[0].endswith("): plain PyTorch takes the place of its fused layer norm")
        assert "> optional extensions in use: none\n" in job.outputs[0]
        assert losses(found) == losses(metrics), what


def test_no_module_of_the_program_imports_what_is_optional():
    optional = "apex transformer_engine flash_attn triton amp_C"
    program = (
        "import sys\n"
        f"for name in {optional.split()}: sys.modules[name] = None\n"  # an import of it now fails
        "import pretrain_gpt, megatron.core.transformer, megatron.core.models, megatron.training.training\n"
        "print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
