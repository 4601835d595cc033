#!/usr/bin/env bash
# Installs what is missing, then format, lint, types and tests. Arguments go to pytest:
# ./launch/test.sh tests/unit -k buffer
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/launch/install.sh"
export OMP_NUM_THREADS=1
cd "$ROOT"
BIN="$ROOT/.venv/bin"
contained() { "$BIN/python" "$ROOT/launch/run_contained.py" "$@"; }
contained "$BIN/ruff" format --check --quiet .
contained "$BIN/ruff" check --quiet .
contained "$BIN/pyright"
exec "$BIN/python" "$ROOT/launch/run_contained.py" "$BIN/python" -m pytest "$@"
