"""The metrics of a run by name, read piece by piece while the run writes them.

Kept as columns: ten thousand names over thousands of steps fit into memory."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from invrl.store.metrics_file import MetricsRow

Point = tuple[int, float | None, float | None]
"""Step, Unix seconds, value."""


@dataclass(slots=True)
class _Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, time: float, value: float) -> None:
        if self.steps and self.steps[-1] == step:  # a later row of one step counts
            self.times[-1] = time
            self.values[-1] = value
            return
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def points(self) -> list[Point]:
        rows = zip(self.steps, self.times, self.values, strict=True)
        return [(step, _finite(time), _finite(value)) for step, time, value in rows]


class MetricsTable:
    """Content of `path` (metrics.jsonl). A file that was rewritten, as by a resumed
    run, is read again. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._inode = 0
        self._offset = 0
        self.last_step = 0
        self.last_time: float | None = None
        self.damaged_lines = 0
        self.ends_incomplete = False

    def refresh(self) -> bool:
        """Read what was added since the last call. Returns whether anything was."""
        with self._lock:
            try:
                facts = self._path.stat()
            except OSError:
                had_rows = bool(self._columns)
                self._forget()
                return had_rows
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._forget()
                self._inode = facts.st_ino
            if facts.st_size == self._offset:
                return False
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
            end = content.rfind(b"\n") + 1
            self.ends_incomplete = end < len(content)
            self._offset += end
            for line in content[:end].splitlines():
                self._add_line(line)
            return end > 0

    def _add_line(self, line: bytes) -> None:
        row = _decode(line)
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(step, int):
            self.damaged_lines += 1
            return
        row_time = _number(row.get("time"))
        self.last_step = max(self.last_step, step)
        if not math.isnan(row_time):
            self.last_time = row_time
        for name, value in row.items():
            if name in ("step", "time") or isinstance(value, str | list | dict):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            column.add(step, row_time, _number(value))

    def series(self, names: Iterable[str]) -> dict[str, list[Point]]:
        """Return the points of the names that the run has, in the order of the file."""
        with self._lock:
            return {
                name: self._columns[name].points()
                for name in names
                if name in self._columns
            }

    def rows(self, names: Iterable[str]) -> list[MetricsRow]:
        """Return the metrics of these names, step by step."""
        rows: dict[int, MetricsRow] = {}
        for name, points in self.series(names).items():
            for step, _, value in points:
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]

    def names(self) -> Mapping[str, float | None]:
        """Return every name with its last value."""
        with self._lock:
            return {
                name: _finite(column.values[-1])
                for name, column in self._columns.items()
            }

    def all_series(self) -> dict[str, list[Point]]:
        return self.series(self.names())


def _decode(line: bytes) -> object:
    """Decode a line; None if it is not JSON. The standard library's reader also takes
    NaN and infinities."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> float:
    """Return a float; NaN for what is not a number."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


def _finite(value: float) -> float | None:
    if math.isfinite(value):
        return value
    return None
