"""Work on the bytes of many tensors by a few threads: one core does not use the full
memory bandwidth.

Copies and checksums leave Python's lock while they run, but threads that come back for
it after each small tensor wait for one another. A thread therefore takes several
tensors at a time. A process that uses a GPU gains nothing from this and uses one
thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from invrl.weights.tensors.tensor_spec import Checksums

_MOST_THREADS = 4
"""More threads do not move bytes faster, and take cores from others."""
_BATCH_BYTES = 4 << 20
"""Bytes that a thread takes at a time, or one tensor if that is larger."""

Named = tuple[str, "torch.Tensor"]


def by_threads(
    work: Callable[[str, torch.Tensor], str],
    tensors: Iterable[Named],
) -> Checksums:
    """Return `work(name, tensor)` of each tensor, by name.

    This thread iterates over `tensors`. An iterator that makes them keeps at most one
    batch per thread, plus one tensor, in memory. Raises what `work` raises once all
    work that has begun has ended.
    """
    import torch

    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if num_threads == 1 or torch.cuda.is_initialized():
        return {name: work(name, tensor) for name, tensor in tensors}
    in_inference_mode = torch.is_inference_mode_enabled()

    def work_on(batch: list[Named]) -> Checksums:
        with torch.inference_mode(in_inference_mode):  # inference mode is per thread
            values = {name: work(name, tensor) for name, tensor in batch}
        # The pool keeps the list until after the callback, which lets the next begin.
        batch.clear()
        return values

    free_threads = threading.Semaphore(num_threads)
    results: list[Future[Checksums]] = []
    with ThreadPoolExecutor(num_threads, "tensors") as threads:
        for batch in batches(tensors, _BATCH_BYTES):
            free_threads.acquire()
            result = threads.submit(work_on, batch)
            result.add_done_callback(lambda _: free_threads.release())
            results.append(result)
    by_name: Checksums = {}
    for result in results:
        by_name |= result.result()
    return by_name


def batches(
    tensors: Iterable[Named],
    max_bytes: int,
) -> Iterator[list[Named]]:
    """Yield the tensors in batches of about `max_bytes`, or of one larger tensor."""
    batch: list[Named] = []
    num_bytes = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= max_bytes:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch
