"""Metrics: values that know their own reduction.

Ranks and micro-batches return them, `merge` adds them up, and `resolve` turns them into
floats. `timed` measures phases. The sinks that write metrics are in
`observe/sinks/sinks.py`.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean. `total` is the weighted sum, so parts are merged by adding both
    fields."""

    total: float
    weight: float = 1.0

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        if not self.weight:
            return 0.0
        return self.total / self.weight


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Min:
    least: float

    def __add__(self, other: "Min") -> "Min":
        return Min(min(self.least, other.least))

    def value(self) -> float:
        return self.least


@dataclass(frozen=True, slots=True)
class Max:
    most: float

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.most, other.most))

    def value(self) -> float:
        return self.most


Metric = Mean | Sum | Min | Max
Metrics = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Reduce metrics of the same name. Raises TypeError if their kinds differ."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            earlier = merged.get(name)
            if earlier is None:
                merged[name] = metric
            elif type(earlier) is not type(metric):
                raise TypeError(
                    f"metric {name}: {type(earlier).__name__} and {type(metric).__name__}"
                )
            else:
                merged[name] = earlier + metric  # type: ignore[operator]
    return merged


def resolve(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Return plain numbers for a sink, under `prefix` + name."""
    return {prefix + name: metric.value() for name, metric in metrics.items()}


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds that the block took to `seconds[phase]`."""
    start = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - start
        seconds[phase] = seconds.get(phase, 0.0) + elapsed
