"""Time while a process was awake, which measures silence and the deadlines of
sessions and leases.

The machine's clock is for people. It jumps when it is set, and when a machine wakes up;
the monotonic clock does not, but continues while a process is stopped. Nobody could
make a call in such a gap, so no deadline may pass in it. Invariant: between two
readings of the clock, at most a longest gap counts.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])

_LONGEST_GAP_S = 10.0
"""More than a busy process needs between two readings, and less than any deadline in
use."""
_MICROSECONDS = 1_000_000


class Stopwatch:
    """Measures the time between two readings. A late reading means that this process
    was stopped or busy, and perhaps those that it watches too: at most `longest_gap_s`
    count."""

    def __init__(
        self, *, longest_gap_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._last_look = clock()

    def lap_s(self) -> float:
        """Return the seconds awake since the last reading."""
        now = self._clock()
        elapsed_s = min(now - self._last_look, self._longest_gap_s)
        self._last_look = now
        return elapsed_s


class AwakeClock:
    """Clock of the time awake, which must be read regularly. `word`: one uint64 of
    memory that outlives the process, in which a later process with the same word
    continues to count microseconds; by default the count begins at 0."""

    def __init__(
        self,
        word: memoryview | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._word = memoryview(bytearray(8)).cast("Q") if word is None else word
        self._stopwatch = Stopwatch(longest_gap_s=_LONGEST_GAP_S, clock=clock)

    def now(self) -> float:
        """Return the seconds awake. They never decrease."""
        self._word[0] += round(self._stopwatch.lap_s() * _MICROSECONDS)
        return self._word[0] / _MICROSECONDS


async def awake_wait(
    futures: Collection[FutureT],
    timeout_s: float,
    *,
    return_when: str = asyncio.ALL_COMPLETED,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[set[FutureT], set[FutureT]]:
    """Wait as `asyncio.wait` does, until this process was awake for `timeout_s`.
    Returns the done and the pending futures."""
    awake_time = AwakeClock(clock=clock)
    while True:
        left_s = max(0.0, timeout_s - awake_time.now())
        slice_s = min(left_s, _LONGEST_GAP_S / 2)
        done, pending = await asyncio.wait(
            futures, timeout=slice_s, return_when=return_when
        )
        has_failed = any(
            not future.cancelled() and future.exception() for future in done
        )
        if (
            not pending
            or not left_s
            or (done and return_when == asyncio.FIRST_COMPLETED)
            or (has_failed and return_when == asyncio.FIRST_EXCEPTION)
        ):
            return done, pending
