#!/usr/bin/env bash
# Installs what is missing, then format, lint, types and tests. Arguments go to pytest, which runs all tests
# without them, in two processes side by side:
# ./launch/test.sh tests/unit -k buffer
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/launch/install.sh"
# The page of `invrl view` is tested in a browser. Where none can be had, those tests are skipped and say so.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get -qq update && apt-get -qq -y install --no-install-recommends chromium; } >/dev/null 2>&1 \
    || echo "[test] Chromium could not be installed" >&2
fi
export OMP_NUM_THREADS=1
cd "$ROOT"
BIN="$ROOT/.venv/bin"
contained() { "$BIN/python" "$ROOT/launch/run_contained.py" "$@"; }
contained "$BIN/ruff" format --check --quiet .
contained "$BIN/ruff" check --quiet .
contained "$BIN/pyright"
PYTEST=("$BIN/python" "$ROOT/launch/run_contained.py" "$BIN/python" -m pytest)
[ $# -eq 0 ] || exec "${PYTEST[@]}" "$@"

# Much of a test's time goes by while processes start and deadlines end. The halves take equally long.
SECOND_HALF=(tests/unit tests/e2e)
OUTPUT="$(mktemp)"
trap 'rm -f "$OUTPUT"' EXIT
"${PYTEST[@]}" "${SECOND_HALF[@]}" >"$OUTPUT" 2>&1 &
SECOND=$!
FAILED=0
"${PYTEST[@]}" tests "${SECOND_HALF[@]/#/--ignore=}" || FAILED=$?
wait "$SECOND" || FAILED=$?
cat "$OUTPUT"
exit "$FAILED"
