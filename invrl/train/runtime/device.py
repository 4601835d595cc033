"""The one place in the trainer that knows CPU from CUDA.

`prepare()` must run before any module of Megatron is imported. On CUDA it changes
nothing in torch. On a CPU it makes Megatron run (`megatron_on_cpu.py`). Where
TransformerEngine is absent, it repairs how the distributed optimizer loads torch's
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
    """Asked in every layer, so torch asks the driver once."""
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
    """Whether processes may come to the group's store again after the group was made:
    NCCL sets up its communicators when they are first used, gloo connects all ranks at
    once."""
    return on_cuda()


def to_device(array: NDArray[Any], target: torch.device) -> torch.Tensor:
    """The array on the target. A GPU copies it while the host goes on: the copy starts
    from page-locked memory, which torch keeps until the copy has been made. On a CPU
    the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if target.type == "cpu":
        return tensor
    return tensor.pin_memory().to(target, non_blocking=True)


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of attention under the compute dtype. On CPU the backward pass of
    torch's flash kernel is twice as fast in float32 as in bfloat16."""
    return dtype if on_cuda() else torch.float32


def attends_in_one_kernel(head_dim: int) -> bool:
    """Whether a layer's attention over a packed row is FlexAttention's kernel
    (`layers/flex_attention.py`), not one SDPA call per block. torch has the kernel's
    backward pass on a GPU only, for heads of 16 dimensions and more. `head_dim`: of
    queries or values, whichever is smaller."""
    return on_cuda() and head_dim >= SMALLEST_FLEX_HEAD


def tokens_multiple(tensor_ranks: int) -> int:
    """Each rank's share of a micro-batch is filled up to a multiple of so many tokens,
    which tensor-parallel ranks can divide. On a GPU it is whole tiles of attention,
    too, so that no layer pads queries and keys."""
    if on_cuda():
        return math.lcm(tensor_ranks, FLEX_TILE)
    return tensor_ranks


def fuses() -> bool:
    """Whether chains of elementwise operations are compiled into one kernel. A GPU's
    memory is too slow to be read and written by each of them."""
    return on_cuda()


def fused(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function of tensors without side effects, which is compiled for all
    lengths if `fuses`."""

    @functools.cache
    def compiled() -> Callable[Parameters, Result]:
        return torch.compile(function, dynamic=True, backend=compiler())

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if fuses():
            return compiled()(*args, **options)
        return function(*args, **options)

    return call


def fused_by_row(
    function: Callable[Parameters, Result],
) -> Callable[Parameters, Result]:
    """As `fused`, for all lengths of the first dimension of tensors that have several.
    The other dimensions are sizes of the model: code that knows them is faster."""

    @functools.cache
    def compiled() -> Callable[Parameters, Result]:
        return torch.compile(function, backend=compiler())

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not fuses():
            return function(*args, **options)
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(*args, **options)

    return call


def compiler() -> str:
    """torch.compile's backend: Triton's kernels on a GPU. The one on a CPU is for tests
    and makes no code."""
    return "inductor" if on_cuda() else "eager"


def logit_block_bytes() -> int:
    """Float32 logits that are computed at once (`model/logprobs.py`)."""
    return BLOCK_BYTES["cuda" if on_cuda() else "cpu"]


@functools.cache
def prepare() -> None:
    """Idempotent. Call it before Megatron is imported."""
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
    """Bytes that this rank has used at most since it started: of the GPU by torch, on a
    CPU resident."""
    if on_cuda():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the host, pinned where the tensor is on a GPU. It is made
    once `wait` returns."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=on_cuda())
    return copy.copy_(tensor, non_blocking=True)


def copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory of this rank's device. It is made once `wait` returns."""
    copy = torch.empty_like(tensor, device=device())
    return copy.copy_(tensor, non_blocking=True)


def wait() -> None:
    """Waits until the device has done what it was given."""
    if on_cuda():
        torch.cuda.synchronize()


def free_unused_memory() -> None:
    """Gives what torch keeps of a GPU's memory for later back to the driver, for other
    processes."""
    if on_cuda():
        torch.cuda.empty_cache()


def used_memory() -> int:
    """Bytes that this rank holds now: of the GPU by torch, on a CPU resident."""
    if on_cuda():
        return torch.cuda.memory_reserved()
    return psutil.Process().memory_info().rss


def free_memory() -> int:
    """Bytes that any process can still take: of this rank's GPU, on a CPU of the
    machine."""
    if on_cuda():
        free, _ = torch.cuda.mem_get_info()
        return free
    return psutil.virtual_memory().available


def make_deterministic() -> None:
    """Makes every operation give the same bits each time. Call it before the first
    operation on a GPU. torch then raises where an operation has no deterministic form.

    On CPU the operations of the trainer are so anyway. On a GPU cuBLAS needs a
    workspace of its own per stream, and NCCL one algorithm whatever the size of what it
    reduces.
    """
    if on_cuda():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def fuse_adam(optimizer: ChainedOptimizer) -> None:
    """torch's AdamW makes one pass over memory per operation unless it is asked to fuse
    them. Optimizers of TransformerEngine and Apex are fused already."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True
                group["foreach"] = False


def random_state() -> dict[str, torch.Tensor]:
    """The state of every generator that this rank draws from."""
    state = {"cpu": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
        for name, tensor in _rng_tracker().get_states().items():
            state[f"tracker/{name}"] = tensor
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restores what `random_state` returned. The CUDA part is skipped where either side
    has no CUDA."""
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
    """Adds up the seconds of blocks: on a CPU those of the host, on a GPU those between
    two places in the work that it is given, for which the host does not wait."""

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
        """Of all blocks so far. Waits until a GPU has finished them."""
        gpu_seconds = 0.0
        for start, end in self._events:
            end.synchronize()
            gpu_seconds += start.elapsed_time(end) / 1000
        return self._host_seconds + gpu_seconds


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of the phase, until the device has finished its work."""
    with metrics.timed(seconds, phase):
        yield
        if on_cuda():
            torch.cuda.synchronize()
