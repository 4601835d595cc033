"""A run's folder: the paths of everything that a run writes. It also describes a run
that has ended.

Invariants: only one command at a time writes into a folder; another one is refused with
an error that names the process holding the folder. Every component writes only to the
paths named here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invrl.errors import ConfigError
from invrl.host.files.disk import write_atomically
from invrl.store.metrics_file import MetricsRow, read_metrics
from invrl.store.timeline_file import TIMELINE_NAME
from invrl.store.tokenizer_folder import TOKENIZER_NAME

CONFIG_NAME = "config.resolved.toml"
LOCK_NAME = "run.lock"
"""File that names the process holding the folder, valid while that process has locked
it."""
_KERNEL_LOCKS = Path("/proc/locks")
_LOOKS_FOR_A_LOCK = 3
"""Number of reads of the kernel's list of locks, which is served a page at a time and
misses one if another is released between two pages: 25 of 5,298 reads next to two
processes that did nothing else."""

KEEP_NAME = "keep-model"
"""An empty file in a checkpoint or a saved model. Its weights are not removed: a user
knows their path."""


class Below:
    """Class attribute: the path of this name below the owner's `path`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: object = None) -> Path:
        return owner.path / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The paths of a run; all are absolute."""

    path: Path

    config_path = Below(CONFIG_NAME)
    metrics_path = Below("metrics.jsonl")
    store_path = Below("run.sqlite")
    """SQLite: sessions, turns, outbox, the buffer's ledger (`store/schema.py`)."""
    tensorboard_path = Below("tensorboard")
    checkpoints_path = Below("checkpoints")
    report_path = Below("report")
    rollout_data_path = Below("rollout_data")
    """Training batches, one file per step (`store/batch_file.py`)."""
    data_digests_path = Below("data.json")
    """Checksums of the files of a run on a file, by setting."""
    base_checksum_path = Below("base_checksum.json")
    """Checksum of the model that an adapter is trained beside
    (`train/adapters/base_checksum.py`)."""
    phase_path = Below("phase.json")
    """Present activity of the driver, as JSON: pid, step, phase, and since when (Unix
    seconds)."""
    tokenizer_path = Below(TOKENIZER_NAME)
    """The tokenizer's files (`store/tokenizer_folder.py`)."""
    trained_tokens_path = Below("trained_tokens")
    """Advantages and the trainer's log-probs, one file per step
    (`store/trained_tokens.py`)."""
    timeline_path = Below(TIMELINE_NAME)
    """Activities of the driver over time, and load of the processes
    (`store/timeline_file.py`)."""
    finished_path = Below("finished")
    """Exists once the run is complete; contains its number of steps."""
    logs_path = Below("logs")
    weights_path = Below("weights")
    """Parent of the versions that engines load with the weight transport `disk`."""
    verification_path = Below("private/verification.socket")
    """Exists from the first weights that the engines were given to the end of the
    driver, which answers there (`run/loop/verification_socket.py`). A driver that was
    killed leaves it."""

    @contextmanager
    def held(self, command: str) -> Iterator[None]:
        """Hold the folder for `command` of this process, so that no other command
        writes into it. Raises ConfigError if another command holds it (the error has
        its process id) or if the folder cannot be written. The kernel releases the lock
        when this process ends."""
        try:
            file = self._lock_path.open("a", encoding="utf-8")
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
        """Raise ConfigError with the holder's process id if a command works in the
        folder now."""
        if not self._lock_path.exists():
            return
        with self._lock_path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held_by_another() from None

    def is_worked_in(self) -> bool:
        """Whether a command works in the folder now, on this machine. Unlike `is_held`
        this never takes the lock, which could collide with a starting command."""
        return any(self._is_locked() for _ in range(_LOOKS_FOR_A_LOCK))

    def _is_locked(self) -> bool:
        """Whether the kernel's list of locks has that of the folder's command."""
        lock = self.path / LOCK_NAME
        try:
            inode = lock.stat().st_ino
            words = lock.read_text(errors="replace", encoding="utf-8").split()
            held = [
                line.split()
                for line in _KERNEL_LOCKS.read_text(encoding="utf-8").splitlines()
            ]
        except OSError:
            return False
        holder = words[1] if len(words) > 1 else ""
        for fields in held:
            # Such as "1: FLOCK ADVISORY WRITE 319 08:01:123 0 EOF".
            if (
                len(fields) < 6
                or fields[1] != "FLOCK"
                or fields[5].rpartition(":")[2] != str(inode)
            ):
                continue
            if fields[4] == holder or not holder.isdecimal():
                return True
        return False

    def is_held(self) -> bool:
        """Whether a command works in the folder now."""
        try:
            self.check_free()
        except ConfigError:
            return True
        return False

    @property
    def _lock_path(self) -> Path:
        return self.path / LOCK_NAME

    def _held_by_another(self) -> ConfigError:
        holder = self._lock_path.read_text(encoding="utf-8") or "another invrl process"
        fix = "wait for it to end, or choose another --run-name"
        return ConfigError(
            "run.run_name", self.path.name, f"{holder} works in {self.path}", fix
        )

    def rewind_metrics(self, step: int) -> str:
        """Remove the metrics of steps after `step`, from which the run resumes. Returns
        a description of damage and of what was removed; "" for neither. A damaged file
        is copied before it is rewritten."""
        rows = read_metrics(self.metrics_path)
        findings = [
            self._metrics_damage(len(rows), step),
            self._metrics_cuts(rows, step),
        ]
        lines = [
            json.dumps(row) + "\n" for row in rows if int(row["step"] or 0) <= step
        ]
        write_atomically(self.metrics_path, "".join(lines))
        return "; ".join(finding for finding in findings if finding)

    def _metrics_cuts(self, rows: Sequence[MetricsRow], step: int) -> str:
        """Describe the steps whose rows an existing file lacks or loses: "" if it ends
        with `step`."""
        if not self.metrics_path.exists():
            return ""
        last_step = max((int(row["step"] or 0) for row in rows), default=0)
        if last_step < step:
            lost = f"steps {last_step + 1} to {step}"
            return f"{self.metrics_path} was cut: it has no rows of {lost}, which the checkpoint contains"
        if last_step > step:
            return f"rows of steps {step + 1} to {last_step} are cut from {self.metrics_path.name}"
        return ""

    def _metrics_damage(self, num_rows: int, step: int) -> str:
        """Describe damage of metrics.jsonl, of which `num_rows` lines could be read; ""
        if there is none."""
        if not self.metrics_path.exists():
            if not step:
                return ""
            return (
                f"{self.metrics_path} is missing: the report begins after step {step}"
            )
        num_damaged = self._count_damaged_lines(num_rows)
        if not num_damaged:
            return ""
        damaged_path = self.metrics_path.with_name(f"{self.metrics_path.name}.damaged")
        shutil.copy(self.metrics_path, damaged_path)
        return (
            f"{num_damaged} damaged lines of {self.metrics_path} are left out; "
            f"the damaged file is kept as {damaged_path.name}"
        )

    def _count_damaged_lines(self, num_rows: int) -> int:
        """Count the lines of metrics.jsonl that are not rows. The incomplete last line
        of a killed run is no damage."""
        content = self.metrics_path.read_bytes()
        num_lines = len(content.splitlines())
        ends_incomplete = content != b"" and not content.endswith(b"\n")
        if ends_incomplete:
            num_lines -= 1
        return max(0, num_lines - num_rows)

    @property
    def ray_logs_path(self) -> Path:
        """Output of Ray's processes, and of user code in buffer and trainer; a
        subfolder per start of Ray."""
        return self.logs_path / "ray"

    @property
    def printed_by_agents(self) -> str:
        """Files with the output of user code in the rollout workers
        (`rollout/workers/worker_log.py`)."""
        return f"{self.logs_path}/rollout-worker-*.log"

    def log_path(self, process: str) -> Path:
        return self.logs_path / f"{process}.log"


def unwritable(root: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "run.run_root",
        str(root),
        f"cannot be written: {error}",
        "give a writable --run-root",
    )
