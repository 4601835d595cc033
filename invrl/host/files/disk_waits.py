"""Work that waits for space when its disk is full, and is then done again.

The console shows one line when the first work of this process begins to wait for a
disk, repeats it rarely, and shows another when the last one has found space. A
cancellation ends a wait immediately.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from invrl.host.files.disk import full_disk, is_full, space_left, write_atomically
from invrl.host.output.incidents import incidents

T = TypeVar("T")
Parameters = ParamSpec("Parameters")
_POLL_S = 1.0
_REPEAT_S = 600.0
"""Seconds between two lines about one disk."""


@dataclass(slots=True)
class _FullDisk:
    """Work that waits for a disk, and the time of the last console line."""

    waiting: set[str] = field(default_factory=set)
    told_at: float = 0.0


_full_disks: dict[int, _FullDisk] = {}
"""Full disks by device number."""
_lock = threading.Lock()


class DiskWait:
    """Wait of one piece of work, `what`, for the disk of `folder`."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what

    def goes_on(self) -> None:
        """Record that it has found no space."""
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
        """Record that it has found space, or needs none any more."""
        with _lock:
            for device, disk in list(_full_disks.items()):
                disk.waiting.discard(self._what)
                if not disk.waiting:
                    del _full_disks[device]
                    incidents.warning("there is space again: the run goes on")


async def until_written(folder: Path, what: str, work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `work`, which is called again while the disk of `folder` is
    full. Raises its other errors."""
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
    """Return the result of `write`, which is called in a thread, and again while the
    disk of `folder` is full. Raises its other errors."""

    async def try_once() -> T:
        return await asyncio.to_thread(write, *args, **named)

    return await until_written(folder, what, try_once)


async def write_patiently(path: Path, text: str) -> None:
    """Write as `write_atomically` does, but wait while the disk is full."""
    await written_in_thread(path.parent, path.name, write_atomically, path, text)


async def watch_disk(folder: Path) -> None:
    """Report when the run's disk is full, independently of writes. Never returns."""
    wait = DiskWait(
        folder, "calls of agents; other requests are answered with 503 meanwhile"
    )
    while True:
        if full_disk(folder):
            wait.goes_on()
        else:
            wait.ends()
        await asyncio.sleep(_POLL_S)
