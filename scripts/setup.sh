#!/usr/bin/env bash
# Make .venv once, with everything that training and the checks need. Idempotent: a second call does nothing
# until a requirements file changes.
#
#   TORCH_BUILD=cpu|cuda   which build of torch to take (default: cuda where an NVIDIA driver answers, else cpu)
#   PYTHON=python3.12      the interpreter to build the environment from (default: python3; 3.11 or newer)
#   VENV=/path             where the environment goes (default: .venv beside README.md)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
if [ -z "${TORCH_BUILD:-}" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then TORCH_BUILD=cuda; else TORCH_BUILD=cpu; fi
fi
case "$TORCH_BUILD" in
    cpu | cuda) ;;
    *) echo "setup: TORCH_BUILD=$TORCH_BUILD is neither cpu nor cuda" >&2; exit 2 ;;
esac

stamp="$VENV/.requirements"
wanted="$(cat requirements.txt requirements-dev.txt) $TORCH_BUILD"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

command -v "$PYTHON" >/dev/null 2>&1 || { echo "setup: no $PYTHON; install Python 3.11 or newer, or set PYTHON" >&2; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$PYTHON" --version) is too old; Python 3.11 or newer is needed (set PYTHON to choose another)" >&2
    exit 2
}
if [ "$TORCH_BUILD" = cpu ]; then size="about 1.5 GB"; else size="several GB"; fi
echo "setup: making $VENV with $("$PYTHON" --version); this takes some minutes and $size of disk" >&2
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

echo "setup: installing torch for $TORCH_BUILD" >&2
torch_pin="$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt)"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
if [ "$TORCH_BUILD" = cpu ]; then
    # A few hundred MB instead of several GB. Where that build can't be reached, the ordinary one works as well.
    pip --retries 0 --timeout 20 "$torch_pin+cpu" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
        echo "setup: no CPU build of torch could be had; taking the ordinary one" >&2
fi
pip "$torch_pin"
echo "setup: installing the other requirements" >&2
pip -r requirements-dev.txt
printf '%s' "$wanted" >"$stamp"
echo "setup: $VENV is ready" >&2
