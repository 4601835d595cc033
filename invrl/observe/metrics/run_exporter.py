"""A run's numbers for Prometheus: the measurements of its steps, and its state at each
scrape.

Invariants: a scrape calls nothing that the loop waits for, so it never delays a step; a
source that does not answer is reported as `invrl_source_up 0`, and the others are still
shown.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from invrl.observe.metrics.metric_families import FAMILIES, Family
from invrl.observe.sinks.sinks import Sink

logger = logging.getLogger(__name__)

Labels = tuple[str, ...]
"""Values of a series' labels, in the order of its family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One series of a histogram: counts of values up to each bound ("+Inf" is last),
    and their sum."""

    buckets: Mapping[str, int]
    total: float


Numbers = Mapping[str, Mapping[Labels, float | Histogram]]
"""Series of several families, by name."""
Source = Callable[[], Numbers]
"""Measures one part of the run now. May raise; has its own deadline."""


@dataclass(slots=True)
class StepValues:
    """Folds the rows of `metrics.jsonl` into the series of families that name a key of
    it."""

    series: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def add(self, values: Mapping[str, float | None], *, counted: bool = True) -> None:
        """Add a row with `step` and `time`. `counted`: whether this driver made it.
        Null stands for a value that is not finite: a gauge shows it as NaN, a sum
        ignores it."""
        for key, value in values.items():
            number = math.nan if value is None else float(value)
            for family, labels in _shown_by(key):
                series = self.series.setdefault(family.name, {})
                if family.kind == "gauge":
                    series[labels] = number
                elif counted and math.isfinite(number):
                    series[labels] = series.get(labels, 0.0) + number


@cache
def _shown_by(key: str) -> Sequence[tuple[Family, Labels]]:
    """Return the families that show this name of `metrics.jsonl`, each with the labels
    of its series. A run has the same names in thousands of rows."""
    families: list[tuple[Family, Labels]] = []
    for family in FAMILIES.values():
        labels = family.label_in(key)
        if labels is not None:
            families.append((family, labels))
    return families


class RunExporter(Sink, Collector):
    """Receives a run's reports as a sink, and gives them to Prometheus as a collector.
    The loop's thread adds steps; the threads that serve scrapes read them."""

    def __init__(
        self,
        fixed: Numbers = MappingProxyType({}),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`fixed`: series that never change."""
        self._fixed = fixed
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = StepValues()
        self._newest_step = 0
        """An evaluation may end, and be reported, after a later step."""
        self._current: tuple[str, int] | None = None
        self._phase: Numbers = {}
        self._sources: dict[str, Source] = {}

    def __str__(self) -> str:
        return "the metrics for Prometheus"

    def recall(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Add the rows of earlier incarnations: gauges continue from them, counters
        start at 0."""
        in_order = sorted(rows, key=lambda row: row["step"] or 0)
        with self._lock:
            for row in in_order:
                self._steps.add(row, counted=False)
                self._newest_step = int(row["step"] or 0)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._newest_step = max(self._newest_step, step)
        row: dict[str, float | None] = {
            "step": float(self._newest_step),
            "time": self._clock(),
        }
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None
        if any(key.startswith("train/") for key in values):
            row["training_step"] = 1.0
        with self._lock:
            self._steps.add(row)

    def phase(self, name: str, step: int) -> None:
        if self._current == (name, step):
            return
        self._current = (name, step)
        self._phase = {
            "invrl_phase": {(name,): 1.0},
            "invrl_phase_start_timestamp_seconds": {(): self._clock()},
        }

    def attach(self, sources: Mapping[str, Source]) -> None:
        """Add parts that are measured at each scrape from now on, by name."""
        self._sources = {**self._sources, **sources}

    def detach(self, names: Iterable[str]) -> None:
        """Remove parts, which are no longer measured."""
        ended = set(names)
        self._sources = {
            name: source for name, source in self._sources.items() if name not in ended
        }

    def collect(self) -> Iterator[Metric]:
        """Yield one family after another, in the order of `FAMILIES`; those without a
        value are left out."""
        numbers: dict[str, dict[Labels, float | Histogram]] = {}
        with self._lock:
            _merge(numbers, self._steps.series)
        _merge(numbers, self._fixed)
        _merge(numbers, self._phase)
        up: dict[Labels, float | Histogram] = {}
        for name, source in self._sources.items():
            try:
                _merge(numbers, source())
                up[(name,)] = 1.0
            except Exception as error:  # the scrape shows it, next to the others
                logger.warning("metrics: %s does not answer: %r", name, error)
                up[(name,)] = 0.0
        _merge(numbers, {"invrl_source_up": up})
        for family in FAMILIES.values():
            if numbers.get(family.name):
                yield _metric(family, numbers[family.name])

    def describe(self) -> list[Metric]:
        """Return nothing, because registering this collector must not measure
        anything."""
        return []


def _merge(
    numbers: dict[str, dict[Labels, float | Histogram]],
    more: Mapping[str, Mapping[Labels, float]] | Numbers,
) -> None:
    for name, series in more.items():
        numbers.setdefault(name, {}).update(series)


def _metric(family: Family, series: Mapping[Labels, float | Histogram]) -> Metric:
    histograms = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    plain = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    if family.kind == "counter":
        plain = CounterMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in series.items():
        if isinstance(value, Histogram):
            buckets = [(bound, float(count)) for bound, count in value.buckets.items()]
            histograms.add_metric(labels, buckets, value.total)
        else:
            plain.add_metric(labels, value)
    return histograms if family.kind == "histogram" else plain
