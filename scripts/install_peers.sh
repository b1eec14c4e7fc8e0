#!/usr/bin/env bash
# Fetch the systems that tests compare with and that can't share an environment with this one: megatron-core
# installs a package called megatron, as this project is, so it goes into a folder of its own inside .venv.
# Idempotent. Tests that need it are skipped where it is absent.
#
#   VENV=/path   the environment (default: .venv beside README.md); scripts/setup.sh makes it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
pin="megatron-core==0.16.1"
folder="$VENV/peers/megatron_core"
stamp="$folder/.requirement"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$pin" ]; then exit 0; fi
[ -x "$VENV/bin/python" ] || { echo "install_peers: no $VENV; make it first: bash scripts/setup.sh" >&2; exit 2; }

echo "install_peers: fetching $pin (about 10 MB)" >&2
rm -rf "$folder"
# Without what it depends on: torch, numpy and packaging are in the environment, the rest it does without.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "$pin"
printf '%s' "$pin" >"$stamp"
