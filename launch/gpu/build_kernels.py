"""`python build_kernels.py FOLDER`: compiles the kernels that SGLang would compile at
its first request.

Those that a dense Llama or Qwen3 in bfloat16 calls, for Hopper, on a machine with nvcc
and without a GPU. PYTHONPATH has the unpacked packages of `prepare.sh`, which takes the
kernels up from `prebuilt/`.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pretended_card import pretend_card

_HEAD_DIMS = (64, 128)
_KEY_BYTES = (384, 1024, 2048)
"""Of a token's keys in one layer: heads * head_dim * 2. SmolLM2-135M, random models,
Qwen3-0.6B."""


def build_all(folder: Path) -> int:
    """Returns the number of kernels that were not built."""
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / "kernel-cache"
    os.environ["SGLANG_JIT_CACHE_DIR"] = str(cache)
    sys.modules["megatron"] = None  # pyright: ignore[reportArgumentType]  # SGLang would import it
    pretend_card()
    num_failed = 0
    for name, build in _builds().items():
        started = time.monotonic()
        try:
            build()
            libraries = cache.glob("*/*/build-*/deps-*/*.so")
            [library] = [
                path for path in libraries if not (folder / path.name).exists()
            ]
        except Exception as error:  # the others are built all the same
            num_failed += 1
            print(f"{name}: not built: {str(error)[-1500:]}", flush=True)
            continue
        shutil.copy(library, folder / library.name)
        print(f"{name}: {library.name}, {time.monotonic() - started:.1f} s", flush=True)
    return num_failed


def _builds() -> dict[str, Callable[[], object]]:
    from sglang.kernels.jit.utils.compile import loader
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    loader._load = lambda path: path  # what is built cannot be loaded without a card
    dtype = torch.bfloat16
    builds: dict[str, Callable[[], object]] = {
        "activation": lambda: activation_module(dtype),
        "clamp_int64": lambda: _jit_clamp_position_module(torch.int64),
        "clamp_int32": lambda: _jit_clamp_position_module(torch.int32),
    }
    for dim in _HEAD_DIMS:
        builds[f"rope_{dim}"] = lambda dim=dim: _jit_fused_rope_module(
            True, dim, dtype, dtype
        )
        builds[f"qk_norm_{dim}"] = lambda dim=dim: _jit_qknorm_module(dim, dtype)
    for num_bytes in _KEY_BYTES:
        builds[f"kv_cache_{num_bytes}"] = lambda size=num_bytes: _jit_kvcache_module(
            size, size, 0
        )
    return builds


if __name__ == "__main__":
    sys.exit(1 if build_all(Path(sys.argv[1]).resolve()) else 0)
