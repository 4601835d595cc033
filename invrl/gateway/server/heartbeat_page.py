"""Heartbeats of the gateway's processes, in one page of memory that all of them share.

The supervisor and the event loop of each worker count up a number of their own. The
supervisor checks the workers' numbers; the process that started the gateway checks the
supervisor's. A process whose number has not changed for `heartbeat_timeout_s` is
stopped or hangs: it is killed and replaced like one that died. The page also tells the
workers that the run has ended, and which version of the weights is the newest; the
workers count in it how often an engine has answered wrongly, and the time that each
worker's place has lived through. Invariant: a suspended machine or a stopped watcher
makes no process count as silent: of the time between two checks, at most a quarter of
the timeout counts."""

import mmap
import os
import time
from collections.abc import Callable, Sequence

from invrl.host.lived_time import Stopwatch
from invrl.types.weights import WeightVersion

SUPERVISOR = 0
"""The supervisor's place in the page; worker n has place n + 1."""
START_ALLOWANCE_S = 120.0
"""A process that was just started must send its first heartbeat within this time."""
_WORD_BYTES = 8


def worker_place(number: int) -> int:
    return number + 1


def beat_interval_s(timeout_s: float) -> float:
    """Seconds between two heartbeats of a process, and between two checks of them."""
    return min(1.0, timeout_s / 8)


class HeartbeatPage:
    """An array of uint64. The supervisor and each of `workers` workers have five words:
    the number of their heartbeats, how often the process was killed because they
    stopped, how many wrong answers of engines it has got, how often it has ended by
    itself, and the time that its place has lived through (`LivedTime`). Then comes the
    newest version of the weights. The last word is not 0 once the run has ended.
    `file`: the open file that `create` returned, which child processes inherit."""

    def __init__(self, file: int, *, workers: int) -> None:
        self._places = workers + 1
        self._words = memoryview(mmap.mmap(file, _page_bytes(workers))).cast("Q")

    @staticmethod
    def create(*, workers: int) -> int:
        """Returns an open file for the page; all words are 0."""
        file = os.memfd_create("invrl-gateway-heartbeats")
        os.ftruncate(file, _page_bytes(workers))
        return file

    def end_run(self) -> None:
        """Tells all workers that the run has ended. It is never taken back: the next
        run has another page."""
        self._words[-1] = 1

    def run_has_ended(self) -> bool:
        return self._words[-1] != 0

    def announce_version(self, version: WeightVersion) -> None:
        """From now on an engine may hold this version. 0 until the first call: the
        model folder's weights."""
        self._words[-2] = version

    def newest_version(self) -> WeightVersion:
        return WeightVersion(self._words[-2])

    def count_wrong_answer(self, place: int) -> None:
        self._words[2 * self._places + place] += 1

    def wrong_answers(self) -> int:
        """Of engines to all workers, since the page was made."""
        return sum(self._words[2 * self._places : 3 * self._places])

    def count_ended(self, place: int) -> None:
        self._words[3 * self._places + place] += 1

    def ended(self, place: int) -> int:
        """How often a process in this place has ended without being killed for its
        silence."""
        return self._words[3 * self._places + place]

    def lived_word(self, number: int) -> memoryview:
        """Where worker `number`, and those that replace it, count the time that they
        have lived through."""
        position = 4 * self._places + worker_place(number)
        return self._words[position : position + 1]

    def beat(self, place: int) -> None:
        self._words[place] += 1

    def beats(self, place: int) -> int:
        """Heartbeats since the process in this place was started."""
        return self._words[place]

    def start_over(self, place: int) -> None:
        """Another process takes this place and has not sent a heartbeat yet."""
        self._words[place] = 0

    def count_hung(self, place: int) -> None:
        self._words[self._places + place] += 1

    def hung(self, place: int) -> int:
        """How often a process in this place was killed because its heartbeats
        stopped."""
        return self._words[self._places + place]


def _page_bytes(workers: int) -> int:
    return _WORD_BYTES * (5 * (workers + 1) + 2)


class SilenceWatch:
    """Finds the processes of `places` that have sent no heartbeat for `timeout_s`.
    `silent` has to be called regularly."""

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
        self._stopwatch = Stopwatch(longest_gap_s=timeout_s / 4, clock=clock)
        self._beats = dict.fromkeys(places, 0)
        self._silent_s = dict.fromkeys(places, 0.0)

    def silent(self) -> list[int]:
        """The places without a heartbeat for `timeout_s`. A process that has not sent
        its first one is allowed `START_ALLOWANCE_S`."""
        elapsed_s = self._stopwatch.lap_s()
        silent_places = []
        for place, last_beats in self._beats.items():
            beats = self._page.beats(place)
            if beats != last_beats:
                self._beats[place] = beats
                self._silent_s[place] = 0.0
                continue
            self._silent_s[place] += elapsed_s
            allowed_s = self._timeout_s
            if beats == 0:
                allowed_s = max(self._timeout_s, START_ALLOWANCE_S)
            if self._silent_s[place] >= allowed_s:
                silent_places.append(place)
        return silent_places

    def start_over(self, place: int) -> None:
        """Another process takes this place."""
        self._page.start_over(place)
        self._beats[place] = 0
        self._silent_s[place] = 0.0
