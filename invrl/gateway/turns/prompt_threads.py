"""Threads for the requests that are too large for the event loop: to parse, match and render one of several
megabytes takes seconds, in which no other session would be served.

Python runs one thread at a time, so such work still slows the loop down; what matters is that no single step
of it stops the loop. Invariants: an answer that nobody waits for any more is not begun; one conversation is
worked on by one thread at a time, also after who asked for it has gone."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")
LARGE_REQUEST = 32_768
"""Bytes of a body, and characters of what its session has recorded, from which on a request is worked on in a
thread: tokenising so much takes 30 ms or more of an event loop's time."""
_HUGE_REQUEST = 2**21
"""More than fits most models' contexts. Such requests wait for each other, and keep no usual one waiting."""


class PromptThreads:
    """One thread for large requests, and one for huge ones; each keeps the order in which it was asked."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-requests")

    async def run(self, work: Callable[[], Result], *, size: int, lock: asyncio.Lock | None = None) -> Result:
        """What `work` returns or raises; below `LARGE_REQUEST` it runs here and now, else in a thread.
        `lock` is held meanwhile. If the caller is cancelled, work that has begun goes on to its end and keeps
        the lock until then."""
        if size < LARGE_REQUEST and (lock is None or not lock.locked()):
            return work()
        job = _Job(work)
        running = asyncio.create_task(self._run(job, size, lock))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            job.abandoned = True
            raise
        return job.result()

    async def _run(self, job: "_Job[Result]", size: int, lock: asyncio.Lock | None) -> None:
        """Never raises: a task keeps its exception, and that all frames below it (see `Generation`)."""
        if lock is None:
            await self._run_in_place(job, size)
            return
        async with lock:
            await self._run_in_place(job, size)

    async def _run_in_place(self, job: "_Job[Result]", size: int) -> None:
        if size < LARGE_REQUEST:  # it has waited for a large one of its conversation
            job.run()
            return
        executor = self._large if size < _HUGE_REQUEST else self._huge
        await asyncio.get_running_loop().run_in_executor(executor, job.run)


class _Job(Generic[Result]):
    """Work for another thread, and what came of it."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.abandoned = False
        """Nobody waits for the result any more."""
        self._work: Callable[[], Result] | None = work
        self._results: list[Result] = []
        self._error: Exception | None = None

    def run(self) -> None:
        work = self._work
        self._work = None
        if self.abandoned or work is None:
            return
        try:
            self._results.append(work())
        except Exception as error:
            self._error = error.with_traceback(None)

    def result(self) -> Result:
        error = self._error
        self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame holds it, and its traceback this frame
        return self._results.pop()
