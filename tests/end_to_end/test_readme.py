"""The commands of README.md and docs/, as a reader copies them: in order, in a fresh copy of the project.

A block of bash runs unless the line above it says otherwise::

    <!-- test: skip: the reason why it can't run here -->
    <!-- test: nightly: the reason why it takes long -->

The blocks of docs/ go on from where the README's walk has come to, and run nightly.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- test: (\w+): ([^\n]+) -->\n)?^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# What a launcher around the tests would say, and where the tests' own environment lies.
NOT_FOR_READERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VENV", "PYTHONPATH")


@dataclass(frozen=True)
class Block:
    """Commands between a pair of fences."""

    where: str
    mark: str
    """``run``, ``skip`` or ``nightly``."""
    reason: str
    commands: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        where = f"{page.relative_to(ROOT)}:{line}"
        found.append(Block(where, match[1] or "run", match[2] or "", match[3]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
README = blocks(PAGES[0])


@pytest.fixture
def project(tmp_path):
    """A fresh copy of the project, as a clone of the working tree would be, whose .venv is the tests' own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    folder = tmp_path / "clone"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def run(folder, chosen, seconds=240):
    """Run blocks one after the other; give what each printed, standard error included."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_READERS}
    environment |= ENVIRONMENT
    environment["PATH"] = f"{folder / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    printed = []
    for block in chosen:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.commands],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        tail = done.stdout[-3000:]
        assert done.returncode == 0, f"{block.where}: exit code {done.returncode}\n{block.commands}\n{tail}"
        printed.append(done.stdout)
    return printed


def test_every_block_runs_or_says_why_not():
    assert {block.mark for block in ALL} <= {"run", "skip", "nightly"}
    marks = sum(page.read_text(encoding="utf-8").count("<!-- test:") for page in PAGES)
    assert marks == sum(block.mark != "run" for block in ALL), "a mark stands above no block of bash"
    assert sum(block.mark == "run" for block in README) >= 6


def test_the_two_lines_in_the_readme_are_those_of_the_file():
    corpus = (ROOT / "data" / "two_lines.jsonl").read_text(encoding="utf-8").splitlines()
    (shown,) = re.findall(r"```json\n(.*?)```", PAGES[0].read_text(encoding="utf-8"), re.DOTALL)
    assert len(corpus) == 2
    for line, start in zip(corpus, shown.splitlines(), strict=True):
        assert line.startswith(start.removesuffix(' ..."}'))


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.mark == "skip"], ids=lambda block: block.where
)
def test_is_not_run(block):
    pytest.skip(block.reason)


def walk(project):
    """Run the README's blocks and check what came of them."""
    printed = "\n".join(run(project, [block for block in README if block.mark == "run"]))
    made = project / "runs" / "tiny"
    records = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    losses = {record["iteration"]: record["lm_loss"] for record in records if "split" not in record}
    assert list(losses) == list(range(1, 121))
    assert losses[61] == pytest.approx(losses[60], abs=0.7)  # resumed, and not begun anew at 5.7
    assert losses[1] > 5
    assert losses[120] < 1.5
    assert "world size 1: a single process" in printed
    assert "world size 2, started by torchrun" in printed
    assert "Young captains came to ask what the sea would do" in printed
    assert (made / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_s_commands(project):
    walk(project)


@pytest.mark.nightly
def test_the_commands_of_docs(project):
    walk(project)
    run(project, [block for block in ALL if block.mark == "run" and block not in README])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_commands_that_take_long(project):
    chosen = [block for block in ALL if block.mark == "nightly"]
    printed = run(project, chosen, seconds=1500)
    assert "better than that by" in printed[0]
