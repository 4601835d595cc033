"""Signs of life of the gateway's processes, in a page of memory that all of them share.

The supervisor and each worker's event loop count up a number of their own. The supervisor looks at the
workers' numbers, and the process that started the gateway at the supervisor's. A number that stands still for
`heartbeat_timeout_s` means that its process is stopped or hung: it is killed, and replaced like a dead one.
The page also tells the workers that the run has ended.
Invariant: silence counts only while the watcher itself runs, so a machine that was suspended, or a watcher
that was, accuses nobody."""

import mmap
import os
import time
from collections.abc import Callable, Sequence

SUPERVISOR = 0
"""The supervisor's place in the page; worker n has place n + 1."""
START_ALLOWANCE_S = 120.0
"""Until a process that was just started must have shown its first sign of life."""
_WORD_BYTES = 8


def worker_place(number: int) -> int:
    return number + 1


def beat_interval_s(timeout_s: float) -> float:
    """Seconds between two signs of life, and between two looks at them."""
    return min(1.0, timeout_s / 8)


class HeartbeatPage:
    """Two uint64 for the supervisor and for each of `workers` workers: its beats, and how often it was killed
    because they stopped; and one more, which is not 0 once the run has ended. `file`: open file of
    `HeartbeatPage.create`, which processes inherit."""

    def __init__(self, file: int, *, workers: int) -> None:
        self._places = workers + 1
        self._words = memoryview(mmap.mmap(file, _page_bytes(workers))).cast("Q")

    @staticmethod
    def create(*, workers: int) -> int:
        """An open file for the page, all numbers 0."""
        file = os.memfd_create("invrl-gateway-heartbeats")
        os.ftruncate(file, _page_bytes(workers))
        return file

    def end_run(self) -> None:
        """For good: the next run has another page."""
        self._words[-1] = 1

    def run_has_ended(self) -> bool:
        return self._words[-1] != 0

    def beat(self, place: int) -> None:
        self._words[place] += 1

    def beats(self, place: int) -> int:
        """0: none since the process of this place was started."""
        return self._words[place]

    def start_over(self, place: int) -> None:
        """Another process takes this place, and has not shown a sign of life."""
        self._words[place] = 0

    def count_hung(self, place: int) -> None:
        self._words[self._places + place] += 1

    def hung(self, place: int) -> int:
        """How often a process in this place was killed because it was silent."""
        return self._words[self._places + place]


def _page_bytes(workers: int) -> int:
    return _WORD_BYTES * (2 * (workers + 1) + 1)


class SilenceWatch:
    """Looks again and again at the beats of `places` and says which have been silent for `timeout_s`."""

    def __init__(
        self,
        page: HeartbeatPage,
        places: Sequence[int],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page = page
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_look = clock()
        self._beats = dict.fromkeys(places, 0)
        self._silent_s = dict.fromkeys(places, 0.0)

    def silent(self) -> list[int]:
        """Places without a beat for `timeout_s`; those without any beat may take `START_ALLOWANCE_S`."""
        now = self._clock()
        # A long time between two looks is ours: we were stopped, or busy, and perhaps everybody was.
        elapsed_s = min(now - self._last_look, self._timeout_s / 4)
        self._last_look = now
        found = []
        for place, before in self._beats.items():
            beats = self._page.beats(place)
            if beats != before:
                self._beats[place] = beats
                self._silent_s[place] = 0.0
                continue
            self._silent_s[place] += elapsed_s
            allowed_s = self._timeout_s if beats else max(self._timeout_s, START_ALLOWANCE_S)
            if self._silent_s[place] >= allowed_s:
                found.append(place)
        return found

    def start_over(self, place: int) -> None:
        """Another process takes this place."""
        self._page.start_over(place)
        self._beats[place] = 0
        self._silent_s[place] = 0.0
