import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from megatron.core.extensions import probe, probe_all
from megatron.core.extensions.registry import LAYER_NORM
from megatron.core.parameter import Placement
from megatron.core.transformer import LayerNorm, use_layer_norm
from tests.unit.core.models.shapes import over

CPU = torch.device("cpu")

FUSED = """
    import torch.nn.functional as F

    calls = []

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        calls.append(tuple(normalized_shape))
        return {result}
"""
SOUND = FUSED.format(result="F.layer_norm(input, normalized_shape, weight, bias, eps)")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Installs fake packages: path to source text."""
    before = set(sys.modules)

    def install(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
            for folder in path.relative_to(tmp_path).parents[:-1]:
                (tmp_path / folder / "__init__.py").touch()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "fused_layer_norm_cuda"):
            del sys.modules[name]


def apex(text, kernels=""):
    return {"apex/normalization/fused_layer_norm.py": text, "fused_layer_norm_cuda.py": kernels}


def test_what_is_not_installed_is_no_problem():
    assert all(finding.function is None and finding.problem is None for finding in probe_all(CPU))


def test_a_sound_one_computes_the_same_in_its_place(packages):
    packages(apex(SOUND))
    finding = probe(LAYER_NORM, CPU)
    assert finding.problem is None
    calls = sys.modules["apex.normalization.fused_layer_norm"].calls
    calls.clear()
    norm = LayerNorm(5, epsilon=1e-3, parallel=over(), placement=Placement(torch.float32, CPU))
    with torch.no_grad():
        norm.weight.copy_(torch.arange(5.0))
        norm.bias.fill_(0.5)
    hidden = torch.randn(3, 2, 5)
    plain = norm(hidden)
    use_layer_norm(torch.nn.Sequential(norm), finding.function)
    assert torch.equal(norm(hidden), plain)
    assert calls == [(5,)]


def on_import(statement):
    return {"apex/__init__.py": statement}


def giving(expression):
    return apex(FUSED.format(result=expression))


BROKEN = {
    "RuntimeError: built for another CUDA": on_import(
        "raise RuntimeError('built for another CUDA\\nand more')"
    ),
    "SystemExit: 1": on_import("raise SystemExit(1)"),
    "ImportError": on_import("raise ImportError"),
    "ModuleNotFoundError: No module named 'surely_not_there'": on_import("import surely_not_there"),
    "SyntaxError: ": on_import("def ("),
    # What goes by the name of apex on PyPI is a web framework.
    "ImportError: the installed package is not NVIDIA's apex (No": {"apex/models.py": "class Root: ..."},
    "ImportError: the installed package is not NVIDIA's apex ": {"apex.py": "version = 1"},
    # The Python half without the compiled one.
    "ImportError: undefined symbol": apex(SOUND, kernels="raise ImportError('undefined symbol')"),
    "AttributeError: module 'apex": apex("version = 1"),
    "ZeroDivisionError: division by zero": giving("1 / 0"),
    "ArithmeticError: it differs from PyTorch's layer norm by nan in torch.float32": giving(
        "input * weight * float('nan') + bias"
    ),
    "ArithmeticError: it differs from PyTorch's layer norm by ": giving(
        "F.layer_norm(input, normalized_shape, weight, bias, 1.0)"
    ),
    "RuntimeError: The differentiated ": giving(
        "F.layer_norm(input, normalized_shape, weight, bias.detach(), eps)"
    ),
}


@pytest.mark.parametrize(("problem", "files"), BROKEN.items())
def test_a_broken_one_is_left_alone_and_the_reason_is_one_line(packages, problem, files):
    packages(files)
    finding = probe(LAYER_NORM, CPU)
    assert finding.function is None
    assert finding.problem.startswith(problem)
    assert "\n" not in finding.problem


def test_the_plain_function_passes_its_own_check():
    LAYER_NORM.check(F.layer_norm, CPU)
