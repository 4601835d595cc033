"""Lets SGLang run in a process without CUDA: replaces imports and calls that do not
exist there.

`sgl_kernel` has no CPU wheel, and torchvision's wheels are CUDA builds that break
transformers' imports. Placeholder modules make these names importable; calling one
raises NotImplementedError. Invariant: nothing here changes a process that sees CUDA.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MISSING_MODULES = (
    "sgl_kernel",
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class _PlaceholderModule(types.ModuleType):
    """A module in which every name is a function that raises."""

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


def make_importable() -> None:
    """Make `import sglang` work. Idempotent; does nothing on CUDA."""
    import torch

    is_done = isinstance(sys.modules.get("sgl_kernel"), _PlaceholderModule)
    if torch.cuda.is_available() or is_done:
        return
    # SGLang's own switch for its CPU paths
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # two threads on two busy cores were 7 times slower
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Imported first: it makes transformers replace its lazy module once, before we
    # change it.
    from transformers import ProcessorMixin

    del ProcessorMixin
    for name in _MISSING_MODULES:
        sys.modules[name] = _PlaceholderModule(name)
    # transformers hides this class where it finds no torchvision; SGLang registers with
    # it on import.
    image_processors = types.SimpleNamespace(register=lambda *args, **kwargs: None)
    sys.modules["transformers"].AutoImageProcessor = image_processors  # pyright: ignore


def leave_uncompiled() -> None:
    """Leave decorated functions uncompiled: compiling them needs a C++ compiler, and
    importing torch's, at the first decorator, takes a second. Does nothing on CUDA."""
    import torch

    if not torch.cuda.is_available():
        torch.compile = _leave_uncompiled  # pyright: ignore


def _leave_uncompiled(
    function: Callable[..., Any] | None = None, **options: object
) -> Any:
    """Replace `torch.compile`: return the function itself; without one, a decorator."""
    if function is None:
        return lambda decorated: decorated
    return function


def support_seeds() -> None:
    """Let SGLang sample by seed (`--enable-deterministic-inference`) on torch_native
    attention.

    Does nothing on CUDA. The kernels that make a result independent of the batch are
    CUDA's. Here a generation is repeated bit for bit only together with the same
    others, or alone.
    """
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    operator = "sgl_kernel::murmur_hash32_cpu"
    torch.library.define(
        operator, "(Tensor seed, Tensor positions, Tensor columns) -> Tensor"
    )
    torch.library.impl(operator, "CPU", seeded_noise)


def support_routed_experts() -> None:
    """Let SGLang keep the experts that computed each token
    (`--enable-return-routed-experts`), whose memory it would register with CUDA. Does
    nothing on CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *args, **kwargs: None
    common._cuda_host_unregister = lambda *args, **kwargs: None


def support_adapters() -> None:
    """Let SGLang serve adapters (`--enable-lora`), for which it asks for memory that an
    accelerator can read. Does nothing on CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # pyright: ignore


def _without_pinning(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return create(*args, **kwargs)

    return create_unpinned


def seeded_noise(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return random numbers for SGLang's sampler to compare with log-probs, in place of
    its hash.

    Each row has its own numbers, by its seed and position (numpy's Philox). [N], [N],
    [V] -> uint32 [N, V].
    """
    import numpy as np
    import torch

    rows: list[np.ndarray] = []
    for row_seed, position in zip(seed.tolist(), positions.tolist(), strict=True):
        generator = np.random.Philox(key=row_seed << 64 | position)
        rows.append(generator.random_raw(len(columns)).astype(np.uint32))
    return torch.from_numpy(np.array(rows, np.uint32).reshape(-1, len(columns)))


def fork_children() -> None:
    """Let SGLang fork its processes instead of spawning them. Does nothing on CUDA.

    Forked processes share earlier imports, which halves start-up time and memory.
    """
    import multiprocessing

    import torch

    if torch.cuda.is_available():
        return
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for "spawn" when it launches, for the sake of CUDA.
    multiprocessing.set_start_method = lambda *args, **kwargs: None
