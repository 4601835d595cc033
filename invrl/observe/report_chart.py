"""Curves of a run as inline SVG, for a page without scripts. Pure: values in, text out.

Every text that is drawn is escaped here. Colours are classes, which the page's style
sheet fills."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from invrl.observe.step_text import format_number

_WIDTH = 440.0
_HEIGHT = 190.0
_LEFT = 66.0
_RIGHT = 12.0
_TOP = 10.0
_BOTTOM = 26.0
NUM_COLORS = 6
"""Classes `c0` to `c5`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve. `low` and `high`: the edges of a band around it, or nothing."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    band_steps: Sequence[int] = ()
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class _Scale:
    """From steps and values to places in the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        share = (
            0.5
            if self.first == self.last
            else (step - self.first) / (self.last - self.first)
        )
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def svg(chart: Chart) -> str:
    """The picture; "" if no value is finite."""
    scale = _scale(chart)
    if scale is None:
        return ""
    parts = [
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escape(chart.title)}">'
    ]
    for value in (scale.low, (scale.low + scale.high) / 2, scale.high):
        y = scale.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        label = escape(format_number(value))
        parts.append(
            f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for step, anchor in _step_labels(scale):
        x = scale.x(step)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 8:g}" text-anchor="{anchor}">{step}</text>'
        )
    for number, line in enumerate(chart.lines):
        parts += _line_parts(line, scale, f"c{number % NUM_COLORS}")
    parts.append("</svg>")
    return "".join(parts)


def _scale(chart: Chart) -> _Scale | None:
    steps: list[int] = []
    values: list[float] = []
    for line in chart.lines:
        steps += [*line.steps, *line.band_steps]
        values += [*line.values, *line.low, *line.high]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if (
        low >= 0.0 and high <= 1.0 and high - low > 0.2
    ):  # shares are compared best on one scale
        low, high = 0.0, 1.0
    if low == high:
        margin = abs(low) or 1.0
        low, high = (0.0, low + margin) if low >= 0.0 else (low - margin, low + margin)
    return _Scale(min(steps), max(steps), low, high)


def _step_labels(scale: _Scale) -> list[tuple[int, str]]:
    """Steps on the axis, and how their labels are anchored."""
    first, last = int(scale.first), int(scale.last)
    if first == last:
        return [(first, "middle")]
    labels = [(first, "start"), (last, "end")]
    middle = (first + last) // 2
    if last - first >= 4:
        labels.insert(1, (middle, "middle"))
    return labels


def _line_parts(line: Line, scale: _Scale, color: str) -> list[str]:
    parts: list[str] = []
    band = [
        (scale.x(step), scale.y(low), scale.y(high))
        for step, low, high in zip(line.band_steps, line.low, line.high, strict=True)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if len(band) > 1:
        outline = [(x, y) for x, y, _ in band] + [(x, y) for x, _, y in reversed(band)]
        parts.append(f'<polygon class="band {color}" points="{_points(outline)}"/>')
    elif band:
        [(x, bottom, top)] = band
        parts.append(
            f'<line class="bar {color}" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{top:.1f}"/>'
        )
    places = [
        (scale.x(step), scale.y(value))
        for step, value in zip(line.steps, line.values, strict=True)
        if math.isfinite(value)
    ]
    parts.append(f'<polyline class="line {color}" points="{_points(places)}"/>')
    if len(places) <= 30:
        parts += [
            f'<circle class="dot {color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            for x, y in places
        ]
    return parts


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
