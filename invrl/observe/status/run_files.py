"""The files that tell the state and outcome of a live or dead run, read repeatedly
without touching its folder.

Everything may be missing, torn or of another version: unreadable parts become notes,
and the rest is still reported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from invrl.observe.metrics.collapse import COLLAPSE_METRICS, collapse
from invrl.observe.metrics.metrics_table import MetricsTable
from invrl.observe.metrics.trained_and_asked import (
    SELECTION_METRICS,
    trained_and_asked,
)
from invrl.observe.status.outcome import outcome_line, outcome_metrics
from invrl.store.run_folder import RunFolder

State = Literal["running", "ended", "failed", "interrupted"]
Settings = Mapping[str, Mapping[str, Any]]
"""Settings by section, as they are written."""
_LOG_TAIL = 16_384


class Phase(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "phase"}):
    """Last phase of the driver, from phase.json."""

    name: str
    step: int
    since: float
    """Unix seconds."""


class RunFiles:
    """Files of a run. Call `metrics.refresh` to read new metrics."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.metrics = MetricsTable(folder.metrics_path)
        self.settings_error = ""

    def state(self) -> State:
        """Return the run's state. "interrupted": it was killed, or ended by a user
        before its last step."""
        if self.folder.is_worked_in():
            return "running"
        if self.folder.finished_path.exists():
            return "ended"
        if "Traceback (most recent call last)" in self.log_end():
            return "failed"
        return "interrupted"

    def log_end(self) -> str:
        """Return the end of the driver's log."""
        try:
            with self.folder.log_path("driver").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def settings(self) -> Settings:
        """Return the settings; {} if they cannot be read."""
        path = self.folder.config_path
        try:
            tables = tomllib.loads(path.read_text(errors="replace", encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            self.settings_error = (
                f"settings are not shown: {path} cannot be read: {error}"
            )
            return {}
        self.settings_error = ""
        return {
            name: table for name, table in tables.items() if isinstance(table, dict)
        }

    def num_steps(self) -> int | None:
        """Return the planned number of steps."""
        number = self.settings().get("run", {}).get("num_steps")
        return number if isinstance(number, int) else None

    def phase(self) -> Phase | None:
        """Return the last phase; None if the driver has written none."""
        try:
            content = self.folder.phase_path.read_bytes()
            return msgspec.json.decode(content, type=Phase)
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
            return None

    def outcome(self) -> str:
        """Describe the outcome of the run so far in one line."""
        state = self.state()
        return outcome_line(
            state=state,
            step=self.metrics.last_step,
            num_steps=self.num_steps(),
            report=self.folder.report_path,
            series=self.metrics.series(outcome_metrics(self.metrics.names())),
            log_end=self.log_end() if state == "failed" else "",
        )

    def notes(self) -> list[str]:
        """Return notes about unreadable parts, a collapsed policy, and trained rollouts
        that differ from those asked for."""
        notes = [self.settings_error]
        if self.metrics.damaged_lines:
            notes.append(
                f"{self.metrics.damaged_lines} lines of metrics.jsonl are damaged and left out"
            )
        if self.metrics.ends_incomplete and not self.folder.is_worked_in():
            notes.append("the last line of metrics.jsonl is incomplete and left out")
        notes.append(collapse(self.metrics.rows(COLLAPSE_METRICS)))
        for row in self.metrics.rows(SELECTION_METRICS)[-1:]:
            notes.append(trained_and_asked(row))
        return [note for note in notes if note]
