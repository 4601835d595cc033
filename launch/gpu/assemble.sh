#!/usr/bin/env bash
# On the GPU machine: unpacks the pieces of prepare.sh into a folder for PYTHONPATH.
#   ./launch/gpu/assemble.sh PIECES [SITE]      SITE: /tmp/site unless given
# Run it after every transfer that brings pieces. A group is unpacked when all of its pieces have come.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: assemble.sh PIECES [SITE]" >&2; exit 2; }
PIECES="$1"
SITE="${2:-/tmp/site}"
KEPT="$SITE.pieces"
mkdir -p "$SITE" "$KEPT"
find "$PIECES" -maxdepth 1 \( -name 'g?.tar.xz.?' -o -name 'g?.count' \) -exec cp -u {} "$KEPT" \;
started=$SECONDS

unpack() {  # GROUP
  # shellcheck disable=SC2016
  cat "$KEPT/$1".tar.xz.? | python3 -c '
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz") as archive:
    archive.extractall(sys.argv[1], filter="fully_trusted")
' "$SITE"
  touch "$KEPT/$1.done"
}

unpacking=()
for group in g1 g2 g3 g4; do
  [ -e "$KEPT/$group.count" ] && [ ! -e "$KEPT/$group.done" ] || continue
  there="$(find "$KEPT" -name "$group.tar.xz.?" | wc -l)"
  [ "$there" -eq "$(cat "$KEPT/$group.count")" ] || { echo "$group: $there pieces have come"; continue; }
  unpack "$group" &
  unpacking+=($!)
done
for process in "${unpacking[@]}"; do wait "$process"; done

# The project runs from its checkout there, and asks for its own version.
mkdir -p "$SITE/invrl-0.dist-info"
printf 'Metadata-Version: 2.1\nName: invrl\nVersion: 0\n' >"$SITE/invrl-0.dist-info/METADATA"
# A wheel's files are unpacked without their modes.
find "$SITE" -path '*ray/core*' \( -name raylet -o -name gcs_server \) -type f -exec chmod +x {} +
# SGLang has 7,000 modules: this saves 20 s of every start.
python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1 || true
echo "unpacked $(find "$KEPT" -name '*.done' -printf '%f ') in $((SECONDS - started)) s, $(du -sm "$SITE" | cut -f1) MB"
