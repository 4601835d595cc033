#!/usr/bin/env bash
# Makes the project's own Python environment (.venv in the project root), once. Both commands call it;
# running it again costs milliseconds until pyproject.toml or invrl/requirements change.
#
# INVRL_DEVICE=cpu|gpu overrides what is found (gpu: nvidia-smi works). INVRL_INSTALLER=pip|uv likewise.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/.installed"     # hash of what was asked for, and the project's folder; written last
MARKER="$VENV/.installing"   # stands while an install is under way: seen at the start, it broke
cd "$ROOT"
export PYTHONUTF8=1          # our files are UTF-8, whatever the locale is
export PIP_USER=0            # what a user's settings of pip may say otherwise would leave .venv empty
unset PIP_TARGET PIP_PREFIX PYTHONHOME

say() { printf '[install] %s\n' "$*"; }
die() { printf '[install] error: %s\n' "$*" >&2; exit 1; }

device="${INVRL_DEVICE:-$(nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)}"
[ "$device" = cpu ] || [ "$device" = gpu ] || die "INVRL_DEVICE is '$device'; use cpu or gpu"

wanted="$( { printf '%s\n' "$device"; cat pyproject.toml launch/install.sh invrl/requirements/*.txt; } \
  | sha256sum | cut -d' ' -f1)"
STAMPED="$wanted
$ROOT"
has() {  # MODULE ...: whether the environment's own Python runs and finds them
  "$VENV/bin/python" -c 'import sys, importlib.util as imports
sys.exit(not ((3, 11) <= sys.version_info < (3, 13) and all(map(imports.find_spec, sys.argv[1:]))))' "$@" 2>/dev/null
}
is_done() {
  [ ! -e "$MARKER" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$STAMPED" ] && has ray torch sglang megatron
}
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

if [ "$device" = cpu ]; then suffix=""; else suffix="-gpu"; fi
pins="invrl/requirements/constraints$suffix.txt"
read -r download_gb disk_gb < <(sed -nE 's/^# Size: ([0-9.]+) GB to download, ([0-9.]+) GB on disk\..*/\1 \2/p' "$pins")
size="about $download_gb GB to download, $disk_gb GB on disk"
check_room() {  # pip and uv keep what they download in their caches too, maybe on another disk
  local free_gb
  free_gb="$("$python" -c 'import shutil, sys
free_gb = shutil.disk_usage(sys.argv[1]).free / 1e9
if free_gb < float(sys.argv[2]): print(f"{free_gb:.1f}")' "$ROOT" "$disk_gb")"
  [ -z "$free_gb" ] \
    || die "$free_gb GB are free on the disk of $ROOT; the packages need $size. Free some space and run this again"
}

started=$SECONDS
broken=""
made_for="$(sed -n 2p "$STAMP" 2>/dev/null || true)"
if [ -e "$MARKER" ]; then
  broken="an earlier install did not finish"
elif [ -n "$made_for" ] && [ "$made_for" != "$ROOT" ]; then
  broken="it was made for $made_for"  # its programs name that folder
elif [ -e "$VENV" ] && ! has pip; then
  broken="its Python is gone, has no pip, or is neither 3.11 nor 3.12"
elif [ -e "$STAMP" ] && ! has ray torch sglang megatron; then
  broken="packages are gone from it"  # pip may believe that it still has them
fi
if [ -n "$broken" ]; then say "$VENV cannot be used ($broken): starting afresh"; fi
if [ -n "$broken" ] || [ ! -e "$VENV" ]; then
  say "making $VENV with $("$python" --version)"
  rm -rf "$VENV"
  check_room
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
      contained "$uv" pip install --quiet --compile-bytecode --python "$VENV/bin/python" "$@" ) && return
    say "uv did not succeed: trying pip"
    uv=""
  fi
  contained "$VENV/bin/python" -m pip install -q --disable-pip-version-check "$@"
}
tell_time() {  # pip is silent for minutes
  local none
  while ! read -r -t "${INVRL_TELL_INTERVAL_S:-15}" none <&8 && kill -0 "$$" 2>/dev/null; do
    say "still installing, after $((SECONDS - started)) s"
  done
}
exec 8<> <(:)  # nobody ever writes here: `read` ends after its time, and unlike `sleep` leaves no process
tell_time 9<&- &
teller=$!
trap 'kill "$teller" 2>/dev/null || true' EXIT
say "installing for $device with ${uv:-pip} (a few minutes; $size)"
install -c "$pins" -e ".[$device,dev]"
# sglang (on cpu) and megatron-core list packages that only CUDA machines can install.
install --no-deps -r "invrl/requirements/nodeps$suffix.txt"

printf '%s\n' "$STAMPED" > "$STAMP.new"
mv "$STAMP.new" "$STAMP"
rm -f "$MARKER"
say "done in $((SECONDS - started)) s"
