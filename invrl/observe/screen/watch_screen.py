"""The screen of `invrl watch`, which turns a run's status into text. Pure.

It may include model output and exceptions, so every text of the run is shown with
escapes for control characters, and nothing is parsed as rich markup.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from invrl.host.output.printable import one_line, printable
from invrl.observe.metrics.metric_curves import (
    EVAL_PREFIX,
    REWARD,
    REWARD_MAX,
    REWARD_MIN,
    curve,
    eval_names,
)
from invrl.observe.screen.charts import BLOCKS, block_chart, downsample
from invrl.observe.screen.step_text import format_number
from invrl.observe.sinks.phases import waited_for
from invrl.observe.status.run_status import RunStatus
from invrl.store.metrics_file import MetricsRow
from invrl.store.timeline_file import Sample, Span

SHOWN_METRICS = {
    "rollout/response_length": "tokens per rollout",
    "rollout/truncated_share": "cut off",
    "rollout/staleness_mean": "staleness",
    "train/entropy": "entropy",
    "train/kl_reference": "KL to the reference",
    "train/clip_fraction": "clipped",
    "train/rollout_logprob_gap_mean": "log-prob gap",
    "train/grad_norm": "gradient norm",
    "train/loss": "loss",
    "time/rollout_tokens_per_s": "rollout tokens/s",
    "time/train_tokens_per_s": "train tokens/s",
}
"""Metrics of the last step, if the run has them."""
_STEP_TIME = "time/step_s"
_RECENT_STEPS = 10
_BAR_WIDTH = 20
_GIB = 2**30


def screen(status: RunStatus, size: ConsoleDimensions, *, now: float) -> RenderableType:
    """Return the whole screen. `now`: Unix seconds."""
    parts: list[RenderableType] = [_head(status, now=now)]
    parts += [_line(f"note: {note}", "yellow") for note in status.notes]
    parts += _reward(status, size)
    parts += _metrics(status)
    parts += _phases(status)
    parts += _processes(status, now=now)
    parts += _evaluations(status)
    parts += _failures(status)
    return Group(*parts)


# ----------------------------------------------------------------- the parts


def _head(status: RunStatus, *, now: float) -> RenderableType:
    color = {"running": "green", "ended": "blue"}.get(status.state, "red")
    state: str = status.state
    if state in ("failed", "interrupted"):
        state = f"{state} before its last step"
    head = Text.assemble(
        (_safe(status.name), "bold"), "  ", (state, color), no_wrap=True
    )
    lines = [head, _line(_progress(status), "")]
    if status.phase is not None and status.state != "ended":
        lines.append(_line(_phase_now(status, now=now), "cyan"))
    if status.state != "running":
        lines.append(Text(_safe(status.outcome)))
    return Group(*lines)


def _progress(status: RunStatus) -> str:
    made, wanted = status.steps_made, status.num_steps
    text = f"step {made}"
    if wanted:
        filled = round(_BAR_WIDTH * min(1.0, made / wanted))
        text = f"step {made} of {wanted} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
    seconds = recent_step_seconds(status.rows)
    if seconds is not None:
        text += f"  {duration(seconds)} a step"
        if status.state == "running" and wanted and wanted > made:
            text += f", about {duration(seconds * (wanted - made))} left"
    return text


def _phase_now(status: RunStatus, *, now: float) -> str:
    phase = status.phase
    assert phase is not None, "the caller has looked"
    if status.state != "running":
        return f"the last phase was {phase.name}, in step {phase.step}"
    text = f"now: {phase.name}"
    if phase.step:
        text += f", step {phase.step}"
    text += f", for {duration(max(0.0, now - phase.since))}"
    waits = waited_for(phase.name)
    if waits:
        text += f"; waits for {'the ' if waits != 'rollouts' else ''}{waits}"
    return text


def _reward(status: RunStatus, size: ConsoleDimensions) -> list[RenderableType]:
    """Draw the curve of rewards. Held-out accuracies and losses are only in the table
    below it."""
    _, rewards = curve(status.rows, REWARD)
    if not rewards:
        return [_line("no reward yet", "dim")]
    low, high = _reward_limits(status.rows, rewards)
    label_width = max(len(format_number(low)), len(format_number(high)))
    width = max(1, size.width - label_width - 3)
    height = max(3, min(8, size.height // 5))
    rows = block_chart(rewards, width, height, low=low, high=high)
    title = f"reward {format_number(rewards[0])} -> {format_number(rewards[-1])}"
    if len(downsample(rewards, width)) < len(rewards):
        title += f" (a column is {len(rewards) / width:.1f} steps)"
    lines: list[RenderableType] = [_title(title)]
    for index, row in enumerate(rows):
        label = ""
        if index == 0:
            label = format_number(high)
        elif index == len(rows) - 1:
            label = format_number(low)
        lines.append(
            Text.assemble(
                (f"{label:>{label_width}} |", "dim"), (row, "green"), no_wrap=True
            )
        )
    return lines


def _reward_limits(
    rows: Sequence[MetricsRow], rewards: Sequence[float]
) -> tuple[float, float]:
    """Return the range of single rewards."""
    _, lowest = curve(rows, REWARD_MIN)
    _, highest = curve(rows, REWARD_MAX)
    low = min([*lowest, *rewards])
    high = max([*highest, *rewards])
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def _metrics(status: RunStatus) -> list[RenderableType]:
    latest: dict[str, float] = {}
    for row in status.rows:
        latest.update({name: value for name, value in row.items() if value is not None})
    texts = [
        f"{label} {format_number(latest[name])}"
        for name, label in SHOWN_METRICS.items()
        if name in latest
    ]
    if not texts:
        return []
    return [Text(_safe(", ".join(texts)))]


def _phases(status: RunStatus) -> list[RenderableType]:
    """Return the mean seconds of each phase over the last steps."""
    spans = [
        span for span in status.timeline.spans if span.step and span.name != "starting"
    ]
    steps = sorted({span.step for span in spans})[-_RECENT_STEPS:]
    recent = [span for span in spans if span.step in steps]
    seconds = _seconds_by_name(recent, len(steps))
    total = sum(seconds.values())
    if not total:
        return []
    table = _table()
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        bar = BLOCKS[-1] * max(1, round(_BAR_WIDTH * value / total))
        waits = waited_for(name)
        table.add_row(
            _safe(name),
            duration(value),
            f"{value / total:.0%}",
            Text(bar, style="cyan"),
            f"waits for {waits}" if waits else "",
        )
    return [
        _title(f"seconds a step, mean of the last {_RECENT_STEPS} at most"),
        table,
    ]


def _seconds_by_name(spans: Sequence[Span], num_steps: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = (
            seconds.get(span.name, 0.0) + (span.end - span.start) / num_steps
        )
    return seconds


def _processes(status: RunStatus, *, now: float) -> list[RenderableType]:
    if not status.timeline.samples:
        return []
    sample = status.timeline.samples[-1]
    title = "engines and gateway"
    if status.state == "running":
        title += f", {duration(max(0.0, now - sample.time))} ago"
    else:
        title += ", at the end"
    lines: list[RenderableType] = [_title(title)]
    if sample.engines:
        table = _table()
        for engine in sample.engines:
            table.add_row(
                _safe(engine.name),
                f"{engine.running} running",
                f"{engine.waiting} waiting",
                f"KV cache {engine.kv_use:.0%}",
                ""
                if engine.cache_hit_rate is None
                else f"{engine.cache_hit_rate:.0%} cached",
            )
        lines.append(table)
    if sample.gateway is not None:
        lines.append(_line(_gateway_text(sample), ""))
    if sample.memory:
        lines.append(_line(_memory_text(sample.memory), ""))
    return lines


def _gateway_text(sample: Sample) -> str:
    gateway = sample.gateway
    assert gateway is not None, "the caller has looked"
    parts = [f"gateway: {gateway.requests} turns ended"]
    if gateway.latency_p50_s is not None and gateway.latency_p95_s is not None:
        parts.append(
            f"half within {gateway.latency_p50_s:.2f} s, 95 % within {gateway.latency_p95_s:.2f} s"
        )
    if gateway.tokens_per_s:
        parts.append(f"{gateway.tokens_per_s:.0f} tokens/s")
    if gateway.cache_hit_rate is not None:
        parts.append(f"{gateway.cache_hit_rate:.0%} of the prompts cached")
    if gateway.loop_lag_s is not None:
        parts.append(f"loop lag {1000 * gateway.loop_lag_s:.0f} ms")
    return ", ".join(parts)


def _memory_text(memory: Mapping[str, int]) -> str:
    largest = sorted(memory.items(), key=lambda item: -item[1])
    parts = [f"{name} {size / _GIB:.1f}" for name, size in largest]
    return f"memory (GiB): {', '.join(parts)}; {sum(memory.values()) / _GIB:.1f} in all"


def _evaluations(status: RunStatus) -> list[RenderableType]:
    """Return the first and last value of each held-out accuracy, with the last one's
    interval."""
    names = eval_names(status.rows)
    table = _table()
    for name in names:
        steps, values = curve(status.rows, name)
        if not values:
            continue
        interval = ""
        _, low = curve(status.rows, f"{name}_low")
        _, high = curve(status.rows, f"{name}_high")
        if low and high:
            interval = f"[{format_number(low[-1])}, {format_number(high[-1])}]"
        change = format_number(values[-1])
        if len(values) > 1:
            change = f"{format_number(values[0])} -> {format_number(values[-1])}"
        label = name.removeprefix(EVAL_PREFIX)
        table.add_row(_safe(label), change, interval, f"step {steps[-1]}")
    if not table.rows:
        return []
    return [_title("held out"), table]


def _failures(status: RunStatus) -> list[RenderableType]:
    if not status.failed:
        return []
    counts = sorted(status.failed.items(), key=lambda item: -item[1])
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts)
    lines: list[RenderableType] = [
        _title(f"failed rollouts: {sum(status.failed.values())} ({reasons})")
    ]
    for failure in status.failures[:3]:
        text = f"{failure.task_id}: {failure.reason}: {failure.detail}"
        lines.append(_line(text, "red"))
    return lines


# ----------------------------------------------------------------- letters


def recent_step_seconds(rows: Sequence[MetricsRow]) -> float | None:
    """Return the mean over the last steps; None before the first."""
    _, seconds = curve(rows, _STEP_TIME)
    if not seconds:
        return None
    return statistics.fmean(seconds[-_RECENT_STEPS:])


def duration(seconds: float) -> str:
    """Format seconds as "0.3 s", "12 s", "3 min 20 s", "2 h 05 min" or "3 d 4 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def _title(text: str) -> RenderableType:
    return Rule(Text(_safe(text), "bold"), align="left", style="dim")


def _line(text: str, style: str) -> Text:
    """Return one line, which is cut off at the terminal's width."""
    return Text(_safe(text), style=style, no_wrap=True, overflow="ellipsis")


def _safe(text: str) -> str:
    return printable(one_line(text))


def _table() -> Table:
    """Return a table without lines. Rows are cut off if the terminal is narrow."""
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(no_wrap=True, overflow="ellipsis")
    return table
