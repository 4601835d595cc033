"""Copies and hashes tensors with a few threads; a copy is hashed block by block, while it is in the cache.

torch's copies and xxhash release the interpreter's lock, so the threads run side by side. A checksum here is
the same as `tensor_spec.checksum` of the whole tensor. Imports torch only where tensors are touched.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from invrl.weights.tensor_spec import checksum

if TYPE_CHECKING:
    import torch

    Copy = tuple[str, torch.Tensor, torch.Tensor]
    """Name, target and source, of equal shape."""

_BLOCK_BYTES = 1 << 20
"""Larger than what calling torch and xxhash costs, and small enough for a core's second-level cache."""
_MAX_THREADS = 8
"""More of them do not make memory faster."""
_MAX_WAITING_BYTES = 64 << 20
"""Of sources whose copy has not ended, besides the last of them. They may be temporary."""


def copy_hashed(copies: Iterable[Copy]) -> dict[str, str]:
    """Copies each source into its target. Returns the checksum of each target's bytes as they were read back
    straight after they were written, by name, in the order of the copies.

    `copies` is consumed in the calling thread, while other threads copy. Of the sources that it yields, at
    most 64 MB and two more are alive at a time, unless somebody else holds them.
    """
    return _in_threads(
        (name, source.nbytes, partial(_copy, target, source)) for name, target, source in copies
    )


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The checksum of each tensor's bytes."""
    return _in_threads((name, 0, partial(checksum, tensor)) for name, tensor in tensors.items())


def _copy(target: torch.Tensor, source: torch.Tensor) -> str:
    import torch
    import xxhash

    if target.shape != source.shape:
        raise ValueError(f"a tensor {tuple(source.shape)} does not fit into {tuple(target.shape)}")
    in_blocks = target.is_cpu and source.is_cpu and target.is_contiguous()
    if not in_blocks:  # from another device every block would cost a transfer of its own
        target.copy_(source)
        return checksum(target)
    target_flat = target.view(-1)
    source_flat = source.detach().reshape(-1)
    target_bytes = target_flat.view(torch.uint8).numpy().data
    digest = xxhash.xxh3_64()
    block_size = _BLOCK_BYTES // target.element_size()
    for start in range(0, target_flat.numel(), block_size):
        end = min(start + block_size, target_flat.numel())
        target_flat[start:end].copy_(source_flat[start:end])
        digest.update(target_bytes[start * target.element_size() : end * target.element_size()])
    return digest.hexdigest()


def _in_threads(calls: Iterable[tuple[str, int, Callable[[], str]]]) -> dict[str, str]:
    """The results of the calls, by name. The number is how many bytes a call keeps alive until it ends."""
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    results: dict[str, Future[str]] = {}
    waiting: deque[tuple[Future[str], int]] = deque()
    waiting_bytes = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
        for name, num_bytes, call in calls:
            while waiting and waiting_bytes > _MAX_WAITING_BYTES:
                oldest, oldest_bytes = waiting.popleft()
                oldest.result()
                waiting_bytes -= oldest_bytes
            result = threads.submit(call)
            results[name] = result
            waiting.append((result, num_bytes))
            waiting_bytes += num_bytes
    return {name: result.result() for name, result in results.items()}
