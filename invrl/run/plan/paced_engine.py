"""Engines that only take time: all running requests get their tokens at the same pace,
which depends on their number."""

import asyncio
import heapq
import itertools

from invrl.run.plan.workload import Workload


class PacedEngine:
    """The engines of a workload, evenly loaded. Made inside of an event loop."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._loop = asyncio.get_running_loop()
        self._tokens = 0.0
        """Tokens that a request has which runs since the start."""
        self._seen_at = self._loop.time()
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._num_running = 0

    async def generate(self, num_tokens: float) -> None:
        self._catch_up()
        ended = self._loop.create_future()
        self._num_running += 1
        end = self._tokens + num_tokens
        heapq.heappush(self._ends, (end, next(self._numbers), ended))
        self._set_timer()
        try:
            await ended
        finally:
            self._catch_up()
            self._num_running -= 1
            self._set_timer()

    def _catch_up(self) -> None:
        now = self._loop.time()
        if self._num_running:
            step_s = self._workload.step_s(self._num_running)
            self._tokens += (now - self._seen_at) / step_s
        self._seen_at = now

    def _set_timer(self) -> None:
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and self._num_running:
            steps = max(0.0, self._ends[0][0] - self._tokens)
            seconds = steps * self._workload.step_s(self._num_running)
            self._timer = self._loop.call_later(seconds, self._end_first)

    def _end_first(self) -> None:
        self._catch_up()
        if self._ends:
            tokens, _, ended = heapq.heappop(self._ends)
            self._tokens = max(self._tokens, tokens)
            if not ended.done():
                ended.set_result(None)
        self._set_timer()
