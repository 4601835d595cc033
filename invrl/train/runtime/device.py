"""The one place in the trainer that knows CPU from CUDA.

`prepare()` must run before any module of Megatron is imported. On CUDA it changes
nothing in torch. On a CPU it makes Megatron run (`megatron_on_cpu.py`). Without
TransformerEngine, it repairs how the distributed optimizer loads torch's
AdamW (`adamw_repairs.py`). Other repairs are in `megatron_repairs.py`.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import psutil
import torch
from numpy.typing import NDArray

from invrl.train.runtime.adamw_repairs import repair_distributed_optimizer
from invrl.train.runtime.kernels import FLEX_TILE, SMALLEST_FLEX_HEAD
from invrl.train.runtime.logit_blocks import BLOCK_BYTES
from invrl.train.runtime.megatron_on_cpu import replace_cuda
from invrl.train.runtime.megatron_repairs import (
    batch_gradient_clipping,
    hide_wandb,
    ignore_known_warnings,
    repair_megatron,
)
from invrl.types import metrics

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def on_cuda() -> bool:
    """Whether this rank is on a GPU. Cached, because every layer asks and torch queries
    the driver."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """This rank's device."""
    if on_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend() -> str:
    """torch.distributed's backend."""
    return "nccl" if on_cuda() else "gloo"


def groups_connect_late() -> bool:
    """Whether processes may come to the group's store after the group was made: NCCL
    sets up its communicators at their first use, gloo connects all ranks
    immediately."""
    return on_cuda()


def to_device(array: NDArray[Any], target: torch.device) -> torch.Tensor:
    """Copy the array to the target. The host does not wait for a GPU: the copy starts
    from page-locked memory, which torch keeps until the copy has been made. On a CPU
    the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if target.type == "cpu":
        return tensor
    return tensor.pin_memory().to(target, non_blocking=True)


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of attention under the compute dtype. On CPU the backward pass
    of torch's flash kernel is twice as fast in float32 as in bfloat16."""
    return dtype if on_cuda() else torch.float32


def attends_in_one_kernel(head_dim: int) -> bool:
    """Whether a layer's attention over a packed row is FlexAttention's kernel
    (`layers/flex_attention.py`) instead of one SDPA call per block. torch has the
    kernel's backward pass on a GPU only, for heads of 16 dimensions and more.
    `head_dim` is that of queries or values, whichever is smaller."""
    return on_cuda() and head_dim >= SMALLEST_FLEX_HEAD


def tokens_multiple(tensor_ranks: int) -> int:
    """Return the divisor of the number of tokens of each rank's padded share of a
    micro-batch, which tensor-parallel ranks can divide. On a GPU it is also whole tiles
    of attention, so that no layer pads queries and keys."""
    if on_cuda():
        return math.lcm(tensor_ranks, FLEX_TILE)
    return tensor_ranks


def fuses() -> bool:
    """Whether chains of elementwise operations are compiled into one kernel. A GPU's
    memory is too slow to be read and written by each of them."""
    return on_cuda()


def fused(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function of tensors without side effects, which is compiled for all
    lengths if `fuses`."""
    return _fused(function, by_row=False)


def fused_by_row(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """Decorate like `fused`, for all lengths of the first dimension of tensors that
    have several. The other dimensions are sizes of the model: code that knows them is
    faster."""
    return _fused(function, by_row=True)


def _fused(
    function: Callable[Parameters, Result], *, by_row: bool
) -> Callable[Parameters, Result]:
    @functools.cache
    def compiled() -> Callable[Parameters, Result]:
        dynamic = None if by_row else True
        return torch.compile(function, dynamic=dynamic, backend=compiler())

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not fuses():
            return function(*args, **options)
        for argument in args if by_row else ():
            if isinstance(argument, torch.Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(*args, **options)

    return call


def compiler() -> str:
    """Return torch.compile's backend: Triton's kernels on a GPU. The one on a CPU is
    for tests and makes no code."""
    return "inductor" if on_cuda() else "eager"


def logit_block_bytes() -> int:
    """Return the bytes of float32 logits that are computed together
    (`model/logprobs.py`)."""
    return BLOCK_BYTES["cuda" if on_cuda() else "cpu"]


@functools.cache
def prepare() -> None:
    """Prepare torch for Megatron. Idempotent. Call it before Megatron is imported."""
    ignore_known_warnings()
    with hide_wandb():
        if not on_cuda():
            replace_cuda()
        repair_distributed_optimizer()
        repair_megatron()
    if on_cuda():
        batch_gradient_clipping()
        # A rank has a dozen kernels to compile. The processes that torch would start
        # for that take longer to start, and a rank waits for their end when it ends.
        from torch._inductor import config  # 3 s of imports, which a CPU does without

        config.compile_threads = 1


def peak_memory() -> int:
    """Return the peak memory of this rank in bytes: of the GPU by torch, on a CPU
    resident."""
    if on_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to memory of the host, pinned if the tensor is on a GPU. Complete once
    `wait` returns."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=on_cuda())
    return copy.copy_(tensor, non_blocking=True)


def copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the memory of this rank's device. Complete once `wait` returns."""
    copy = torch.empty_like(tensor, device=device())
    return copy.copy_(tensor, non_blocking=True)


def host_memory(numel: int) -> torch.Tensor:
    """Return new memory of the host for float32 numbers, pinned if this rank is on a
    GPU. (torch's own pinned memory is rounded up to a power of two.)"""
    memory = torch.empty(numel, dtype=torch.float32, device="cpu")
    if on_cuda():
        cudart: Any = torch.cuda.cudart()
        status = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        torch.cuda.check_error(status)
    return memory


@contextmanager
def computes_on_host(num_threads: int) -> Iterator[None]:
    """Let operations on the CPU use `num_threads`, if this rank is on a GPU. Otherwise
    a process that Ray starts has one thread for them."""
    if not on_cuda():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def wait() -> None:
    """Wait until the device has completed its work."""
    if on_cuda():
        torch.cuda.synchronize()


def free_unused_memory() -> None:
    """Return torch's unused memory of a GPU to the driver, for other processes."""
    if on_cuda():
        torch.cuda.empty_cache()


def used_memory() -> int:
    """Return the bytes that this rank holds now: of the GPU by torch, on a CPU
    resident."""
    if on_cuda():
        return torch.cuda.memory_reserved()
    return psutil.Process().memory_info().rss


def free_memory() -> int:
    """Return the bytes that any process can still take: of this rank's GPU, on a CPU of
    the machine."""
    if on_cuda():
        free, _ = torch.cuda.mem_get_info()
        return free
    return psutil.virtual_memory().available


def make_deterministic() -> None:
    """Make every operation deterministic to the bit. Call it before the first operation
    on a GPU. torch then raises if an operation has no deterministic form.

    On CPU the operations of the trainer always are. On a GPU cuBLAS needs a separate
    workspace per stream, and NCCL one algorithm for all sizes of its reductions.
    """
    if on_cuda():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def fuse_adam(optimizer: ChainedOptimizer) -> None:
    """Fuse torch's AdamW, which otherwise makes one pass over memory per operation.
    Optimizers of TransformerEngine and Apex are fused already."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True
                group["foreach"] = False


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of every generator that this rank draws from."""
    state = {"cpu": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
        for name, tensor in _rng_tracker().get_states().items():
            state[f"tracker/{name}"] = tensor
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `random_state` returned. The CUDA part is skipped if either side has
    no CUDA."""
    torch.set_rng_state(state["cpu"])
    if on_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        prefix = "tracker/"
        tracked = {
            name.removeprefix(prefix): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        _rng_tracker().set_states(tracked)


def _rng_tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


class Stopwatch:
    """Sums the seconds of blocks: on a CPU those of the host, on a GPU those between
    two points of its queued work, for which the host does not wait."""

    def __init__(self) -> None:
        self._host_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if not on_cuda():
            started = time.monotonic()
            yield
            self._host_seconds += time.monotonic() - started
            return
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def seconds(self) -> float:
        """Return the seconds of all blocks so far. Waits until a GPU has finished
        them."""
        gpu_seconds = 0.0
        for start, end in self._events:
            end.synchronize()
            gpu_seconds += start.elapsed_time(end) / 1000
        return self._host_seconds + gpu_seconds


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of the phase, until the device has finished its work."""
    with metrics.timed(seconds, phase):
        yield
        if on_cuda():
            torch.cuda.synchronize()
