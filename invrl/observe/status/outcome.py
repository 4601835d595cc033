"""The outcome of a run in one line: its gain, and why it ended.

The gain is what the run itself measured at its end (`GAINS_NAME` in its report folder,
with a paired interval). Until then, or without held-out tasks, it is the change of a
metric, without an interval.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from invrl.observe.metrics.gains import GAINS_NAME, MeasuredGain
from invrl.observe.metrics.metrics_table import Point

Series = Mapping[str, Sequence[Point]]
_ACCURACY = re.compile(r"eval/(.+)/accuracy")
_CHANGES = {
    "eval/loss": "held-out loss",
    "rollout/reward_mean": "training reward",
    "train/loss": "loss",
}
"""Metrics whose change is reported if there is no held-out accuracy; the first that the
run has."""
RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|OutOfMemory)\b.*")
"""Line of a log that names a raised exception."""
_MAX_CHARS = 300


def outcome_line(
    *,
    state: str,
    step: int,
    num_steps: int | None,
    report: Path,
    series: Series,
    log_end: str,
) -> str:
    """Describe the outcome. `series`: points of metrics by name, each with its step,
    time and value. `log_end`: last lines of the driver's log."""
    of_steps = f" of {num_steps}" if num_steps else ""
    ending = f"{state} after step {step}{of_steps}"
    if state == "running":
        ending = f"running, step {step}{of_steps}"
    if state == "failed":
        ending += f": {_raised(log_end) or 'see logs/driver.log'}"
    # otherwise the gains are of an earlier end
    gains = list(_gains(report)) if state == "ended" else []
    changes = gains or list(_accuracies(series)) or list(_other_change(series))
    return "; ".join([*changes, ending])


def outcome_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics that `outcome_line` reads."""
    return [name for name in names if name in _CHANGES or _ACCURACY.fullmatch(name)]


def _gains(report: Path) -> Iterator[str]:
    try:
        gains = msgspec.json.decode(
            (report / GAINS_NAME).read_bytes(), type=list[MeasuredGain]
        )
    except (OSError, msgspec.MsgspecError):
        return
    for gain in gains:
        yield (
            f"held-out accuracy, {gain.name}: {gain.before:.3f} → {gain.after:.3f}, gain {gain.value:+.3f}, "
            f"95 % interval [{gain.low:+.3f}, {gain.high:+.3f}]"
        )


def _accuracies(series: Series) -> Iterator[str]:
    for name, points in sorted(series.items()):
        match = _ACCURACY.fullmatch(name)
        if match:
            yield from _change(f"held-out accuracy, {match[1]}", points)


def _other_change(series: Series) -> Iterator[str]:
    for name, label in _CHANGES.items():
        if name in series:
            yield from _change(label, series[name])
            return


def _change(label: str, points: Sequence[Point]) -> Iterator[str]:
    """Yield the change from the first to the last value that is a number."""
    values = [(step, value) for step, _, value in points if value is not None]
    if not values:
        return
    (first_step, first), (last_step, last) = values[0], values[-1]
    if first_step == last_step:
        yield f"{label}: {first:.3f} at step {first_step}"
    else:
        yield f"{label}: {first:.3f} at step {first_step} → {last:.3f} at step {last_step}"


def _raised(log_end: str) -> str:
    """Return the last exception that the log names, or "". Lines may be JSON
    objects."""
    raised = ""
    for line in log_end.splitlines():
        for text in _texts(line):
            if RAISED.match(text):
                raised = text
    if len(raised) > _MAX_CHARS:
        return f"{raised[:_MAX_CHARS]}..."
    return raised


def _texts(line: str) -> list[str]:
    """Return the lines of text in a line of the log."""
    if not line.startswith("{"):
        return [line]
    try:
        entry = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(entry, dict):
        return []
    return [
        text
        for value in entry.values()
        if isinstance(value, str)
        for text in value.splitlines()
    ]
