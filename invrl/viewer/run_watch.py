"""Follows the files of the viewed runs in one thread, and notifies the open pages of
changes.

A run is checked about once a second, with a few `stat` calls while nothing changes. The
index of a run is filled in batches, in turns with the other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from invrl.viewer.viewed_run import ViewedRun

_INTERVAL_S = 1.0
_MAX_WAITING = 100
"""Most changes that wait for a page that does not read; older ones are dropped."""

Change = dict[str, Any]


class RunWatch:
    """Watcher whose thread runs from `start` to `stop`. Pages subscribe from the event
    loop that calls `start`."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs = runs
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._follow, name="run-watch", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pages: set[asyncio.Queue[Change | None]] = set()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread and every page's stream of changes."""
        self._stop.set()
        for page in self._pages:
            page.put_nowait(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 10.0)

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Change | None]]:
        """Yield a queue of the changes from now on; None is the end."""
        page: asyncio.Queue[Change | None] = asyncio.Queue()
        if self._stop.is_set():
            page.put_nowait(None)
        self._pages.add(page)
        try:
            yield page
        finally:
            self._pages.discard(page)

    def _follow(self) -> None:
        next_notes = dict.fromkeys((run.id for run in self._runs), 0.0)
        waiting: dict[str, set[str]] = {run.id: set() for run in self._runs}
        while not self._stop.is_set():
            has_more = False
            for run in self._runs:
                kinds = self._refreshed(run)
                has_more = has_more or "index" in kinds
                waiting[run.id] |= kinds
                now = time.monotonic()
                if waiting[run.id] and now >= next_notes[run.id]:
                    self._tell(run, waiting[run.id])
                    waiting[run.id] = set()
                    next_notes[run.id] = now + _INTERVAL_S
            if not has_more:
                self._stop.wait(_INTERVAL_S)
        for run in self._runs:
            run.close()

    def _refreshed(self, run: ViewedRun) -> set[str]:
        try:
            return run.refresh(self._stop)
        except Exception as error:  # the page shows it; one run's fault does not end the others' updates
            run.failure = f"the run cannot be followed: {type(error).__name__}: {error}"
            return set()

    def _tell(self, run: ViewedRun, kinds: set[str]) -> None:
        if self._loop is None or not self._pages:
            return
        change: Change = {
            "run": run.id,
            "kinds": sorted(kinds),
        }
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._put, change)

    def _put(self, change: Change) -> None:
        for page in self._pages:
            if page.qsize() >= _MAX_WAITING:
                page.get_nowait()
            page.put_nowait(change)
