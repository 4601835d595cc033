"""A clock that a test sets: it stands still, jumps, or goes on at each look."""

import time
from dataclasses import dataclass

import pytest


@dataclass
class SteppedClock:
    now_s: float = 0.0
    pace_s: float = 0.0
    """What passes between two looks."""

    def __call__(self) -> float:
        self.now_s += self.pace_s
        return self.now_s

    def step(self, seconds: float) -> None:
        self.now_s += seconds


class SteppedMachine:
    """The clocks of the machine as a process sees them whose clock is set, or that is
    stopped for a while: `time.time` itself, and in `monotonic` the other one, which
    asyncio does not see."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._wall_s = 0.0
        self._stopped_s = 0.0
        wall = time.time
        patch.setattr(time, "time", lambda: wall() + self._wall_s)

    def monotonic(self) -> float:
        return time.monotonic() + self._stopped_s

    def set_clock(self, forward_s: float) -> None:
        self._wall_s += forward_s

    def stop_for(self, seconds: float) -> None:
        """The process is stopped, as by SIGSTOP; the wall clock goes on meanwhile."""
        self._wall_s += seconds
        self._stopped_s += seconds
