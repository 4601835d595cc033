"""A run's folder: the paths of everything a run writes, also for a dead run.

Invariants: one command at a time writes into a folder, and any other is refused and told which process holds
it. Every component writes only at the paths named here."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invrl.errors import ConfigError
from invrl.host.disk import write_atomically
from invrl.store.metrics_file import read_metrics

LOCK_NAME = "run.lock"
"""Says which process holds the folder, as long as that has locked it."""


class Below:
    """As a class attribute: the path of this name below the owner's `path`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: object = None) -> Path:
        return owner.path / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of a run; all absolute."""

    path: Path

    config_path = Below("config.resolved.toml")
    metrics_path = Below("metrics.jsonl")
    store_path = Below("run.sqlite")
    """SQLite: sessions, turns, outbox, the buffer's ledger (`store/schema.py`)."""
    tensorboard_path = Below("tensorboard")
    checkpoints_path = Below("checkpoints")
    report_path = Below("report")
    rollout_data_path = Below("rollout_data")
    """Training batches, one file per step (`store/batch_file.py`)."""
    phase_path = Below("phase.json")
    """What the driver is doing, as JSON: pid, step, phase."""
    finished_path = Below("finished")
    """Holds the number of steps of a run that came to its end."""

    @contextmanager
    def held(self, command: str) -> Iterator[None]:
        """While `command` of this process works in the folder: nothing else that writes into it may.
        ConfigError with the holder's process id if another one does, or if the folder cannot be written. The
        kernel lets go of the folder when this process ends."""
        try:
            file = self._lock_path.open("a")
        except OSError as error:
            raise unwritable(self.path.parent, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held_by_another() from None
            file.truncate(0)
            file.write(f"process {os.getpid()} (invrl {command})")
            file.flush()
            yield

    def check_free(self) -> None:
        """ConfigError with the holder's process id if a command works in the folder now."""
        if not self._lock_path.exists():
            return
        with self._lock_path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held_by_another() from None

    @property
    def _lock_path(self) -> Path:
        return self.path / LOCK_NAME

    def _held_by_another(self) -> ConfigError:
        holder = self._lock_path.read_text() or "another invrl process"
        fix = "wait for it to end, or choose another --run-name"
        return ConfigError("run.run_name", self.path.name, f"{holder} works in {self.path}", fix)

    def rewind_metrics(self, step: int) -> str:
        """The run goes on after `step`: rows of later steps are lost. What is wrong with the file, empty if
        nothing is; a damaged one is kept beside the new one."""
        rows = read_metrics(self.metrics_path)
        finding = ""
        if not self.metrics_path.exists():
            finding = f"{self.metrics_path} is missing: the report begins after step {step}" if step else ""
        elif lost := self._damaged_lines(len(rows)):
            damaged = self.metrics_path.with_name(f"{self.metrics_path.name}.damaged")
            shutil.copy(self.metrics_path, damaged)
            finding = (
                f"{lost} damaged lines of {self.metrics_path} are left out; "
                f"the file as it was is kept as {damaged.name}"
            )
        kept = [row for row in rows if int(row["step"] or 0) <= step]
        write_atomically(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))
        return finding

    def _damaged_lines(self, rows: int) -> int:
        """Lines of metrics.jsonl beyond its `rows`. The torn last line of a killed run is none."""
        content = self.metrics_path.read_bytes()
        torn = content[-1:] not in (b"", b"\n")
        return max(0, len(content.splitlines()) - rows - torn)

    logs_path = Below("logs")

    @property
    def ray_logs_path(self) -> Path:
        """What Ray's processes have printed, and user code of buffer and trainer, by start of Ray."""
        return self.logs_path / "ray"

    @property
    def printed_by_agents(self) -> str:
        """The files that user code of the rollout workers prints into (`rollout/worker_log.py`)."""
        return f"{self.logs_path}/rollout-worker-*.log"

    def log_path(self, process: str) -> Path:
        return self.logs_path / f"{process}.log"


def unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError("run.run_root", str(root), f"cannot be written: {error}", "give a writable --run-root")
