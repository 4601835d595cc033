"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it,
so that hours of a run take seconds.

Nothing in such a run may wait for another thread or process: work that would run in a
thread runs at once instead.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, cast

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class _NoWait(selectors.SelectSelector):
    """Adds the time for which it was asked to wait to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another, and no timer is set")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """The clock begins at 0 s."""

    def __init__(self) -> None:
        self._no_wait = _NoWait()
        super().__init__(cast(Any, self._no_wait))

    def time(self) -> float:
        return self._no_wait.now_s

    def run_in_executor(
        self,
        executor: object,
        func: Callable[[*Arguments], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        result = self.create_future()
        try:
            result.set_result(func(*args))
        except Exception as error:
            result.set_exception(error)
        return result


def run_jumping(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a clock of its own."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)
