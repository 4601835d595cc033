#!/usr/bin/env bash
# Collects what a bare GPU machine lacks, on a machine without a GPU (Linux on x86-64, with pip and strip):
#   ./launch/gpu/prepare.sh OUT
# makes OUT/pieces/, archives of at most 48 MB. Kernels that build_kernels.py has put into OUT/prebuilt/ go
# with them. README.md says what the GPU machine has already.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
ROOT="$(cd "$HERE/../.." && pwd -P)"
PINS="$ROOT/invrl/requirements/constraints.txt"
[ $# -eq 1 ] || { echo "usage: prepare.sh OUT" >&2; exit 2; }
mkdir -p "$1"
cd "$1"

# pip takes no wheel for an older glibc unless it is told of each.
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for minor in $(seq 17 39); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

pinned() {  # NAME...: the project's own pins
  local name
  for name in "$@"; do grep -iE "^$name==" "$PINS"; done
}

unpack() {  # GROUP REQUIREMENT...: the wheels into a folder GROUP, as pip would install them
  local group="$1" requirement name wheel
  shift
  mkdir -p "$group" wheels
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d wheels "$@"
  for requirement in "$@"; do
    name="${requirement%%==*}"
    name="${name//[-_]/[-_.]}"  # wheels spell it in either way
    wheel="$(find wheels -iname '*.whl' | grep -iE "/$name-[0-9]" | head -n 1)"
    python3 -m zipfile -e "$wheel" "$group"
  done
}

# g1: the trainer.
mapfile -t trainer < <(pinned msgspec pydantic pydantic-core annotated-types typing-inspection tomli-w orjson dill \
  gguf transformers tokenizers zstandard fastapi starlette uvicorn anyio annotated-doc httptools openai jiter distro \
  sniffio)
unpack g1 megatron-core==0.16.1 opentelemetry-api==1.45.2 importlib-metadata==9.1.0 zipp==4.1.2 "${trainer[@]}"

# g2: SGLang. Its kernels are those for torch 2.11: the project's own pin is built for torch 2.13.
mapfile -t serving < <(pinned apache-tvm-ffi xgrammar llguidance compressed-tensors interegular loguru openai-harmony \
  partial-json-parser pybase64 python-multipart pyzmq setproctitle soundfile cffi watchfiles einops jsonschema \
  jsonschema-specifications referencing rpds-py)
unpack g2 sglang==0.5.21 sglang-kernel==0.4.5 flashinfer-python==0.6.18 torch-memory-saver==0.0.10 "${serving[@]}"

# g3: the router. g4: Ray.
unpack g3 "$(pinned sglang-router)"
unpack g4 "$(pinned ray)"

# Most of the 383 MB of kernels are FlashAttention 3, for three kinds of cards; nothing here calls them.
rm -rf g2/sgl_kernel/{flash_ops,flashmla_ops,infllm_ops,spatial_ops}*.so g2/sgl_kernel/sm100
python3 "$HERE/fat_binary.py" g2/sgl_kernel/sm90/common_ops.abi3.so g2/sgl_kernel/sm90/common_ops.new 90
mv g2/sgl_kernel/sm90/common_ops.new g2/sgl_kernel/sm90/common_ops.abi3.so
rm -rf g2/sglang/{multimodal_gen,benchmark} g2/sglang/srt/rust_extensions/_{grpc,multimodal}*.so g2/flashinfer/data/*
rm -rf g4/ray/{jars,rllib,tune,serve,data,train,llm,cpp,workflow} g4/ray/dashboard/client

# Without its sources flashinfer cannot build its norms; the kernels above have them, too.
sed -i 's/^    _has_flashinfer = True$/    _has_flashinfer = False/' g2/sgl_kernel/elementwise.py

# SGLang imports IPython for a display that nobody sees.
mkdir -p g2/IPython
: >g2/IPython/__init__.py
echo 'HTML = display = None' >g2/IPython/display.py

python3 - <<'PATCH'  # a kernel that was built before is found by its name, whatever compiler built it
from pathlib import Path

path = Path("g2/sglang/kernels/jit/utils/compile/loader.py")
text = path.read_text()
place = "    if envs.SGLANG_JIT_FORCE_RECOMPILE.get():\n        return None\n"
addition = (
    '    built = pathlib.Path(__file__).parents[3] / "prebuilt" / f"{spec.module_name}.so"\n'
    "    if built.exists():\n"
    "        return built\n"
)
if addition not in text:
    assert text.count(place) == 1, f"{path} is another than the one that this was written for"
    path.write_text(text.replace(place, place + addition))
PATCH
if [ -d prebuilt ]; then
  rm -rf g2/sglang/kernels/prebuilt
  cp -r prebuilt g2/sglang/kernels/prebuilt
fi

# Libraries that strip does not understand stay as they are.
find g1 g2 g3 g4 -name '*.so*' -type f -size +1M -exec sh -c 'strip --strip-unneeded "$1" 2>/dev/null || true' _ {} \;
find g4 \( -name raylet -o -name gcs_server \) -type f -exec strip {} \;
find g1 g2 g3 g4 -name __pycache__ -prune -exec rm -rf {} +

rm -rf pieces
mkdir pieces
for group in g1 g2 g3 g4; do
  tar --sort=name --owner=0 --group=0 --mtime=@0 -C "$group" -cf - . | xz -T0 --x86 --lzma2=preset=9e \
    | split -b 48m -d -a1 - "pieces/$group.tar.xz."
  find pieces -name "$group.tar.xz.?" | wc -l >"pieces/$group.count"
done
ls -l pieces
