"""What SGLang imports and a CPU-only machine does not have, replaced in this process.

`sgl_kernel` has no CPU wheel and torchvision's wheels are CUDA builds that break transformers'
imports. The stand-ins make the names importable; calling one fails loudly. Invariant: nothing here
touches a process that sees CUDA. Called by `launch_sglang` (which every SGLang process re-imports)
and by whoever imports sglang on such a machine (`sglang_args`, the bucket sender).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ABSENT = ("sgl_kernel", "torchvision", "torchvision.transforms", "torchvision.transforms.functional")
_OPERATORS: list[torch.library.Library] = []
"""Kept alive: an operator ends with its library."""


class _Absent(types.ModuleType):
    """A module whose every name is a function that raises."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU build")

        return missing


def apply() -> None:
    """Idempotent. After it `import sglang` works here; on CUDA it does nothing."""
    import torch

    if torch.cuda.is_available() or isinstance(sys.modules.get("sgl_kernel"), _Absent):
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # sglang's own switch for its CPU paths
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads on two busy cores were 7 times slower
    # Touched first: it makes transformers replace its lazy module once, before we change it.
    from transformers import ProcessorMixin

    del ProcessorMixin
    for name in _ABSENT:
        sys.modules[name] = _Absent(name)
    # transformers hides this class where it finds no torchvision; sglang registers with it on import.
    image_processors = types.SimpleNamespace(register=lambda *args, **kwargs: None)
    sys.modules["transformers"].AutoImageProcessor = image_processors  # pyright: ignore


def allow_seeds() -> None:
    """Without CUDA, let SGLang sample by seed (`--enable-deterministic-inference`) on torch_native attention.
    The kernels that make it indifferent to the batch are CUDA's: here a generation is repeated bit for bit
    only beside the same others, or alone. Call it before SGLang is imported."""
    import torch

    if torch.cuda.is_available():
        return
    # Its sampler is compiled on first use: that would need a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    _OPERATORS.append(library := torch.library.Library("sgl_kernel", "FRAGMENT"))
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """SGLang's hash behind its seeded noise: MurmurHash3_x86_32 (A. Appleby, smhasher) with seed 0 of 16
    bytes, little-endian: 64-bit seed, 32-bit position, 32-bit column. [N], [N], [V] -> uint32 [N, V]."""
    import numpy as np
    import torch

    def rotated(x: np.ndarray, by: int) -> np.ndarray:
        return x << np.uint32(by) | x >> np.uint32(32 - by)

    words = seed.numpy().astype(np.uint64)[:, None]
    low, high = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    hashed = np.zeros_like(low)
    place = positions.numpy().astype(np.uint32)[:, None]
    for block in (low, high, place, columns.numpy().astype(np.uint32)[None, :]):
        mixed = rotated(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        hashed = rotated(hashed ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed = hashed ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> np.uint32(shift)) * np.uint32(factor)
    return torch.from_numpy(hashed ^ hashed >> np.uint32(16))


def fork_children() -> None:
    """Without CUDA, let SGLang fork its processes where it would spawn them: they then share what
    is imported already, which halves the time to start and the memory. On CUDA it does nothing."""
    import multiprocessing

    import torch

    if torch.cuda.is_available():
        return
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for "spawn" when it launches, for the sake of CUDA.
    multiprocessing.set_start_method = lambda *args, **kwargs: None
