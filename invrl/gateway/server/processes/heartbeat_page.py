"""Heartbeats of the gateway's processes, in one page of shared memory.

The supervisor and the event loop of each worker each increment a counter. The
supervisor checks the workers' counters; the process that started the gateway checks the
supervisor's. A process whose counter has not changed for `heartbeat_timeout_s` is
stopped or hangs: it is killed and replaced like one that died. The page also tells the
workers that the run has ended, the newest version of the weights, and the load of the
engines; in it the workers count wrong answers of engines, the turns that they hold, and
the lived time of each worker's place. Invariant: a suspended machine or a stopped
watcher makes no process count as silent: of the time between two checks, at most a
quarter of the timeout counts.
"""

import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from invrl.host.processes.awake_time import Stopwatch
from invrl.types.fleet import FleetSnapshot
from invrl.types.weights import WeightVersion

SUPERVISOR = 0
"""Index of the supervisor in the page; worker n has index n + 1."""
START_ALLOWANCE_S = 120.0
"""Deadline of a new process's first heartbeat."""
_WORD_BYTES = 8
_SNAPSHOT_BYTES = 1 << 18
"""Room for the load of about a thousand engines."""


def worker_place(number: int) -> int:
    return number + 1


def beat_interval_s(timeout_s: float) -> float:
    """Return the seconds between two heartbeats of a process, and between two checks of
    them."""
    return min(1.0, timeout_s / 8)


class HeartbeatPage:
    """An array of uint64. The supervisor and each of `workers` workers have six words:
    the number of heartbeats, how often the process was killed because they stopped,
    wrong answers of engines, how often it has ended by itself, the lived time of its
    place (`AwakeClock`), and the turns that its gate holds. Then comes the newest
    version of the weights. The last word is not 0 once the run has ended. Behind the
    words are the length and the checksum of the load of the engines, and its JSON.
    `file` is the open file that `create` returned, which child processes inherit."""

    def __init__(self, file: int, *, workers: int) -> None:
        self._places = workers + 1
        page = memoryview(mmap.mmap(file, _page_bytes(workers)))
        end_of_words = _page_bytes(workers) - _SNAPSHOT_BYTES
        self._words = page[:end_of_words].cast("Q")
        self._snapshot_head = page[end_of_words:][: 2 * _WORD_BYTES].cast("Q")
        self._snapshot = page[end_of_words + 2 * _WORD_BYTES :]
        self._newest_snapshot = FleetSnapshot()

    @staticmethod
    def create(*, workers: int) -> int:
        """Return an open file for the page; all words are 0."""
        file = os.memfd_create("invrl-gateway-heartbeats")
        os.ftruncate(file, _page_bytes(workers))
        return file

    def end_run(self) -> None:
        """Tell all workers that the run has ended. This is permanent: the next run has
        another page."""
        self._words[-1] = 1

    def run_has_ended(self) -> bool:
        return self._words[-1] != 0

    def announce_version(self, version: WeightVersion) -> None:
        """Announce that an engine may hold this version. 0 until the first call: the
        model folder's weights."""
        self._words[-2] = version

    def newest_version(self) -> WeightVersion:
        return WeightVersion(self._words[-2])

    def announce_load(self, fleet: FleetSnapshot) -> None:
        """Give the workers the load of the engines; nothing if it is too long."""
        json = msgspec.json.encode(fleet)
        if len(json) <= len(self._snapshot):
            self._snapshot_head[0] = len(json)
            self._snapshot_head[1] = zlib.crc32(json)
            self._snapshot[: len(json)] = json

    def fleet(self) -> FleetSnapshot:
        """Return the load of the engines that was announced last. One that is being
        written is not read: the one that was read before it is returned."""
        num_bytes, checksum = self._snapshot_head
        json = bytes(self._snapshot[:num_bytes])
        if json and zlib.crc32(json) == checksum:
            self._newest_snapshot = msgspec.json.decode(json, type=FleetSnapshot)
        return self._newest_snapshot

    def count_wrong_reply(self, place: int) -> None:
        self._words[2 * self._places + place] += 1

    def wrong_replies(self) -> int:
        """Return the wrong answers of engines to all workers, since the page was
        made."""
        return sum(self._words[2 * self._places : 3 * self._places])

    def count_ended(self, place: int) -> None:
        self._words[3 * self._places + place] += 1

    def ended(self, place: int) -> int:
        """Return how often a process in this place has ended without being killed for
        its silence."""
        return self._words[3 * self._places + place]

    def awake_word(self, number: int) -> memoryview:
        """Return where worker `number`, and those that replace it, count their lived
        time."""
        position = 4 * self._places + worker_place(number)
        return self._words[position : position + 1]

    def note_held_turns(self, place: int, count: int) -> None:
        self._words[5 * self._places + place] = count

    def held_turns(self) -> int:
        """Return the turns that the gates of all workers hold now."""
        return sum(self._words[5 * self._places : 6 * self._places])

    def beat(self, place: int) -> None:
        self._words[place] += 1

    def beats(self, place: int) -> int:
        """Return the heartbeats since the process in this place was started."""
        return self._words[place]

    def start_over(self, place: int) -> None:
        """Reset the place for another process that has not sent a heartbeat yet."""
        self._words[place] = 0
        self.note_held_turns(place, 0)

    def count_hung(self, place: int) -> None:
        self._words[self._places + place] += 1

    def hung(self, place: int) -> int:
        """Return how often a process in this place was killed because its heartbeats
        stopped."""
        return self._words[self._places + place]


@dataclass(frozen=True, slots=True)
class WorkerHeartbeats:
    """The page as one worker uses it: it writes to its own place, and reads what all
    workers are told."""

    page: HeartbeatPage
    place: int

    def beat(self) -> None:
        """Tell that the event loop runs."""
        self.page.beat(self.place)

    def count_wrong_reply(self) -> None:
        self.page.count_wrong_reply(self.place)

    def note_held_turns(self, count: int) -> None:
        self.page.note_held_turns(self.place, count)


def _page_bytes(workers: int) -> int:
    return _WORD_BYTES * (6 * (workers + 1) + 2) + _SNAPSHOT_BYTES


class SilenceWatch:
    """Finds the processes of `places` that have sent no heartbeat for `timeout_s`.
    `silent` must be called regularly."""

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
        """Return the places without a heartbeat for `timeout_s`. A process that has not
        sent its first one is allowed `START_ALLOWANCE_S`."""
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
        """Reset the place for another process."""
        self._page.start_over(place)
        self._beats[place] = 0
        self._silent_s[place] = 0.0
