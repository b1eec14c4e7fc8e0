"""The oldest and the newest libraries that the project says it works with (README, "Two commands")."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run_with(folder: Path, requirement: str, tests: list[str]) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), requirement]
    if subprocess.run(install, capture_output=True).returncode:
        pytest.skip(f"{requirement} cannot be had here")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    warnings = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    name, version = requirement.split("==")
    found = subprocess.run(
        [sys.executable, "-c", f"import {name}; print({name}.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(version), "the tests would run with another version"
    subprocess.run([sys.executable, "-m", "pytest", *warnings, *tests], cwd=ROOT, env=environment, check=True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("requirement", ["numpy==2.0.0", "numpy==2.4.6"])
def test_numpy(tmp_path, requirement):
    _run_with(tmp_path, requirement, ["tests/unit", "tests/distributed/training/test_step.py"])


@pytest.mark.parametrize("requirement", ["numpy==2.0.0"])
def test_a_few_tests_pass_on_the_oldest_numpy(tmp_path, requirement):
    _run_with(tmp_path, requirement, ["tests/unit/core/datasets/test_gpt_indices.py"])
