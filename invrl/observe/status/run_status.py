"""The status of a run at one time, as `invrl watch` shows it: its files and its failed
rollouts."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from invrl.errors import DamagedFileError, RunStoreError
from invrl.host.files.cache_folder import cache_folder, run_cache_folder
from invrl.observe.status.run_files import Phase, RunFiles, State
from invrl.store.metrics_file import MetricsRow
from invrl.store.read_only_store import ReadOnlyStore
from invrl.store.run_folder import RunFolder
from invrl.store.timeline_file import Timeline, read_timeline
from invrl.types.rollouts import FailedRollout

_MAX_FAILURES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    task_id: str
    reason: str
    detail: str
    """Last line of its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Status of a run at one time."""

    name: str
    state: State
    outcome: str
    """One line: the gain, and the progress or the reason of the end."""
    num_steps: int | None
    """Planned number of steps; None if unknown."""
    steps_made: int
    """Last step with metrics."""
    phase: Phase | None
    rows: Sequence[MetricsRow]
    """One row for each step."""
    timeline: Timeline
    failed: Mapping[str, int]
    """Failed rollouts by reason."""
    failures: Sequence[Failure]
    """Last failures, newest first."""
    notes: Sequence[str]


class RunReader(RunFiles):
    """Reads a run folder repeatedly. Each failed rollout is read once."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._store = ReadOnlyStore(
            folder.store_path, run_cache_folder(cache_folder(), folder.path)
        )
        self._failed: Counter[str] = Counter()
        self._failures: list[Failure] = []
        self._last_outcome = 0

    def read(self) -> RunStatus:
        """Return the current status. Never raises because of the folder's content."""
        errors: list[str] = []
        try:
            self._read_failures()
        except (RunStoreError, DamagedFileError, sqlite3.Error) as error:
            errors.append(f"failures are not shown: {error}")
        timeline = Timeline()
        try:
            self.metrics.refresh()
            timeline = read_timeline(self.folder.path)
        except OSError as error:
            errors.append(f"cannot be read: {error}")
        return RunStatus(
            name=self.folder.path.name,
            state=self.state(),
            outcome=self.outcome(),
            num_steps=self.num_steps(),
            steps_made=self.metrics.last_step,
            phase=self.phase(),
            rows=self.metrics.rows(self.metrics.names()),
            timeline=timeline,
            failed=dict(self._failed),
            failures=tuple(reversed(self._failures)),
            notes=(*errors, *self.notes()),
        )

    def _read_failures(self) -> None:
        if not self.folder.store_path.exists():
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
