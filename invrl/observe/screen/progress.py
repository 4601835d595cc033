"""The display of a training run: one line per step, or a live one on a terminal
(`live_progress.py`)."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console

from invrl.observe.screen.live_progress import LiveProgress
from invrl.observe.screen.step_text import describe_step
from invrl.observe.sinks.sinks import Sink
from invrl.store.metrics_file import MetricsRow

Mode = Literal["auto", "plain", "none"]


class PlainProgress(Sink):
    """Prints one line per step, and one for each phase before the first step (start-up
    takes a while)."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._started_at = time.monotonic()
        self._last_phase = ""
        self._failed: Mapping[str, int] = {}

    def phase(self, name: str, step: int) -> None:
        if step == 0 and name != self._last_phase:
            print(f"[{self._seconds():6.1f} s] {name}", flush=True)
        self._last_phase = name

    def step(self, step: int, values: Mapping[str, float]) -> None:
        text = describe_step(values, self._failed)
        print(
            f"[{self._seconds():6.1f} s] step {step}/{self._num_steps}: {text}",
            flush=True,
        )

    def failures(self, failed: Mapping[str, int]) -> None:
        self._failed = dict(failed)

    def _seconds(self) -> float:
        return time.monotonic() - self._started_at


def open_progress(mode: Mode, num_steps: int, rows: Sequence[MetricsRow] = ()) -> Sink:
    """Return the display that fits stdout. `rows`: of the run's earlier steps."""
    if mode == "none":
        return Sink()
    if mode == "auto" and sys.stdout.isatty():
        console = Console()
        if not console.is_dumb_terminal:  # TERM=dumb: it cannot move its cursor
            return LiveProgress(num_steps, console, rows)
    return PlainProgress(num_steps)
