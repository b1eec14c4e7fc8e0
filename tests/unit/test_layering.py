"""The entry scripts are no package, so import-linter does not see them: this does."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")])
BENCHMARKS = sorted(ROOT.glob("benchmarks/*.py"))


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_there_are_scripts_to_look_at():
    assert ROOT / "pretrain_gpt.py" in SCRIPTS


def test_no_script_imports_another_and_nothing_imports_a_script():
    modules = {path.stem for path in [*SCRIPTS, *BENCHMARKS]} | {"tools", "benchmarks"}
    for path in [*SCRIPTS, *ROOT.glob("megatron/**/*.py")]:
        tops = {name.split(".")[0] for name in _imported(path)}
        assert not tops & modules, f"{path.relative_to(ROOT)} imports {sorted(tops & modules)}"


def test_a_benchmark_imports_entry_scripts_at_most():
    entries = {path.stem for path in ROOT.glob("*.py")}
    modules = ({path.stem for path in [*SCRIPTS, *BENCHMARKS]} | {"tools", "benchmarks"}) - entries
    for path in BENCHMARKS:
        tops = {name.split(".")[0] for name in _imported(path)}
        assert not tops & modules, f"{path.relative_to(ROOT)} imports {sorted(tops & modules)}"


def test_the_library_reads_no_environment_and_parses_no_flags():
    for path in ROOT.glob("megatron/core/**/*.py"):
        text, imported = path.read_text(), _imported(path)
        assert "os.environ" not in text, path
        assert "os.getenv" not in text, path
        assert "argparse" not in imported, path
