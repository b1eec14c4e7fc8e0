#!/usr/bin/env bash
# Every check of the project: style, types, layering, all tests. Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bash scripts/install_peers.sh || echo "test: going on without the systems that some tests compare with" >&2
export PATH="$(realpath -m "${VENV:-.venv}")/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

ruff check .
ruff format --check .
mypy
lint-imports
if [ $# -gt 0 ]; then
  python -m pytest "$@"
else
  # Two at a time: most tests use one core. The files of a fixture stay together.
  python -m pytest --numprocesses 2 --dist loadfile
fi
