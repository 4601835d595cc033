#!/usr/bin/env bash
# Installs what is missing, then format, lint, types and tests, in processes side by side:
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
case "${1:-}" in
  "" | --all)
    contained "$BIN/pyright" & # beside the tests, which often wait
    types=$!
    trap 'kill "$types" 2>/dev/null || true' EXIT
    status=0
    "$BIN/python" tests/suite.py "$@" || status=$?
    wait "$types" || status=1
    exit "$status"
    ;;
  *)
    contained "$BIN/pyright"
    exec "$BIN/python" "$ROOT/launch/run_contained.py" "$BIN/python" -m pytest "$@"
    ;;
esac
