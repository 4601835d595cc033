"""The display of a run that trains: phases, reward, tokens per second. Two live lines on a terminal, one line
per step elsewhere."""

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
"""The metrics on the screen; all metrics are in metrics.jsonl."""
SHOWN_WITHOUT_ROLLOUTS = {
    "train/loss": "loss",
    "eval/loss": "held-out loss",
    "data/epoch": "epoch",
    "train/tokens_per_s": "tok/s",
}
"""Those of a step that has no reward."""
Mode = Literal["auto", "plain", "none"]


class PlainProgress(Sink):
    """One line per step, and one for each phase before the first step (start-up takes a while)."""

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
        print(f"[{self._seconds():6.1f} s] step {step}/{self._num_steps}: {text}", flush=True)

    def failures(self, failed: Mapping[str, int]) -> None:
        self._failed = dict(failed)

    def _seconds(self) -> float:
        return time.monotonic() - self._started_at


class LiveProgress(Sink):
    """Two lines at the bottom of a terminal, redrawn four times a second. Printed text scrolls above them."""

    def __init__(self, num_steps: int, console: Console) -> None:
        columns = (
            "step {task.fields[step]}/{task.total}",
            BarColumn(30),
            "{task.description}",
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console)
        self._values: dict[str, float] = {}
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
        return Group(self._bar, Text(describe_step(self._values, self._failed)))


def describe_step(values: Mapping[str, float], failed: Mapping[str, int]) -> str:
    """The metrics of the screen, held-out accuracies, and failed rollouts since the start of the run."""
    parts: list[str] = []
    shown = SHOWN if "rollout/reward_mean" in values else SHOWN | SHOWN_WITHOUT_ROLLOUTS
    for name, label in shown.items():
        if name in values:
            parts.append(f"{label} {_format_metric(name, values)}")
    for name, value in values.items():
        if name.startswith("eval/") and name.endswith("/accuracy"):
            failures = _describe_eval_failures(name.removesuffix("accuracy"), values)
            parts.append(f"{name} {_format_number(value)}{failures}")
    if failed:
        by_reason = [f"{reason} {count}" for reason, count in sorted(failed.items())]
        parts.append(f"failed {sum(failed.values())} ({' '.join(by_reason)})")
    return ", ".join(parts)


def _describe_eval_failures(prefix: str, values: Mapping[str, float]) -> str:
    """Failed rollouts, which score 0, of the evaluation whose metrics begin with `prefix`."""
    num_failed = values.get(f"{prefix}failed", 0.0)
    if not num_failed:
        return ""
    num_samples = values[f"{prefix}samples"]
    return f" ({num_failed:.0f} of {num_samples:.0f} rollouts failed)"


def _format_metric(name: str, values: Mapping[str, float]) -> str:
    if name == "rollout/truncated_share":
        return f"{values[name]:.0%}"
    if name == "rollout/distinct_replies" and "rollout/rollouts" in values:
        return f"{values[name]:.0f} of {values['rollout/rollouts']:.0f}"
    return _format_number(values[name])


def _format_number(value: float) -> str:
    if abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def open_progress(mode: Mode, num_steps: int) -> Sink:
    """The display that fits stdout."""
    if mode == "none":
        return Sink()
    if mode == "auto" and sys.stdout.isatty():
        return LiveProgress(num_steps, Console())
    return PlainProgress(num_steps)
