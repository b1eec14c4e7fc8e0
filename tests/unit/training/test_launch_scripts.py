"""The launch scripts in scripts/: their flags make a run of the size that they are written for."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron.training.arguments import parse_arguments, resolve
from megatron.training.plan import batch_plans

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
GPT2_VOCABULARY = 50257


def _flags(script: str, tmp_path: Path) -> list[str]:
    """What the script hands to pretrain_gpt.py: run it with a launcher that writes its arguments down."""
    written = tmp_path / "arguments"
    (tmp_path / "bin").mkdir()
    for launcher in ("torchrun", "srun"):
        fake = tmp_path / "bin" / launcher
        fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{written}\n')
        fake.chmod(0o755)
    environment = {
        "VENV": str(tmp_path),  # whose programs are taken before all others
        "PATH": os.environ["PATH"],
        "DATA": "corpus",
        "VOCAB": "vocab.json",
        "MERGES": "merges.txt",
        "GPUS": "8",
        "SLURM_SUBMIT_DIR": str(SCRIPTS.parent),
    }
    subprocess.run(["bash", str(SCRIPTS / script)], env=environment, check=True)
    arguments = written.read_text().splitlines()
    return arguments[arguments.index("pretrain_gpt.py") + 1 :]


@pytest.mark.parametrize(
    ("script", "world_size", "parameters", "replicas"),
    [("pretrain_gpt_345m.sh", 8, 345e6, 8), ("pretrain_gpt_175b.slurm", 1024, 175e9, 8)],
)
def test_flags_make_the_run_that_the_script_names(script, world_size, parameters, replicas, tmp_path):
    config = resolve(parse_arguments(_flags(script, tmp_path), "test"), None, GPT2_VOCABULARY, world_size)
    plans = batch_plans(config, world_size).values()
    assert {plan.data_parallel_size for plan in plans} == {replicas}
    model = config.model
    layers, h, v, s = model.num_layers, model.hidden_size, GPT2_VOCABULARY, model.seq_length
    # Narayanan et al. 2021, eq. 2.
    counted = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert counted == pytest.approx(parameters, rel=0.03)


def test_slurm_gives_the_ranks_that_the_layout_needs():
    header = (SCRIPTS / "pretrain_gpt_175b.slurm").read_text()
    nodes, tasks, gpus = (
        int(re.search(rf"#SBATCH --{name}=(\d+)", header)[1])
        for name in ("nodes", "ntasks-per-node", "gpus-per-node")
    )
    assert nodes * tasks == 1024
    assert tasks == gpus == 8


def test_without_gpus_the_script_asks_for_a_number(tmp_path):
    given = {"DATA": "corpus", "VOCAB": "vocab.json", "MERGES": "merges.txt", "VENV": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.write_text("#!/usr/bin/env bash\necho No devices were found\nexit 6\n")
    fake.chmod(0o755)
    script = ["bash", str(SCRIPTS / "pretrain_gpt_345m.sh")]
    done = subprocess.run(
        script, env={"PATH": os.environ["PATH"], **given}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "pretrain_gpt_345m.sh: no GPUs found; set GPUS=N to start N ranks all the same\n"
