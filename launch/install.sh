#!/usr/bin/env bash
# Makes the project's own Python environment (.venv in the project root), once. Both commands call it;
# running it again costs milliseconds until pyproject.toml or invrl/requirements change.
#
# INVRL_DEVICE=cpu|gpu overrides what is found (gpu: nvidia-smi works). INVRL_INSTALLER=pip|uv likewise.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/.installed"     # hash of what was asked for, written last
MARKER="$VENV/.installing"   # stands while an install is under way: seen at the start, it broke
cd "$ROOT"

say() { printf '[install] %s\n' "$*"; }
die() { printf '[install] error: %s\n' "$*" >&2; exit 1; }

device="${INVRL_DEVICE:-$(nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)}"
[ "$device" = cpu ] || [ "$device" = gpu ] || die "INVRL_DEVICE is '$device'; use cpu or gpu"

wanted="$( { printf '%s\n%s\n' "$device" "$ROOT"; cat pyproject.toml launch/install.sh invrl/requirements/*.txt; } \
  | sha256sum | cut -d' ' -f1)"
is_done() { [ -x "$VENV/bin/python" ] && [ ! -e "$MARKER" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; }
if is_done; then exit 0; fi

# One install at a time: the second one waits here, then finds the work done.
exec 9<"$ROOT/launch/install.sh"
if command -v flock >/dev/null; then flock -n 9 || { say "waiting for another install"; flock 9; }; fi
if is_done; then exit 0; fi

python=""
for candidate in python3.11 python3.12 python3 python; do
  # The interpreter itself, not a version manager's shim: a shim would stand between us and what we end.
  python="$("$candidate" -c 'import sys; (3, 11) <= sys.version_info < (3, 13) and print(sys.executable)' 2>/dev/null)" \
    && [ -n "$python" ] && break
done
[ -n "$python" ] || die "no Python 3.11 or 3.12 on PATH; install one (its venv module too) and run this again"
contained() { "$python" "$ROOT/launch/run_contained.py" "$@"; }  # nothing outlives this script

uv=""
case "${INVRL_INSTALLER:-}" in
  "") uv="$(command -v uv || true)"; [ -n "$uv" ] || [ ! -x "$VENV/bin/uv" ] || uv="$VENV/bin/uv" ;;
  uv) uv="$(command -v uv)" || die "INVRL_INSTALLER=uv, but there is no uv on PATH" ;;
  pip) ;;
  *) die "INVRL_INSTALLER is '$INVRL_INSTALLER'; use pip or uv" ;;
esac

started=$SECONDS
if [ -e "$MARKER" ]; then say "an earlier install did not finish: starting afresh"; rm -rf "$VENV"; fi
if ! "$VENV/bin/python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
  say "making $VENV with $("$python" --version)"
  rm -rf "$VENV"
  mkdir "$VENV"
  touch "$MARKER"
  # A Linux distribution may ship Python without ensurepip; uv does not need it.
  "$python" -m venv "$VENV" >/dev/null \
    || { [ -n "$uv" ] && "$uv" venv -q --allow-existing --seed --python "$python" "$VENV"; } \
    || die "$python cannot make a virtual environment; install its venv package (python3.11-venv)"
fi
touch "$MARKER"
rm -f "$STAMP"

install() {  # arguments as for `pip install`
  if [ -n "$uv" ]; then
    ( eval "$("$VENV/bin/python" launch/uv_settings.py)"
      contained "$uv" pip install --quiet --python "$VENV/bin/python" "$@" ) && return
    say "uv did not succeed: trying pip"
    uv=""
  fi
  contained "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}
if [ "$device" = cpu ]; then suffix=""; else suffix="-gpu"; fi
say "installing for $device with ${uv:-pip} (a few minutes, about 3 GB on cpu)"
install -c "invrl/requirements/constraints$suffix.txt" -e ".[$device,dev]"
# sglang (on cpu) and megatron-core list packages that only CUDA machines can install.
install --no-deps -r "invrl/requirements/nodeps$suffix.txt"

printf '%s\n' "$wanted" > "$STAMP.new"
mv "$STAMP.new" "$STAMP"
rm -f "$MARKER"
say "done in $((SECONDS - started)) s"
