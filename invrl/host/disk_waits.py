"""Work that finds its disk full: it waits for space and is then done again.

The console is told once when the first work of this process begins to wait for a disk,
rarely again, and once when the last one has found space. A cancellation ends a wait at
once.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from invrl.host.disk import full_disk, is_full, space_left, write_atomically
from invrl.host.incidents import incidents

T = TypeVar("T")
Parameters = ParamSpec("Parameters")
_POLL_S = 1.0
_REPEAT_S = 600.0
"""Between two lines about one disk."""


@dataclass(slots=True)
class _FullDisk:
    """What waits for a disk, and when the console was told last."""

    waiting: set[str] = field(default_factory=set)
    told_at: float = 0.0


_full_disks: dict[int, _FullDisk] = {}
"""By the number of their device."""
_lock = threading.Lock()


class DiskWait:
    """One thing that may have to wait for the disk of `folder`: `what`."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what

    def goes_on(self) -> None:
        """It has found no space."""
        device = os.stat(self._folder).st_dev
        now = time.monotonic()
        with _lock:
            disk = _full_disks.setdefault(device, _FullDisk())
            is_told = bool(disk.waiting) and now - disk.told_at < _REPEAT_S
            disk.waiting.add(self._what)
            if is_told:
                return
            disk.told_at = now
            waiting = ", ".join(sorted(disk.waiting))
        state = full_disk(self._folder) or space_left(self._folder)
        incidents.warning("%s; the run waits for space (%s)", state, waiting)

    def ends(self) -> None:
        """It has found space, or needs none any more."""
        with _lock:
            for device, disk in list(_full_disks.items()):
                disk.waiting.discard(self._what)
                if not disk.waiting:
                    del _full_disks[device]
                    incidents.warning("there is space again: the run goes on")


async def until_written(folder: Path, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is called again while the disk of `folder` is full.
    Raises its other errors."""
    wait = DiskWait(folder, what)
    try:
        while True:
            try:
                return await work()
            except Exception as error:
                if not is_full(error, folder):
                    raise
            wait.goes_on()
            await asyncio.sleep(_POLL_S)
    finally:
        wait.ends()


async def written_in_thread(
    folder: Path,
    what: str,
    write: Callable[Parameters, T],
    *args: Parameters.args,
    **named: Parameters.kwargs,
) -> T:
    """The result of `write`, which is called in a thread, and again while the disk of
    `folder` is full. Raises its other errors."""

    async def try_once() -> T:
        return await asyncio.to_thread(write, *args, **named)

    return await until_written(folder, what, try_once)


async def write_patiently(path: Path, text: str) -> None:
    """As `write_atomically`, but waits while the disk is full."""
    await written_in_thread(path.parent, path.name, write_atomically, path, text)


async def watch_disk(folder: Path) -> None:
    """Never returns. Says when the run's disk is full, whatever writes there."""
    wait = DiskWait(
        folder, "calls of agents; other requests are answered with 503 meanwhile"
    )
    while True:
        if full_disk(folder):
            wait.goes_on()
        else:
            wait.ends()
        await asyncio.sleep(_POLL_S)
