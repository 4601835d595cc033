"""A run's folder: where everything that a viewer needs is, also for a dead run.

Invariant: a folder belongs to one configuration; it is refused to another. Called by `cli.py`, which
hands it to `cluster.py`; every component writes only at the paths named here.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.errors import ConfigError

if TYPE_CHECKING:
    from invrl.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Paths of a run; all absolute."""

    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / "config.resolved.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def store_path(self) -> Path:
        """SQLite: sessions, turns, outbox, the buffer's ledger (`run_store.py`)."""
        return self.path / "run.sqlite"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report_path(self) -> Path:
        return self.path / "report"

    @property
    def rollout_data_path(self) -> Path:
        """Training batches, one file per step (`batch_file.py`)."""
        return self.path / "rollout_data"

    @property
    def phase_path(self) -> Path:
        """What the driver is doing, as JSON: pid, step, phase."""
        return self.path / "phase.json"

    @property
    def finished_path(self) -> Path:
        """Holds the number of steps of a run that came to its end."""
        return self.path / "finished"

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this driver works in the folder. ConfigError if another one does."""
        with (self.path / "run.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    "run.run_name",
                    self.path.name,
                    "another invrl process works in this run folder",
                    "wait for it to end, or choose another --run-name",
                ) from None
            yield

    def rewind_metrics(self, step: int) -> None:
        """The run goes on after `step`: rows of later steps, which are lost, move to metrics.lost.jsonl."""
        if not self.metrics_path.exists():
            return
        rows = self.metrics_path.read_text().splitlines(keepends=True)
        kept, lost = [], []
        for row in rows:
            try:
                (kept if json.loads(row)["step"] <= step else lost).append(row)
            except ValueError:  # cut off by the crash
                lost.append(row.rstrip() + "\n")
        if lost:
            with self.metrics_path.with_suffix(".lost.jsonl").open("a") as file:
                file.writelines(lost)
            write_atomically(self.metrics_path, "".join(kept))

    def log_path(self, process: str) -> Path:
        """Log file of the process of this name."""
        return self.path / "logs" / f"{process}.log"


def check_run_folder(config: Config) -> None:
    """What `make_run_folder` would refuse, without making anything."""
    root, name = _place(config)
    if (root / name).is_dir() and name:
        _check_holder(RunFolder(path=root / name), config)
    while not root.exists():
        root = root.parent
    try:
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise _unwritable(root, error) from error


def make_run_folder(config: Config) -> RunFolder:
    """Create the folder (or reopen that of the same configuration) and write the configuration down.

    Raises ConfigError if the folder holds another configuration, or things that are not a run's.
    """
    root, name = _place(config)
    try:
        path = root / name if name else _new_by_time(root)
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path=path)
        _check_holder(folder, config)
        for sub in (path / "logs", folder.checkpoints_path, folder.report_path):
            sub.mkdir(exist_ok=True)
        write_atomically(folder.config_path, config.to_toml())
    except OSError as error:
        raise _unwritable(root, error) from error
    return folder


def _place(config: Config) -> tuple[Path, str]:
    """Root and name. Raises ConfigError for a name that is a path."""
    name = config.run.run_name
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError("run.run_name", name, "a name, not a path", "give the folder as --run-root")
    return Path(config.run.run_root).expanduser().absolute(), name


def _unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError("run.run_root", str(root), f"cannot be written: {error}", "give a writable --run-root")


def _new_by_time(root: Path) -> Path:
    """A folder nobody else made: mkdir is the test, so two runs of one second get two folders."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = root / (stamp + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise OSError(f"{root} has a hundred runs of {stamp}")


def _check_holder(folder: RunFolder, config: Config) -> None:
    if not folder.config_path.exists():
        if any(folder.path.iterdir()):
            raise ConfigError(
                "run.run_name",
                folder.path.name,
                f"{folder.path} is not empty and is not a run folder",
                "choose another --run-name",
            )
        return
    before, now = _settled(folder.config_path.read_text()), _settled(config.to_toml())
    if before != now:
        changed = sorted(set(now) - set(before)) or sorted(set(before) - set(now))
        raise ConfigError(
            "run.run_name",
            folder.path.name,
            f"{folder.path} holds a run with another configuration; now: {'; '.join(changed[:3])}",
            "choose another --run-name, or repeat that configuration",
        )


_MAY_CHANGE = (
    *("run_root", "run_name", "num_steps", "progress", "tensorboard"),
    *("max_restarts", "save_interval", "keep_checkpoints"),
)
"""Settings of a run that may differ when it goes on: none changes what a step computes."""


def _settled(toml: str) -> list[str]:
    return [line for line in toml.splitlines() if line.split(" = ")[0] not in _MAY_CHANGE]


def write_atomically(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)
