"""What a person sees while a run goes on: phases, reward, tokens per second. A live display on a terminal,
one line a step elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.text import Text

from invrl.observe.sinks import Sink

SHOWN = {
    "rollout/reward_mean": "reward",
    "rollout/reward_std": "std",
    "rollout/response_length": "tokens/rollout",
    "rollout/truncated_share": "cut",
    "rollout/distinct_replies": "distinct replies",
    "train/grad_norm": "grad norm",
    "time/rollout_tokens_per_s": "rollout tok/s",
    "time/train_tokens_per_s": "train tok/s",
    "time/step_s": "s/step",
    "time/checkpoint_s": "s/checkpoint",
}
"""The metrics on the screen; all of them are in metrics.jsonl."""
Mode = Literal["auto", "plain", "none"]


class PlainProgress(Sink):
    """One line per step, and one for each phase before the first step (start-up takes a while)."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._started, self._last_phase = num_steps, time.monotonic(), ""
        self._failed: Mapping[str, int] = {}

    def phase(self, name: str, step: int) -> None:
        if step == 0 and name != self._last_phase:
            print(f"[{time.monotonic() - self._started:6.1f} s] {name}", flush=True)
        self._last_phase = name

    def step(self, step: int, values: Mapping[str, float]) -> None:
        seconds = time.monotonic() - self._started
        parts = [_shown(values), _counted(self._failed)]
        shown = ", ".join(part for part in parts if part)
        print(f"[{seconds:6.1f} s] step {step}/{self._num_steps}: {shown}", flush=True)

    def failures(self, failed: Mapping[str, int]) -> None:
        self._failed = dict(failed)


class LiveProgress(Sink):
    """Two lines at the bottom of a terminal, redrawn four times a second; what is printed scrolls above."""

    def __init__(self, num_steps: int, console: Console) -> None:
        columns = (
            "step {task.fields[step]}/{task.total}",
            BarColumn(30),
            "{task.description}",
            TimeElapsedColumn(),
        )
        self._bar, self._values = Progress(*columns, console=console), dict[str, float]()
        self._failed: Mapping[str, int] = {}
        self._run = self._bar.add_task("starting", total=num_steps, step=0)
        self._live = Live(console=console, redirect_stderr=False, get_renderable=self.render)
        self._live.start()

    def phase(self, name: str, step: int) -> None:
        self._bar.update(self._run, description=name, step=step, completed=max(0, step - 1))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values

    def failures(self, failed: Mapping[str, int]) -> None:
        self._failed = dict(failed)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        parts = [_shown(self._values), _counted(self._failed)]
        return Group(self._bar, Text(", ".join(part for part in parts if part)))


def _shown(values: Mapping[str, float]) -> str:
    """The metrics of the screen, and held-out accuracies with the number of rollouts that failed."""
    parts = [f"{label} {_shown_value(name, values)}" for name, label in SHOWN.items() if name in values]
    for name in values:
        if name.startswith("eval/") and name.endswith("/accuracy"):
            parts.append(f"{name} {_number(values[name])}{_failed_in(values, name.removesuffix('accuracy'))}")
    return ", ".join(parts)


def _failed_in(values: Mapping[str, float], score: str) -> str:
    """Of the evaluation whose metrics begin with `score`: rollouts that failed, which score 0."""
    failed = values.get(f"{score}failed", 0.0)
    return f" ({failed:.0f} of {values[f'{score}samples']:.0f} rollouts failed)" if failed else ""


def _shown_value(name: str, values: Mapping[str, float]) -> str:
    if name == "rollout/truncated_share":
        return f"{values[name]:.0%}"
    if name == "rollout/distinct_replies" and "rollout/rollouts" in values:
        return f"{values[name]:.0f} of {values['rollout/rollouts']:.0f}"
    return _number(values[name])


def _counted(failed: Mapping[str, int]) -> str:
    """Failed rollouts since the start of the run, by reason."""
    if not failed:
        return ""
    reasons = " ".join(f"{reason} {count}" for reason, count in sorted(failed.items()))
    return f"failed {sum(failed.values())} ({reasons})"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def open_progress(mode: Mode, num_steps: int) -> Sink:
    """The display that fits stdout."""
    if mode == "none":
        return Sink()
    live = mode == "auto" and sys.stdout.isatty()
    return LiveProgress(num_steps, Console()) if live else PlainProgress(num_steps)
