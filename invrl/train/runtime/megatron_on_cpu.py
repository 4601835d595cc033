"""Makes megatron-core 0.16.1 run on a machine without CUDA.

Megatron's calls of `torch.cuda` are answered for the CPU, its fused functions are not
compiled, and collectives of a single rank are skipped. Everything acts on the whole
process, before Megatron is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def replace_cuda() -> None:
    """Apply all replacements. Call it once, on a machine without CUDA."""
    _keep_freed_memory()
    _replace_torch_cuda()
    _leave_dynamo_out()
    _replace_megatron_cuda()
    _skip_collectives_of_one()
    _give_expert_sizes_as_numpy()


def _keep_freed_memory() -> None:
    """Let malloc keep freed memory.

    Activations and logits are tens of megabytes each. By default malloc maps such
    blocks afresh each time, and the kernel zeroes every page: a first step of SmolLM2
    took 43 CPU-seconds.
    """
    m_trim_threshold = -1  # the numbers are from <malloc.h>
    m_top_pad = -2
    m_mmap_threshold = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    mallopt(m_mmap_threshold, 2**31 - 1)
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_top_pad, 2**28)


def _replace_torch_cuda() -> None:
    """Replace device, memory, stream and random-state calls of `torch.cuda` on the
    CPU."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    cuda.current_device = lambda: _CPU  # Megatron uses it only as `device=`
    silent_calls = [
        (cuda, "set_device"),
        (cuda, "synchronize"),
        (cuda, "empty_cache"),
        (cuda.nvtx, "range_push"),
        (cuda.nvtx, "range_pop"),
    ]
    for owner, name in silent_calls:
        # Each gets a separate function: dynamo, if it is ever imported, refuses one
        # under two names.
        setattr(owner, name, lambda *args, **kwargs: None)
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self
    # `with torch.device(...)` knows the factories by identity, so it must list them
    # before they are wrapped.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor_type = torch.Tensor.type

    def type_with_cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the type's name as on CUDA: Megatron compares it with
        'torch.cuda.FloatTensor'."""
        result = tensor_type(self, *args, **kwargs)
        if isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    tensor.type = type_with_cuda_name
    cuda.Stream = _Stream
    cuda.Event = _Stream
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _Stream:
    """A CUDA stream or event on which all work is already done. Every call on it
    returns the stream, which is true, so a query such as `event.query()` returns a true
    value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory such as `torch.zeros` to make its tensor on the CPU where CUDA is
    requested."""

    @functools.wraps(factory)
    def make_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make_on_cpu


def _leave_dynamo_out() -> None:
    """Let torch's AdamW work without dynamo, torch's tracer. Some of its methods import
    it at their first call, to be excluded from compilation: that took a rank more than
    a CPU-second, and nothing is compiled here."""
    for method in vars(torch.optim.Optimizer).values():
        undecorated: Any = getattr(method, "__wrapped__", None)
        if undecorated is not None:
            undecorated.__dynamo_disable = undecorated
    adam: Any = torch.optim.Adam
    adam.step = torch.no_grad()(adam.step.__wrapped__)


def _replace_megatron_cuda() -> None:
    """Import the parts of Megatron that compile functions or touch CUDA's generators,
    and replace both."""
    torch_module: Any = torch
    compile_function = torch_module.compile
    # Importing Megatron decorates its fused functions with torch.compile, whose
    # inductor is for the GPU.
    torch_module.compile = lambda function: function
    try:
        import megatron.core.jit as jit

        jit.disable_jit_fuser()
    finally:
        torch_module.compile = compile_function
    import megatron.core.tensor_parallel.random as random

    rng: Any = random
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Its tracker warns that the CPU's random state changed; here that is the state
    # which it keeps.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _skip_collectives_of_one() -> None:
    """Skip the distributed optimizer's collectives if there is only one rank.

    They scatter and gather whole buffers onto themselves, and gloo copies each of them
    more than once: that took a fifth of a step.
    """
    import megatron.core.distributed.param_and_grad_buffer as module

    def run_unless_in_place(
        collective: Any, output: Any, source: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Output and source are the same memory only in a group of one.
        if output.data_ptr() == source.data_ptr() and output.numel() == source.numel():
            return None
        return collective(output, source, *args, **kwargs)

    buffers: Any = module
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(
            buffers,
            name,
            functools.partial(run_unless_in_place, getattr(buffers, name)),
        )


def _give_expert_sizes_as_numpy() -> None:
    """Let Megatron's token dispatcher make numpy arrays of some sizes; its own function
    converts only CUDA tensors."""
    import megatron.core.transformer.moe.token_dispatcher as module

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return tensor

    dispatcher: Any = module
    dispatcher.maybe_move_tensor_to_cpu = move
