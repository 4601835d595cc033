"""What a run does, and has done, as its folder tells it: for a live or a dead run,
without touching it.

Everything may be missing, torn or of another version: what cannot be read becomes a
note, and the rest is shown."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from invrl.errors import DamagedFileError, RunStoreError
from invrl.host.cache_folder import cache_folder, folder_of_run
from invrl.observe.collapse import collapse
from invrl.store.metrics_file import MetricsRow, read_metrics
from invrl.store.read_only_store import ReadOnlyStore
from invrl.store.run_folder import RunFolder
from invrl.store.timeline_file import Timeline, read_timeline
from invrl.types import FailedRollout

State = Literal["running", "ended", "stopped"]
_MAX_FAILURES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What the driver did last, from phase.json."""

    name: str
    step: int
    since: float | None
    """Unix seconds; None for a run of an earlier version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rollout that failed."""

    task_id: str
    reason: str
    detail: str
    """The last line of its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one time."""

    name: str
    state: State
    """"stopped": nothing works in the folder, and the run is not complete: it failed,
    was killed or was interrupted."""
    settings: Mapping[str, Mapping[str, Any]]
    """By table, as they were written."""
    phase: Phase | None
    rows: Sequence[MetricsRow]
    timeline: Timeline
    failed: Mapping[str, int]
    """Failed rollouts by reason."""
    failures: Sequence[Failure]
    """The last ones, newest first."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What could not be read."""

    @property
    def num_steps(self) -> int:
        """How many the run is to make; 0 if that is not known."""
        value = self.settings.get("run", {}).get("num_steps")
        return value if isinstance(value, int) else 0

    @property
    def steps_made(self) -> int:
        """The last step with metrics."""
        return max((int(row["step"] or 0) for row in self.rows), default=0)


class RunReader:
    """Reads a run folder again and again. Failed rollouts are read once each."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._store = ReadOnlyStore(
            folder.store_path, folder_of_run(cache_folder(), folder.path)
        )
        self._failed: Counter[str] = Counter()
        self._failures: list[Failure] = []
        self._last_outcome = 0

    def read(self) -> RunStatus:
        """The status now. Never raises because of what is in the folder."""
        notes: list[str] = []
        folder = self._folder
        try:
            self._read_failures()
        except (RunStoreError, DamagedFileError, sqlite3.Error) as error:
            notes.append(f"failures are not shown: {error}")
        rows: list[MetricsRow] = []
        timeline = Timeline()
        try:
            rows = [
                row for row in read_metrics(folder.metrics_path) if _are_numbers(row)
            ]
            timeline = read_timeline(folder.path)
        except OSError as error:
            notes.append(f"cannot be read: {error}")
        collapsed = collapse(rows)
        if collapsed:
            notes.append(collapsed)
        return RunStatus(
            name=folder.path.name,
            state=self._state(),
            settings=self._settings(notes),
            phase=self._phase(),
            rows=rows,
            timeline=timeline,
            failed=dict(self._failed),
            failures=tuple(reversed(self._failures)),
            notes=tuple(notes),
        )

    def _state(self) -> State:
        if self._folder.is_worked_in():
            return "running"
        return "ended" if self._folder.finished_path.exists() else "stopped"

    def _settings(self, notes: list[str]) -> Mapping[str, Mapping[str, Any]]:
        try:
            document = tomllib.loads(
                self._folder.config_path.read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            notes.append(f"settings are not shown: {error}")
            return {}
        return {
            name: table for name, table in document.items() if isinstance(table, dict)
        }

    def _phase(self) -> Phase | None:
        try:
            content = json.loads(self._folder.phase_path.read_bytes())
            since = content.get("since")
            return Phase(
                name=str(content["phase"]),
                step=int(content["step"]),
                since=None if since is None else float(since),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _read_failures(self) -> None:
        if not self._folder.store_path.exists():
            return
        with self._store.reading() as db:
            sql = (
                "SELECT seq, outcome FROM outbox WHERE failed=1 AND seq>? ORDER BY seq"
            )
            for sequence, body in db.execute(sql, (self._last_outcome,)):
                self._last_outcome = sequence
                try:
                    outcome = msgspec.json.decode(body, type=FailedRollout)
                except msgspec.MsgspecError:
                    continue  # damaged, or of a later version
                self._failed[outcome.reason.value] += 1
                lines = outcome.detail.strip().splitlines()
                failure = Failure(
                    task_id=outcome.task_id,
                    reason=outcome.reason.value,
                    detail=lines[-1] if lines else "",
                )
                self._failures.append(failure)
        del self._failures[:-_MAX_FAILURES]


def _are_numbers(row: MetricsRow) -> bool:
    return all(
        value is None or isinstance(value, int | float) for value in row.values()
    )
