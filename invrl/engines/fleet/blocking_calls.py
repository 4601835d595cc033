"""Calls that block, in threads of their own.

A caller that is cancelled leaves its call behind: what the call starts or ends is
started or ended all the same, and `until_ended` waits for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BlockingCalls:
    """`max_threads`: so many calls run at once, and further ones wait."""

    def __init__(self, max_threads: int, *, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix=name)
        self._calls: set[asyncio.Future[Any]] = set()
        """Also those for which nobody waits any more."""

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.run_in_executor(
            self._threads, lambda: call(*args, **kwargs)
        )
        self._calls.add(future)
        future.add_done_callback(self._forget)
        return await asyncio.shield(future)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._calls.discard(future)
        if not future.cancelled():
            # A cancelled caller does not take it, and asyncio would complain of that.
            future.exception()

    async def until_ended(self) -> None:
        await asyncio.gather(*self._calls, return_exceptions=True)
