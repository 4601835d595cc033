"""The run's `metrics.jsonl`: one row of numbers per step."""

import contextlib
import json
from pathlib import Path

MetricsRow = dict[str, float | None]
"""A step's metrics by name, and `step` itself."""


def read_metrics(path: Path) -> list[MetricsRow]:
    """The rows of metrics.jsonl, if there is one. A line that is none is left out: the torn last one of a
    killed run, or bytes of a damaged file, be they UTF-8 or not."""
    rows: list[MetricsRow] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # JSONDecodeError and UnicodeDecodeError are both
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows
