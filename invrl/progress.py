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
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.text import Text

from invrl.metric_sinks import SinkSet
from invrl.run_folder import write_atomically

logger = logging.getLogger(__name__)

SHOWN = {
    "rollout/reward_mean": "reward",
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
        seconds = time.monotonic() - self._started
        self.note(f"[{seconds:6.1f} s] step {step}/{self._num_steps}: {_shown(values)}")


class LiveProgress(NoProgress):
    """Two lines at the bottom of a terminal, redrawn four times a second; notes scroll above."""

    def __init__(self, num_steps: int, console: Console) -> None:
        super().__init__(console.file)
        columns = (
            "step {task.fields[step]}/{task.total}",
            BarColumn(30),
            "{task.description}",
            TimeElapsedColumn(),
        )
        self._bar, self._values = Progress(*columns, console=console), dict[str, float]()
        self._run = self._bar.add_task("starting", total=num_steps, step=0)
        self._live = Live(console=console, redirect_stderr=False, get_renderable=self.render)
        self._live.start()

    def phase(self, name: str, step: int) -> None:
        self._bar.update(self._run, description=name, step=step, completed=max(0, step - 1))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        return Group(self._bar, Text(_shown(self._values)))


def _shown(values: Mapping[str, float]) -> str:
    """The metrics of the screen, and held-out accuracies."""
    held_out = {name: name for name in values if name.startswith("eval/") and name.endswith("/accuracy")}
    labels = {name: label for name, label in SHOWN.items() if name in values} | held_out
    return ", ".join(f"{label} {_number(values[name])}" for name, label in labels.items())


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
