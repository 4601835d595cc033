"""Lines that tell what a long start waits for, and whether the machine is
overloaded."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL_S = 15.0
_OVERLOADED = 1.5
"""Runnable processes per core. Below that a start takes about as long as on a quiet
machine."""


def overload() -> str:
    """Describe an overload, such as "; the machine is overloaded: load 9.2 on 2 cores".
    Empty if there is none."""
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    if load < _OVERLOADED * cores:
        return ""
    return f"; the machine is overloaded: load {load:.1f} on {cores} cores"


@contextmanager
def print_waits(
    awaited: Callable[[], str], *, interval_s: float = INTERVAL_S
) -> Iterator[None]:
    """Print every `interval_s` what the block waits for, in a thread, because the start
    of Ray blocks the event loop. `awaited`: such as "engines, trainer", or "" for
    nothing."""
    is_over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not is_over.wait(interval_s):
            parts = awaited()
            if parts:
                seconds = time.monotonic() - began
                print(
                    f"after {seconds:.0f} s: waiting for {parts}{overload()}",
                    flush=True,
                )

    thread = threading.Thread(target=tell, name="wait-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
