"""The one place in the trainer that knows CPU from CUDA.

`prepare()` must run before any module of Megatron is imported (`rank.py` does it first). On CUDA it
changes nothing in torch. On a CPU it makes megatron-core 0.16.1 run: what Megatron asks of
`torch.cuda` is answered for the CPU. Wherever TransformerEngine is absent, it repairs how the
distributed optimizer loads torch's AdamW (the step counts)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

_CPU = torch.device("cpu")


def on_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else _CPU


def backend() -> str:
    return "nccl" if on_cuda() else "gloo"


def groups_connect_late() -> bool:
    """Whether processes may come to the group's store again after the group is made: NCCL sets up its
    communicators when they are first used, gloo connects all ranks at once."""
    return on_cuda()


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """What attention is computed in under the compute dtype: on CPU the backward pass of torch's flash
    kernel is twice as fast in float32 as in bfloat16."""
    return dtype if on_cuda() else torch.float32


@functools.cache
def prepare() -> None:
    """Idempotent; call it before importing Megatron."""
    if not on_cuda():
        _keep_freed_memory()
        _stand_in_for_cuda()
        _keep_megatron_on_cpu()
        _skip_collectives_of_one()
    _repair_distributed_optimizer()


def _keep_freed_memory() -> None:
    """Activations and logits are tens of megabytes. By default malloc maps them afresh each time and the
    kernel zeroes every page (a first step of SmolLM2 took 43 CPU-seconds); so freed memory stays ours."""
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    mallopt(m_mmap_threshold, 2**31 - 1)
    mallopt(m_trim_threshold, 2**31 - 1)
    mallopt(m_top_pad, 2**28)


def fuse_adam(optimizer: ChainedOptimizer) -> None:
    """On CPU torch's AdamW makes a pass over memory per operation unless it is told to fuse them."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW) and not on_cuda():
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _stand_in_for_cuda() -> None:
    """Device, memory, stream and random-state calls of `torch.cuda`, on the CPU."""
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    cuda.current_device = lambda: _CPU  # Megatron uses it only as `device=`
    silent = [(cuda, name) for name in ("set_device", "synchronize", "empty_cache")]
    for owner, name in (*silent, (cuda.nvtx, "range_push"), (cuda.nvtx, "range_pop")):
        # A function of its own for each: dynamo, if it is ever imported, refuses one under two names.
        setattr(owner, name, lambda *args, **kwargs: None)
    tensor.cuda = lambda self, *args, **kwargs: self
    module.cuda = lambda self, *args, **kwargs: self
    # `with torch.device(...)` knows factories by identity: let it note them before they are wrapped.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _factory(getattr(torch, name)))

    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron compares with 'torch.cuda.FloatTensor'."""
        answer = tensor_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = type_name
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *args, **kwargs: _Stream()
    cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


class _Stream:
    """A CUDA stream or event where everything has already happened: every call on it says so (it is true)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: self


def _factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.zeros(..., device="cuda")` and its kin, on the CPU."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


def _keep_megatron_on_cpu() -> None:
    compiler: Any = torch.compile
    fuse: Any = lambda function: function  # noqa: E731
    torch.compile = fuse  # importing Megatron decorates its fused functions; inductor is for the GPU
    try:
        import megatron.core.jit as jit

        jit.disable_jit_fuser()
    finally:
        torch.compile = compiler
    import megatron.core.tensor_parallel.random as random

    rng: Any = random
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Its tracker warns that the CPU's random state moved; here that is the state it keeps.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _skip_collectives_of_one() -> None:
    """With one rank the distributed optimizer scatters and gathers whole buffers onto themselves, and gloo
    copies each of them, more than once: a fifth of a step."""
    import megatron.core.distributed.param_and_grad_buffer as module

    def unless_in_place(collective: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Output and input are the same numbers only in a group of one."""
        same = output.data_ptr() == given.data_ptr() and output.numel() == given.numel()
        return None if same else collective(output, given, *args, **kwargs)

    buffers: Any = module
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, functools.partial(unless_in_place, getattr(buffers, name)))


def _repair_distributed_optimizer() -> None:
    """Without TransformerEngine or Apex the optimizer is torch's AdamW, whose state holds a `step`
    tensor per parameter. Megatron's template for loading lacks it, its copy drops it, and after a
    load every parameter shares one tensor, so each step counts many times."""
    import megatron.core.optimizer.distrib_optimizer as module

    if module.HAVE_APEX_OR_TE:
        return
    owner: Any = module.DistributedOptimizer
    state_dict, load_state_dict = owner.state_dict, owner.load_state_dict
    set_states = owner._set_main_param_and_optimizer_states

    def state_dict_with_steps(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if "step" not in (state := self.optimizer.state[parameter]):
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.tensor(0.0), **moments)
        return state_dict(self)

    def set_states_with_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        return set_states(self, model_param, {**tensors, "step": tensors.get("step", state.get("step"))})

    def load_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for own in self.optimizer.state.values():
            own["step"] = own["step"].clone()

    owner.state_dict, owner.load_state_dict = state_dict_with_steps, load_with_own_steps
    owner._set_main_param_and_optimizer_states = set_states_with_step


def random_state() -> dict[str, torch.Tensor]:
    """Of every generator that this rank draws from."""
    state = {"cpu": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
        state.update({f"tracker/{name}": tensor for name, tensor in _rng_tracker().get_states().items()})
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if on_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        tracked = {name.removeprefix("tracker/"): tensor for name, tensor in state.items() if "/" in name}
        _rng_tracker().set_states(tracked)


def _rng_tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
