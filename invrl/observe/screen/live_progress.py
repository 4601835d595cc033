"""The display of a training run at the bottom of a terminal: a few lines, redrawn four
times a second.

    step 13/50 ━━━━━━━━━────────────────────────── about 3 min 20 s left
    reward 0.42 ▁▂▃▅▆█  held out greedy 0.51 (step 10)
    now rollout, 4.2 s: 37 of 64 rollouts (4 of 8 groups ready)
    tokens/rollout 120, grad norm 0.31, s/step 5.2, failed 3 (timeout 3)

Invariant: other output scrolls above the lines, and `close` restores the terminal.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from invrl.host.output import live_lines
from invrl.host.output.printable import one_line, printable
from invrl.observe.metrics.metric_curves import EVAL_PREFIX, EVAL_SUFFIX, REWARD
from invrl.observe.screen.charts import sparkline
from invrl.observe.screen.step_text import failures_text, format_number, metric_texts
from invrl.observe.screen.watch_screen import duration
from invrl.observe.sinks.phases import waited_for
from invrl.observe.sinks.sinks import Sink
from invrl.store.metrics_file import MetricsRow

_LOSS = "train/loss"
_HELD_OUT_LOSS = "eval/loss"
_RECENT_STEPS = 10
_MAX_BAR_WIDTH = 50
_MIN_BAR_WIDTH = 5
_MAX_CURVE_WIDTH = 30
_MIN_CURVE_WIDTH = 10
"""Least width of the curve next to the held-out scores."""


@dataclass(slots=True, kw_only=True)
class ShownRun:
    """State of a run for the display. Times are in seconds, on one clock."""

    num_steps: int
    began_at: float
    phase: str = "starting"
    phase_step: int = 0
    phase_began_at: float = 0.0
    awaited: str = ""
    steps_made: int = 0
    step_ended_at: float | None = None
    """End of the last step, or start of the first one of this incarnation. None: not
    yet."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds from one step's end to the next one's, in this incarnation, including
    evaluations and checkpoints."""
    curve: list[float] = field(default_factory=list)
    """Mean reward of each step; the loss if there are no rewards."""
    held_out: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Last value of each held-out score, and its step."""
    values: dict[str, float] = field(default_factory=dict)
    """Last value of each metric."""
    failed: Mapping[str, int] = field(default_factory=dict)
    ended_at: float | None = None

    def remaining_seconds(self, now: float) -> float | None:
        """Estimate the seconds of the remaining steps from the last ones. None before
        the first step of this incarnation has ended."""
        if not self.step_seconds or self.step_ended_at is None:
            return None
        seconds = statistics.fmean(self.step_seconds[-_RECENT_STEPS:])
        in_this_step = min(seconds, now - self.step_ended_at)
        return max(0.0, seconds * (self.num_steps - self.steps_made) - in_this_step)

    def take_values(self, step: int, values: Mapping[str, float]) -> None:
        """Record a row of metrics. A step may have several: an evaluation has its
        own."""
        self.values.update(values)
        if REWARD in values:
            self.curve.append(values[REWARD])
        elif _LOSS in values:
            self.curve.append(values[_LOSS])
        for name, value in values.items():
            is_accuracy = name.startswith(EVAL_PREFIX) and name.endswith(EVAL_SUFFIX)
            if is_accuracy or name == _HELD_OUT_LOSS:
                self.held_out[name] = (value, step)


class LiveProgress(Sink):
    """Draws in a thread of rich. `rows`: of the run's earlier steps. `clock`: in
    seconds."""

    def __init__(
        self,
        num_steps: int,
        console: Console,
        rows: Sequence[MetricsRow] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._run = ShownRun(
            num_steps=num_steps, began_at=clock(), phase_began_at=clock()
        )
        for row in rows:
            step = int(row["step"] or 0)
            values = {
                name: value
                for name, value in row.items()
                if value is not None and name != "step"
            }
            self._run.take_values(step, values)
            self._run.steps_made = max(step, self._run.steps_made)
        self._live = Live(
            console=console,
            redirect_stderr=sys.stderr.isatty(),  # a file should get its lines
            get_renderable=self.render,
        )
        self._live.start()

    @property
    def shows_waits(self) -> bool:
        return True

    def phase(self, name: str, step: int) -> None:
        run = self._run
        if (name, step) != (run.phase, run.phase_step):
            run.phase_began_at = self._clock()
            run.awaited = ""
        run.phase = name
        run.phase_step = step
        if step and run.step_ended_at is None:
            run.step_ended_at = self._clock()

    def awaits(self, text: str) -> None:
        self._run.awaited = text

    def step(self, step: int, values: Mapping[str, float]) -> None:
        run = self._run
        run.take_values(step, values)
        if step <= run.steps_made:  # a separate evaluation
            return
        now = self._clock()
        run.steps_made = step
        if run.step_ended_at is not None:
            run.step_seconds.append(now - run.step_ended_at)
        run.step_ended_at = now

    def failures(self, failed: Mapping[str, int]) -> None:
        self._run.failed = dict(failed)

    def close(self) -> None:
        self._run.ended_at = self._clock()
        try:
            self._live.stop()
        finally:
            live_lines.drawn(0)

    def render(self) -> Frame:
        return Frame(self._run, self._clock())


@dataclass(frozen=True, slots=True)
class Frame:
    """Lines at the time `now`, as wide as the console."""

    run: ShownRun
    now: float

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        # A full-width line would wrap in some terminals.
        width = max(1, options.max_width - 1)
        lines = [
            _bar_line(self.run, self.now, width),
            *_score_lines(self.run, width),
            Text(_phase_text(self.run, self.now), "cyan"),
            Text(_metrics_text(self.run), "dim"),
        ]
        lines = [line for line in lines if line.plain]
        if self.run.ended_at is None:
            live_lines.drawn(len(lines))
        for line in lines:
            line.plain = printable(line.plain)
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
            yield line


def _bar_line(run: ShownRun, now: float, width: int) -> Text:
    """Draw a bar in the space next to the texts; no bar if there is too little."""
    step = f"step {max(run.phase_step, run.steps_made)}/{run.num_steps}"
    time_text = _time_text(run, now)
    bar_width = min(_MAX_BAR_WIDTH, width - len(step) - len(time_text) - 2)
    if bar_width < _MIN_BAR_WIDTH:
        return Text.assemble((step, "bold"), " ", time_text)
    filled = min(bar_width, bar_width * run.steps_made // max(1, run.num_steps))
    return Text.assemble(
        (step, "bold"),
        " ",
        ("━" * filled, "green"),
        ("─" * (bar_width - filled), "dim"),
        " ",
        time_text,
    )


def _time_text(run: ShownRun, now: float) -> str:
    if run.ended_at is not None:
        return f"{duration(run.ended_at - run.began_at)} in all"
    seconds = run.remaining_seconds(now)
    if seconds is None:
        return "time left: unknown"
    if run.steps_made >= run.num_steps:
        return f"{duration(now - run.began_at)} so far"
    return f"about {duration(seconds)} left"


def _score_lines(run: ShownRun, width: int) -> list[Text]:
    """Return the last reward or loss, its curve, and the held-out scores, on a separate
    line if they would leave no space for the curve."""
    line = Text()
    if not run.curve:
        line.append("no step yet", "dim")
    else:
        name = "reward" if REWARD in run.values else "loss"
        line.append(f"{name} {format_number(run.curve[-1])} ")
    held_out = _held_out_text(run)
    room = width - len(line.plain)
    room_beside = room - len(held_out) - 2
    is_beside = room_beside >= min(_MIN_CURVE_WIDTH, len(run.curve))
    curve_width = min(_MAX_CURVE_WIDTH, room_beside if is_beside else room)
    line.append(sparkline(run.curve, curve_width), "green")
    if is_beside and held_out:
        line.append(f"  {held_out}")
    if is_beside or not held_out:
        return [line]
    return [line, Text(held_out)]


def _held_out_text(run: ShownRun) -> str:
    """Describe the scores of the last evaluation."""
    if not run.held_out:
        return ""
    last_step = max(step for _, step in run.held_out.values())
    parts: list[str] = []
    for name, (value, step) in sorted(run.held_out.items()):
        if step == last_step:
            label = "loss" if name == _HELD_OUT_LOSS else name.removeprefix(EVAL_PREFIX)
            parts.append(f"{label.removesuffix(EVAL_SUFFIX)} {format_number(value)}")
    when = f"step {last_step}" if last_step else "before step 1"
    return f"held out {', '.join(parts)} ({when})"


def _phase_text(run: ShownRun, now: float) -> str:
    if run.ended_at is not None:
        return f"ended in phase {run.phase}" if run.steps_made < run.num_steps else ""
    text = f"now {run.phase}, {duration(max(0.0, now - run.phase_began_at))}"
    if run.awaited:
        return one_line(f"{text}: {run.awaited}")
    waits = waited_for(run.phase)
    if not waits:
        return text
    return f"{text}: waits for {waits}"


def _metrics_text(run: ShownRun) -> str:
    texts = metric_texts(run.values)
    parts = [
        text
        for name, text in texts.items()
        if name not in (REWARD, _LOSS, _HELD_OUT_LOSS)
    ]
    if run.failed:
        parts.insert(0, failures_text(run.failed))
    return ", ".join(parts)
