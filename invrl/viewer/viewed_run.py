"""A run that is viewed: its files, what is computed of them, and its state now.

`refresh` reads what has changed since it was called last and costs next to nothing if
nothing has. All else answers from what is there. Invariant: nothing is written into the
run's folder, and no lock is taken there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import sqlite3
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from invrl.errors import ConfigError, DamagedFileError, RunStoreError
from invrl.host.cache_folder import folder_of_run
from invrl.host.private_file import open_private
from invrl.near_path import fix_of_path
from invrl.observe.collapse import COLLAPSE_METRICS, collapse
from invrl.store.read_only_store import ReadOnlyStore
from invrl.store.run_folder import RunFolder
from invrl.viewer.index_file import INDEX_VERSION, IndexFile
from invrl.viewer.metrics_table import MetricsTable
from invrl.viewer.rollout_queries import RolloutQueries

if TYPE_CHECKING:
    from invrl.buffer.config import FailureRule
    from invrl.gateway.types import MatchLevel
    from invrl.reasons import FailureReason
    from invrl.store.tokenizer_folder import TokenReader
    from invrl.viewer.index_filler import Progress

_LOG_TAIL = 16_384


@dataclass(frozen=True, slots=True)
class IndexState:
    """How far the index is, for the page."""

    rollouts_indexed: int = 0
    rollouts: int = 0
    turns_indexed: int = 0
    turns: int = 0
    ready: bool = False
    error: str = ""


class ViewedRun:
    """`id`: the name of the run in URLs. `cache`: where indexes lie."""

    def __init__(self, run_id: str, folder: RunFolder, cache: Path) -> None:
        self.id = run_id
        self.folder = folder
        self.metrics = MetricsTable(folder.metrics_path)
        private = folder_of_run(cache, folder.path)
        self.store = ReadOnlyStore(folder.store_path, private)
        self.index_state = IndexState()
        self.failure = ""
        """What went wrong in following the run, of a kind that nobody expected."""
        self._index_file = IndexFile(private)
        self._index: sqlite3.Connection | None = None
        self._identity = ""
        self._index_lock: BinaryIO | None = None
        self._store_state: tuple[int, ...] = ()
        self._file_states: dict[str, tuple[int, ...]] = {}
        self._was_live: bool | None = None
        self._store_error = ""
        self._rules: Mapping[FailureReason, FailureRule] | None = None
        self._config_error = ""
        self._tokens: TokenReader | None = None
        self._tokens_read = False
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- what has changed

    def refresh(self, stop: threading.Event) -> set[str]:
        """Reads what is new, until `stop` is set or nothing is. Returns the kinds of
        things that changed: metrics, rollouts, state, timeline, index."""
        kinds: set[str] = set()
        if self.metrics.refresh():
            kinds.add("metrics")
        paths = {
            "state": (self.folder.phase_path, self.folder.finished_path),
            "timeline": (self.folder.timeline_path,),
        }
        for kind, files in paths.items():
            state = _state_of(files)
            if self._file_states.get(kind, state) != state:
                kinds.add(kind)
            self._file_states[kind] = state
        live = self.folder.is_worked_in()
        if live != self._was_live:
            if self._was_live is not None:
                kinds.add("state")
            self._was_live = live
            self._store_state = ()
        kinds |= self._refresh_index(live)
        return kinds - {"index"} if stop.is_set() else kinds

    def _refresh_index(self, live: bool) -> set[str]:
        """One batch. `index`: there is more to do."""
        state = (*self.store.state(), *_state_of((self.folder.trained_tokens_path,)))
        if state == self._store_state and self._index is not None:
            return set()
        before = self.index_state
        try:
            has_more = self._fill_batch(live)
        except (DamagedFileError, RunStoreError) as error:
            changed = self._store_error != str(error)
            self._store_error = str(error)
            self.index_state = IndexState(ready=True, error=str(error))
            self._store_state = state
            return {"rollouts"} if changed else set()
        except (sqlite3.Error, OSError) as error:
            self._close_index()
            self.index_state = IndexState(
                ready=True, error=f"the index {self._index_file.path}: {error}"
            )
            return set()
        self._store_error = ""
        if has_more is None:  # another viewer fills it
            return {"rollouts"} if self.index_state != before else set()
        if has_more:
            return {"index", "rollouts"}
        self._store_state = state
        return {"rollouts"}

    def _fill_batch(self, live: bool) -> bool | None:
        """Whether there is more; None if another process fills the index."""
        from invrl.viewer.index_filler import IndexFiller, identity_of

        with self.store.reading() as store:
            if not self._holds_index():
                return self._look_at_index(store)
            identity = identity_of(store, INDEX_VERSION)
            if self._index is None or self._identity != identity:
                self._close_index(keep_lock=True)
                self._index = self._index_file.open_for(identity)
                self._identity = identity
            filler = IndexFiller(
                store,
                self._index,
                rules=self._failure_rules(),
                is_live=live,
                trained_tokens=self.folder.trained_tokens_path,
            )
            if not filler.continues():
                self._index.close()
                self._index = self._index_file.made_anew(identity)
                return True
            has_more = filler.fill()
            self._note_progress(filler.progress(), has_more)
            return has_more

    def _look_at_index(self, store: sqlite3.Connection) -> None:
        from invrl.viewer.index_filler import progress_of

        index = self._index_file.reading()
        if index is None:
            return
        with contextlib.closing(index):
            progress = progress_of(store, index)
        self._note_progress(progress, not progress.complete)

    def _note_progress(self, progress: Progress, has_more: bool) -> None:
        self.index_state = IndexState(
            rollouts_indexed=progress.rollouts_indexed,
            rollouts=progress.rollouts,
            turns_indexed=progress.turns_indexed,
            turns=progress.turns,
            ready=not has_more,
        )

    def _holds_index(self) -> bool:
        """Whether this process may fill the index. The kernel releases the lock when it
        ends."""
        if self._index_lock is not None:
            return True
        path = self._index_file.path.with_name("index.lock")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open_private(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._index_lock = file
        return True

    def _close_index(self, *, keep_lock: bool = False) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._index_lock is not None and not keep_lock:
            self._index_lock.close()
            self._index_lock = None

    def close(self) -> None:
        """To be called by the thread that calls `refresh`."""
        self._close_index()

    # -------------------------------------------------------------- what the page asks

    @contextlib.contextmanager
    def queries(self) -> Iterator[RolloutQueries]:
        """Raises RunStoreError if there is no index yet, or none can be made."""
        index = self._index_file.reading()
        if index is None:
            why = self.index_state.error or "it is being made"
            raise RunStoreError(
                f"there is no index of the rollouts of {self.folder.path}: {why}"
            )
        with contextlib.closing(index):
            yield RolloutQueries(index)

    def state(self) -> str:
        """running, ended, failed or interrupted."""
        if self.folder.is_worked_in():
            return "running"
        if self.folder.finished_path.exists():
            return "ended"
        if "Traceback (most recent call last)" in self._end_of_log():
            return "failed"
        return "interrupted"

    def _end_of_log(self) -> str:
        try:
            with self.folder.log_path("driver").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LOG_TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def configuration(self) -> dict[str, dict[str, Any]]:
        """The settings by section, as they are in the folder; {} if they cannot be
        read."""
        try:
            tables = tomllib.loads(
                self.folder.config_path.read_text(errors="replace", encoding="utf-8")
            )
        except (OSError, tomllib.TOMLDecodeError) as error:
            self._config_error = f"{self.folder.config_path} cannot be read: {error}"
            return {}
        return {
            name: table for name, table in tables.items() if isinstance(table, dict)
        }

    def _failure_rules(self) -> Mapping[FailureReason, FailureRule]:
        """What failures count with. A configuration of another version counts as one
        without rules."""
        if self._rules is None:
            entries = self.configuration().get("buffer", {}).get("failure_reward", [])
            if not entries:
                self._rules = {}
                return self._rules
            from invrl.buffer.config import parse_failure_rules

            try:
                self._rules = parse_failure_rules(
                    tuple(str(entry) for entry in entries)
                )
            except (TypeError, ValueError) as error:
                self._config_error = f"buffer.failure_reward cannot be read: {error}"
                self._rules = {}
        return self._rules

    def match_level(self) -> MatchLevel:
        """How much of a message the gateway compared; the default if the configuration
        does not say it."""
        from invrl.gateway.types import MatchLevel

        name = str(
            self.configuration().get("gateway", {}).get("match_level", "")
        ).upper()
        if name not in MatchLevel.__members__:
            return MatchLevel.REWRITTEN
        return MatchLevel[name]

    def token_reader(self) -> TokenReader | None:
        """Texts of tokens, from the run's own copy of the tokenizer or from its model's
        folder."""
        from invrl.store.tokenizer_folder import token_reader

        with self._lock:
            if not self._tokens_read:
                self._tokens = token_reader(self.folder.path, self._model_path())
                self._tokens_read = True
            return self._tokens

    def _model_path(self) -> Path | None:
        path = self.configuration().get("model", {}).get("model_path", "")
        if not isinstance(path, str) or not path:
            return None
        return Path(path).expanduser()

    def overview(self) -> dict[str, Any]:
        """The row `Run` of `/api/runs`."""
        configuration = self.configuration()
        phase = self.phase()
        started_at, incarnations, last_turn = self._from_store()
        times = [self.metrics.last_time, last_turn, phase.get("since")]
        known_times = [moment for moment in times if isinstance(moment, int | float)]
        has_text = (self.folder.tokenizer_path / "tokenizer.json").is_file()
        model_path = self._model_path()
        if not has_text and model_path is not None:
            has_text = (model_path / "tokenizer.json").is_file()
        num_steps = configuration.get("run", {}).get("num_steps")
        return {
            "id": self.id,
            "name": self.folder.path.name,
            "path": str(self.folder.path),
            "state": self.state(),
            "started_at": started_at,
            "last_at": max(known_times, default=None),
            "step": self.metrics.last_step,
            "num_steps": num_steps if isinstance(num_steps, int) else None,
            "phase": str(phase.get("phase", "")),
            "phase_since": phase.get("since"),
            "incarnations": incarnations,
            "index": self.index_state,
            "has": {
                "metrics": bool(self.metrics.names()),
                "rollouts": bool(self.index_state.rollouts),
                "evaluations": any(
                    name.startswith("eval/") for name in self.metrics.names()
                ),
                "timeline": self.folder.timeline_path.is_file(),
                "tokens": has_text,
                "trained_tokens": self.folder.trained_tokens_path.is_dir(),
            },
            "outcome": self._outcome(num_steps if isinstance(num_steps, int) else None),
            "notes": self._notes(),
        }

    def _outcome(self, num_steps: int | None) -> str:
        from invrl.viewer.outcome import outcome_line, telling_metrics

        state = self.state()
        return outcome_line(
            state=state,
            step=self.metrics.last_step,
            num_steps=num_steps,
            report=self.folder.report_path,
            series=self.metrics.series(telling_metrics(self.metrics.names())),
            log_end=self._end_of_log() if state == "failed" else "",
        )

    def _from_store(self) -> tuple[float | None, int, float | None]:
        """When the first incarnation started, the number of incarnations, and the end
        of the last turn."""
        try:
            with self.store.reading() as store:
                sql = "SELECT MIN(started_at), COUNT(*) FROM incarnations"
                started_at, incarnations = store.execute(sql).fetchone()
                sql = "SELECT finished_at FROM turns ORDER BY seq DESC LIMIT 1"
                row = store.execute(sql).fetchone()
        except (DamagedFileError, RunStoreError):
            return None, 0, None
        return started_at, incarnations, row[0] if row else None

    def phase(self) -> dict[str, Any]:
        """What the driver said last that it does; {} if it said nothing."""
        try:
            content = json.loads(self.folder.phase_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _rows(self, names: Sequence[str]) -> list[dict[str, float | None]]:
        """These metrics, step by step."""
        rows: dict[int, dict[str, float | None]] = {}
        for name, points in self.metrics.series(names).items():
            for step, _, value in points:
                rows.setdefault(step, {"step": step})[name] = value
        return [rows[step] for step in sorted(rows)]

    def _notes(self) -> list[str]:
        notes = [self._store_error, self._config_error, self.failure]
        if self.index_state.error != self._store_error:
            notes.append(self.index_state.error)
        if self.metrics.damaged_lines:
            notes.append(
                f"{self.metrics.damaged_lines} lines of metrics.jsonl are damaged and left out"
            )
        if self.metrics.ends_incomplete and not self.folder.is_worked_in():
            notes.append("the last line of metrics.jsonl is incomplete and left out")
        notes.append(collapse(self._rows(COLLAPSE_METRICS)))
        return [note for note in notes if note]


def _state_of(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """Numbers that change with the files."""
    numbers: list[int] = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError:
            numbers += [0, 0]
            continue
        numbers += [facts.st_size, facts.st_mtime_ns]
    return tuple(numbers)


def open_runs(paths: list[Path], cache: Path) -> list[ViewedRun]:
    """One run for each folder, with different ids. Raises ConfigError for a folder that
    is none."""
    runs: dict[str, ViewedRun] = {}
    for path in paths:
        folder = RunFolder(path=path.expanduser().absolute())
        _check_folder(folder)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", folder.path.name).strip(".") or "run"
        run_id = name
        number = 2
        while run_id in runs:
            run_id = f"{name}-{number}"
            number += 1
        runs[run_id] = ViewedRun(run_id, folder, cache)
    return list(runs.values())


def _check_folder(folder: RunFolder) -> None:
    fix = "give the folder that `invrl train` printed"
    if not folder.path.is_dir():
        raise ConfigError(
            "RUN",
            str(folder.path),
            "there is no such folder",
            fix_of_path(folder.path, fix),
        )
    try:
        is_run = folder.config_path.exists()
    except OSError as error:
        raise ConfigError(
            "RUN", str(folder.path), f"it cannot be read: {error}", fix
        ) from error
    if not is_run:
        raise ConfigError(
            "RUN",
            str(folder.path),
            "not a run folder: it has no config.resolved.toml",
            fix,
        )
