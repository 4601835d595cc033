"""What a person sees while a run goes on: phases, reward, tokens per second. A live display on a
terminal, one line a step elsewhere. `RunObserver` joins it with the metric sinks into the loop's
Observer. Invariant: nothing here raises into training. Called by `cluster.py`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from invrl.metric_sinks import SinkSet
from invrl.run_folder import write_atomically

logger = logging.getLogger(__name__)

REWARD = "rollout/reward_mean"
SHOWN = {
    REWARD: "reward",
    "rollout/reward_std": "std",
    "rollout/response_length": "tokens/rollout",
    "train/grad_norm": "grad norm",
    "time/rollout_tokens_per_s": "rollout tok/s",
    "time/train_tokens_per_s": "train tok/s",
    "time/step_s": "s/step",
}
"""The metrics on the screen; all of them are in metrics.jsonl."""
Mode = Literal["auto", "plain", "none"]


class NoProgress:
    """`--progress none`: notes only (lines that stay: where the run folder is, an evaluation's result).
    What every display has."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def phase(self, name: str, step: int) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class PlainProgress(NoProgress):
    """One line per step, and one for each phase before the first step (start-up takes a while)."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        super().__init__(stream)
        self._num_steps, self._started, self._last_phase = num_steps, time.monotonic(), ""

    def phase(self, name: str, step: int) -> None:
        if step == 0 and name != self._last_phase:
            self.note(f"[{time.monotonic() - self._started:6.1f} s] {name}")
        self._last_phase = name

    def step(self, step: int, values: Mapping[str, float]) -> None:
        held_out = {name: name for name in values if name.startswith("eval/") and name.endswith("/accuracy")}
        labels = {name: label for name, label in SHOWN.items() if name in values} | held_out
        shown = ", ".join(f"{label} {_number(values[name])}" for name, label in labels.items())
        self.note(f"[{time.monotonic() - self._started:6.1f} s] step {step}/{self._num_steps}: {shown}")


class LiveProgress(NoProgress):
    """A few lines at the bottom of a terminal, redrawn four times a second; notes scroll above."""

    def __init__(self, num_steps: int, console: Console) -> None:
        super().__init__(console.file)
        self._num_steps, self._started = num_steps, time.monotonic()
        self._phase, self._phase_since, self._step = "starting", self._started, 0
        self._values: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._live = Live(console=console, redirect_stderr=False, get_renderable=self.render)
        self._live.start()

    def phase(self, name: str, step: int) -> None:
        self._phase, self._phase_since, self._step = name, time.monotonic(), step

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._step, self._values = step, {**self._values, **values}
        if REWARD in values:
            self._rewards.append(values[REWARD])

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        now = time.monotonic()
        head, numbers = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        head.add_row(
            f"step {self._step}/{self._num_steps}",
            ProgressBar(total=self._num_steps, completed=self._step, width=30),
            f"{self._phase} {now - self._phase_since:.0f} s",
            Text(f"{now - self._started:.0f} s in all", style="dim"),
        )
        shown = [(label, self._values[name]) for name, label in SHOWN.items() if name in self._values]
        if shown:
            numbers.add_row(*(f"{label} [bold]{_number(value)}[/]" for label, value in shown))
        return Group(head, numbers, Text(sparkline(self._rewards[-60:]), style="green"))


def sparkline(values: list[float]) -> str:
    """The values as bars, from their lowest to their highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / (high - low or 1.0))] for value in values)
    return f"reward {_number(low)} {bars} {_number(high)}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def open_progress(mode: Mode, num_steps: int, stream: TextIO | None = None) -> NoProgress:
    """The display that fits the stream (default stdout)."""
    out: TextIO = sys.stdout if stream is None else stream
    if mode == "none":
        return NoProgress(out)
    if mode == "auto" and out.isatty():
        return LiveProgress(num_steps, Console(file=out))
    return PlainProgress(num_steps, out)


class RunObserver:
    """The loop's Observer: sinks and display in one, and `phase_path` for who looks from outside. A broken
    display is logged and given up."""

    def __init__(self, sinks: SinkSet, progress: NoProgress, phase_path: Path | None = None) -> None:
        self._sinks, self._progress, self._phase_path = sinks, progress, phase_path

    def phase(self, name: str, step: int) -> None:
        """`name` goes on now; step 0 is before the first."""
        if (path := self._phase_path) is not None:
            text = json.dumps({"pid": os.getpid(), "step": step, "phase": name})
            self._show(lambda progress: write_atomically(path, text))
        self._show(lambda progress: progress.phase(name, step))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step is done; step 0 may carry the evaluation before training."""
        self._sinks.write(step, values)
        self._show(lambda progress: progress.step(step, values))

    def note(self, text: str) -> None:
        self._show(lambda progress: progress.note(text))

    def close(self) -> None:
        self._sinks.close()
        self._show(lambda progress: progress.close())

    def _show(self, draw: Callable[[NoProgress], None]) -> None:
        try:
            draw(self._progress)
        except Exception:
            logger.exception("the progress display failed and is given up")
            self._progress = NoProgress(sys.stdout)
