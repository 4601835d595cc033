"""After which steps a checkpoint is saved: every so many steps, or every so many seconds.

By seconds, because one setting then suits steps of five seconds and of ten minutes. What a save costs depends
on the model and the disk, so that the seconds stretch where it takes long: saves take at most a twentieth of
the time. Which steps are saved changes nothing that a step computes."""

import time
from collections.abc import Callable

_MAX_SHARE = 0.05
"""Of the time, that saves may take."""


class SaveSchedule:
    """`steps`: between checkpoints; 0: `seconds` decides. `seconds`: since the last save, or since `begin`;
    0: none before the last step."""

    def __init__(
        self, *, steps: int = 0, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = steps
        self._seconds = seconds
        self._clock = clock
        self._since: float | None = None
        self._last_save_s = 0.0

    def begin(self) -> None:
        """The first step begins: seconds count from here."""
        self._since = self._clock()

    def is_due(self, step: int) -> bool:
        """Whether this step, which has just been made, is saved."""
        if self._steps:
            return step % self._steps == 0
        if not self._seconds or self._since is None:
            return False
        wait_s = max(self._seconds, self._last_save_s / _MAX_SHARE)
        return self._clock() - self._since >= wait_s

    def saved(self, seconds: float) -> None:
        """A checkpoint has been saved in so many seconds."""
        self._since = self._clock()
        self._last_save_s = seconds
