"""Threads for requests that are too large for the event loop. Parsing, matching and
rendering a request of several megabytes takes seconds, in which no other session would
be served.

Python runs one thread at a time, so such work still slows the event loop down, but no
single step of it stops the loop. Invariants: abandoned work is not begun; one
conversation is used by one thread at a time, even after the caller has been cancelled.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Result = TypeVar("Result")
LARGE_REQUEST = 32_768
"""A request of this size is processed in a thread: tokenizing it takes 30 ms or more.
The size is the bytes of the body and the characters that its session has recorded."""
_HUGE_REQUEST = 2**21
"""More than fits into the context of most models. Such requests have a separate thread,
so that they do not delay others."""


class PromptThreads:
    """One thread for large requests and one for huge ones. Each processes its requests
    in order."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="huge-requests")

    async def run(
        self, work: Callable[[], Result], *, size: int, lock: asyncio.Lock | None = None
    ) -> Result:
        """Return or raise the result of `work`. Below `LARGE_REQUEST` the work runs
        immediately in the event loop, otherwise in a thread. `lock` is held while it
        runs. If the caller is cancelled, work that has begun runs to its end, and keeps
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

    async def _run(
        self, job: "_Job[Result]", size: int, lock: asyncio.Lock | None
    ) -> None:
        """Run a job. Never raises: a task would keep its exception, and the exception
        its frames (see `Generation`)."""
        if lock is None:
            await self._run_in_place(job, size)
            return
        async with lock:
            await self._run_in_place(job, size)

    async def _run_in_place(self, job: "_Job[Result]", size: int) -> None:
        if (
            size < LARGE_REQUEST
        ):  # it only waited for a large request of its conversation
            job.run()
            return
        executor = self._large if size < _HUGE_REQUEST else self._huge
        await asyncio.get_running_loop().run_in_executor(executor, job.run)


class _Job(Generic[Result]):
    """Work for another thread, and its result."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.abandoned = False
        """Whether the caller was cancelled: the result is not needed."""
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
                del error  # breaks the cycle of the error, its traceback and this frame
        return self._results.pop()
