"""What SGLang imports and a CPU-only machine does not have, replaced in this process.

`sgl_kernel` has no CPU wheel and torchvision's wheels are CUDA builds that break transformers' imports. The
stand-ins make the names importable; calling one fails loudly. Invariant: nothing here touches a process that
sees CUDA."""

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
    operator = "sgl_kernel::murmur_hash32_cpu"
    torch.library.define(operator, "(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    torch.library.impl(operator, "CPU", seeded_noise)


def seeded_noise(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What SGLang's sampler compares with log-probs, in place of its hash of the same: each row's own random
    numbers, by its seed and position (numpy's Philox). [N], [N], [V] -> uint32 [N, V]."""
    import numpy as np
    import torch

    keys = (s << 64 | p for s, p in zip(seed.tolist(), positions.tolist(), strict=True))
    rows = [np.random.Philox(key=key).random_raw(len(columns)).astype(np.uint32) for key in keys]
    return torch.from_numpy(np.array(rows, np.uint32).reshape(-1, len(columns)))


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
