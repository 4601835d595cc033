"""The run's `metrics.jsonl`: one row of numbers per step."""

import json
from pathlib import Path

MetricsRow = dict[str, float | None]
"""Metrics of a step by name, and `step` itself."""


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return the rows of metrics.jsonl; none if the file does not exist. A line that is
    not a row is skipped: the incomplete last line of a killed run, or bytes of a
    damaged file, which need not be UTF-8."""
    if not path.is_file():
        return []
    rows: list[MetricsRow] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
