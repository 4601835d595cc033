"""The steps after which a checkpoint is saved: every n steps, or every n seconds.

The default is by seconds, because one setting then suits steps of five seconds and of
ten minutes. The duration of a save depends on the model and the disk. If saves take
long, the interval grows, so that they take at most a twentieth of the time. The choice
of steps does not change what a step computes.
"""

import time
from collections.abc import Callable

_MAX_TIME_SHARE = 0.05


class SaveSchedule:
    """`steps`: between checkpoints; with None, `seconds` decides. `seconds`: since the
    last save, or since `begin`; with None no checkpoint is due before the last step."""

    def __init__(
        self,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._seconds = seconds
        self._clock = clock
        self._last_save_at: float | None = None
        self._last_save_s = 0.0

    def begin(self) -> None:
        """Start counting seconds at the first step."""
        self._last_save_at = self._clock()

    def is_due(self, step: int) -> bool:
        """Whether this step, just made, should be saved."""
        if self._steps:
            return step % self._steps == 0
        if not self._seconds or self._last_save_at is None:
            return False
        interval_s = max(self._seconds, self._last_save_s / _MAX_TIME_SHARE)
        return self._clock() - self._last_save_at >= interval_s

    def saved(self, seconds: float) -> None:
        """Record that a checkpoint has been saved, and the seconds that it took."""
        self._last_save_at = self._clock()
        self._last_save_s = seconds
