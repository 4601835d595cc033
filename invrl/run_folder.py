"""A run's folder: where everything that a viewer needs is, also for a dead run.

Invariants: a folder belongs to one configuration, and is refused to another; one command at a time writes
into it, and any other is refused and told which process holds it. Every component writes only at the paths
named here."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invrl.errors import ConfigError
from invrl.report import read_metrics

if TYPE_CHECKING:
    from invrl.config import Config


_LOCK_NAME = "run.lock"
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
    """SQLite: sessions, turns, outbox, the buffer's ledger (`run_store.py`)."""
    tensorboard_path = Below("tensorboard")
    checkpoints_path = Below("checkpoints")
    report_path = Below("report")
    rollout_data_path = Below("rollout_data")
    """Training batches, one file per step (`batch_file.py`)."""
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
            raise _unwritable(self.path.parent, error) from error
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
        return self.path / _LOCK_NAME

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


def check_run_folder(config: Config) -> None:
    """What `hold_run_folder` would refuse, without making anything."""
    root, name = _place(config)
    if (root / name).is_dir() and name:
        folder = RunFolder(path=root / name)
        _check_configuration(folder, config)
        folder.check_free()
    while not root.exists():
        root = root.parent
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise _unwritable(root, error) from error


@contextmanager
def hold_run_folder(config: Config, command: str) -> Iterator[RunFolder]:
    """The run's folder as `make_run_folder` makes it, held by `command` of this process. Raises ConfigError
    as that does, and if another process holds the folder, of which nothing has changed then."""
    folder = _find_or_create(config)
    with folder.held(command):
        _furnish(folder, config)
        yield folder


def make_run_folder(config: Config) -> RunFolder:
    """Create the folder (or reopen that of the same configuration) and write the configuration down.
    Raises ConfigError if the folder holds another configuration, or things that are not a run's."""
    folder = _find_or_create(config)
    _furnish(folder, config)
    return folder


def _find_or_create(config: Config) -> RunFolder:
    root, name = _place(config)
    # Two runs of one second get two folders.
    path = root / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path=path)
        _check_configuration(folder, config)
    except OSError as error:
        raise _unwritable(root, error) from error
    return folder


def _furnish(folder: RunFolder, config: Config) -> None:
    try:
        for sub in (folder.logs_path, folder.checkpoints_path, folder.report_path):
            sub.mkdir(exist_ok=True)
        write_atomically(folder.config_path, config.to_toml())
    except OSError as error:
        raise _unwritable(folder.path.parent, error) from error


def _place(config: Config) -> tuple[Path, str]:
    """Root and name. Raises ConfigError for a name that is a path."""
    name = config.run.run_name
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError("run.run_name", name, "a name, not a path", "give the folder as --run-root")
    return Path(config.run.run_root).expanduser().absolute(), name


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError("run.run_root", str(root), f"cannot be written: {error}", "give a writable --run-root")


def _check_configuration(folder: RunFolder, config: Config) -> None:
    if not folder.config_path.exists():
        # A process that has just begun holds the folder before it writes anything else.
        if any(each.name != _LOCK_NAME for each in folder.path.iterdir()):
            reason = f"{folder.path} is not empty and is not a run folder"
            raise ConfigError("run.run_name", folder.path.name, reason, "choose another --run-name")
        return
    from invrl.config import load_resolved

    before, now = _settled(load_resolved(folder.config_path)), _settled(config)
    changed = [
        f"{name} = {value!r}, not {before[name]!r}" for name, value in now.items() if before[name] != value
    ]
    if changed:
        reason = f"{folder.path} holds a run with another configuration; now: {'; '.join(changed[:3])}"
        fix = "choose another --run-name, or repeat that configuration"
        raise ConfigError("run.run_name", folder.path.name, reason, fix)


_MAY_CHANGE = (
    *("run_root", "run_name", "num_steps", "progress", "log_samples", "tensorboard"),
    *("max_restarts", "save_interval", "save_interval_s", "keep_checkpoints", "ray_start_attempts"),
    *("max_identical_failures", "max_failures_at_start", "max_filtered_batches", "filtered_out"),
)
"""Settings of a run that may differ when it goes on: none changes what a step computes."""


def _settled(config: Config) -> dict[str, object]:
    """The settings that may not differ. One that is newer than the folder had its default."""
    tables = config.model_dump(mode="json")
    passed_on = {name: tables.pop(name) for name in ("sglang", "router", "megatron")}
    settled = {
        f"{table}.{key}": value
        for table, section in tables.items()
        for key, value in section.items()
        if key not in _MAY_CHANGE
    }
    return settled | passed_on


def write_atomically(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)
