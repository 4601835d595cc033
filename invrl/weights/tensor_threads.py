"""Work on the bytes of many tensors, by a few threads: one core alone does not use the
memory's bandwidth.

Copies and checksums leave Python's lock while they run, but threads that come back for
it after each small tensor wait for one another. So a thread takes several tensors at a
time. In a process that uses a GPU there is nothing to gain, and one thread does it all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MOST_THREADS = 4
"""More do not move bytes faster, and others want the cores."""
_BATCH_BYTES = 4 << 20
"""That a thread takes at a time, or one tensor if that is larger."""

Named = tuple[str, "torch.Tensor"]


def by_threads(
    work: Callable[[str, torch.Tensor], str], tensors: Iterable[Named]
) -> dict[str, str]:
    """`work(name, tensor)` of each tensor, by its name.

    The tensors are taken one by one, by this thread. An iterator that makes them has no
    more in memory than one batch for each thread, and one. Raises what `work` raises,
    once all that has begun has ended.
    """
    import torch

    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if num_threads == 1 or torch.cuda.is_initialized():
        return {name: work(name, tensor) for name, tensor in tensors}
    in_inference_mode = torch.is_inference_mode_enabled()

    def work_on(batch: list[Named]) -> dict[str, str]:
        with torch.inference_mode(
            in_inference_mode
        ):  # each thread has a mode of its own
            return {name: work(name, tensor) for name, tensor in batch}

    free_threads = threading.Semaphore(num_threads)
    results: list[Future[dict[str, str]]] = []
    with ThreadPoolExecutor(num_threads, "tensors") as threads:
        for batch in _batches(tensors):
            free_threads.acquire()
            result = threads.submit(work_on, batch)
            result.add_done_callback(lambda _: free_threads.release())
            results.append(result)
    by_name: dict[str, str] = {}
    for result in results:
        by_name |= result.result()
    return by_name


def _batches(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    batch: list[Named] = []
    num_bytes = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch
