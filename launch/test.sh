#!/usr/bin/env bash
# Installs what is missing, then format, lint, types and tests, in two processes side by side:
# ./launch/test.sh                        the quick tests
# ./launch/test.sh --all                  all tests; writes tests/suite.json
# ./launch/test.sh tests/unit -k buffer   what pytest makes of these arguments
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$ROOT/launch/install.sh"
# The page of `invrl view` is tested in a browser. Where none can be had, those tests are skipped and say so.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "[test] installing Chromium"
  install_chromium="apt-get -qq update && apt-get -qq -y install --no-install-recommends chromium"
  timeout 300 bash -c "$install_chromium" </dev/null >/dev/null 2>&1 \
    || echo "[test] Chromium could not be installed" >&2
fi
export OMP_NUM_THREADS=1
export PYTHONUTF8=1 # tests read our sources, whatever the locale is
cd "$ROOT"
BIN="$ROOT/.venv/bin"
contained() { "$BIN/python" "$ROOT/launch/run_contained.py" "$@"; }
contained "$BIN/ruff" format --check --quiet .
contained "$BIN/ruff" check --quiet .
contained "$BIN/pyright"
PYTEST=("$BIN/python" "$ROOT/launch/run_contained.py" "$BIN/python" -m pytest)
CHOICE=(-m "not slow")
ALL=()
RECORD=()
if [ "${1:-}" = --all ]; then
  shift
  CHOICE=()
  ALL=(--all)
  RECORD=(--record)
fi
[ $# -eq 0 ] || exec "${PYTEST[@]}" "$@"

# Much of a test's time goes by while processes start and deadlines end. The halves take equally long.
REPORTS="$(mktemp -d)"
trap 'rm -rf "$REPORTS"' EXIT
run_half() {  # NUMBER
  local parts
  mapfile -t parts < <("$BIN/python" tests/suite.py half "$1" ${ALL[@]+"${ALL[@]}"})
  "${PYTEST[@]}" ${CHOICE[@]+"${CHOICE[@]}"} --junitxml "$REPORTS/$1.xml" "${parts[@]}"
}
run_half 1 >"$REPORTS/1.txt" 2>&1 &
SECOND=$!
FAILED=0
run_half 0 || FAILED=$?
wait "$SECOND" || FAILED=$?
cat "$REPORTS/1.txt"
"$BIN/python" tests/suite.py summary ${RECORD[@]+"${RECORD[@]}"} "$REPORTS"/*.xml
exit "$FAILED"
