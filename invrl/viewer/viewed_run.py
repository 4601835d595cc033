"""A viewed run: its files, the data computed from them, and its current state.

`refresh` reads changes since its last call, and is cheap if there are none. Other
methods use the data at hand. Invariant: nothing is written into the run's folder, and
no lock is taken there.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from invrl.errors import ConfigError, DamagedFileError, RunStoreError
from invrl.host.files.cache_folder import run_cache_folder
from invrl.host.files.private_file import open_private
from invrl.observe.status.run_files import RunFiles, Settings
from invrl.store.read_only_store import ReadOnlyStore, file_state
from invrl.store.run_folder import RunFolder
from invrl.user_code.near_path import path_fix
from invrl.viewer.index_file import INDEX_VERSION, IndexFile, IndexState
from invrl.viewer.rollout_queries import RolloutQueries

if TYPE_CHECKING:
    from invrl.buffer.config import FailureRule
    from invrl.gateway.types import MatchLevel
    from invrl.store.tokenizer_folder import TokenReader
    from invrl.types.reasons import FailureReason

_LOG_LINES = 25


class ViewedRun(RunFiles):
    """`id`: name of the run in URLs. `cache`: folder of indexes. `defaults`: values of
    settings that are not set."""

    def __init__(
        self,
        run_id: str,
        folder: RunFolder,
        cache: Path,
        defaults: Callable[[], Settings] = dict,
    ) -> None:
        super().__init__(folder)
        self.id = run_id
        self._defaults = defaults
        private = run_cache_folder(cache, folder.path)
        self.store = ReadOnlyStore(folder.store_path, private)
        self.index_state = IndexState()
        self.failure = ""
        """Unexpected error in following the run."""
        self._index_file = IndexFile(private)
        self._index: sqlite3.Connection | None = None
        self._identity = ""
        self._index_lock: BinaryIO | None = None
        self._store_state: tuple[int, ...] = ()
        self._file_states: dict[str, tuple[int, ...]] = {}
        self._rules: Mapping[FailureReason, FailureRule] | None = None
        self._rules_error = ""
        self._tokens: TokenReader | None = None
        self._tokens_read = False
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- what has changed

    def refresh(self, stop: threading.Event) -> set[str]:
        """Read new data, until `stop` is set or there is no more. Returns the kinds of
        things that changed: metrics, rollouts, state, timeline, index."""
        kinds: set[str] = set()
        if self.metrics.refresh():
            kinds.add("metrics")
        live = self.folder.is_worked_in()
        states = {
            "state": (
                *file_state(self.folder.phase_path, self.folder.finished_path),
                live,
            ),
            "timeline": file_state(self.folder.timeline_path),
        }
        for kind, state in states.items():
            if self._file_states.get(kind, state) != state:
                kinds.add(kind)
            self._file_states[kind] = state
        kinds |= self._refresh_index(live)
        return kinds - {"index"} if stop.is_set() else kinds

    def _refresh_index(self, live: bool) -> set[str]:
        """Add one batch. `index` among the kinds: there is more to do."""
        trained_tokens = file_state(self.folder.trained_tokens_path)
        state = (*self.store.state(), *trained_tokens, live)
        if state == self._store_state and self._index is not None:
            return set()
        before = self.index_state
        try:
            has_more = self._fill_batch(live)
        except (DamagedFileError, RunStoreError) as error:
            self.index_state = IndexState(ready=True, error=str(error))
            self._store_state = state
            return {"rollouts"} if self.index_state != before else set()
        except (sqlite3.Error, OSError) as error:
            self._close_index()
            self.index_state = IndexState(
                ready=True, error=f"the index {self._index_file.path}: {error}"
            )
            return set()
        if has_more is None:  # another viewer fills it
            return {"rollouts"} if self.index_state != before else set()
        if has_more:
            return {"index", "rollouts"}
        self._store_state = state
        return {"rollouts"}

    def _fill_batch(self, live: bool) -> bool | None:
        """Add a batch. Returns whether there is more; None if another process fills the
        index."""
        from invrl.viewer.index_filler import IndexFiller, read_identity, read_state

        with self.store.reading() as store:
            if not self._holds_index():
                return self._look_at_index(store)
            identity = read_identity(store, INDEX_VERSION)
            if self._index is None or self._identity != identity:
                self._close_index(keep_lock=True)
                self._index = self._index_file.open_writer(identity)
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
                self._index = self._index_file.recreate(identity)
                return True
            has_more = filler.fill()
            state = read_state(store, self._index)
            self.index_state = replace(state, ready=not has_more)
            return has_more

    def _look_at_index(self, store: sqlite3.Connection) -> None:
        from invrl.viewer.index_filler import read_state

        index = self._index_file.reading()
        if index is None:
            return
        with contextlib.closing(index):
            self.index_state = read_state(store, index)

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
        """Close the index. Call this in the thread that calls `refresh`."""
        self._close_index()

    # -------------------------------------------------------------- what the page asks

    @contextlib.contextmanager
    def queries(self) -> Iterator[RolloutQueries]:
        """Yield queries of the index. Raises RunStoreError if there is no index yet, or
        none can be made."""
        index = self._index_file.reading()
        if index is None:
            why = self.index_state.error or "it is being made"
            raise RunStoreError(
                f"there is no index of the rollouts of {self.folder.path}: {why}"
            )
        with contextlib.closing(index):
            yield RolloutQueries(index)

    def changed_settings(self) -> list[dict[str, Any]]:
        """Return the settings that differ from their defaults. A setting without a
        default has null."""
        defaults = self._defaults()
        return [
            {"key": f"{section}.{key}", "value": value, "default": default}
            for section, table in self.settings().items()
            for key, value in table.items()
            if (default := defaults.get(section, {}).get(key)) != value
        ]

    def _failure_rules(self) -> Mapping[FailureReason, FailureRule]:
        """Return the rewards of failures. A configuration of another version counts as
        one without rules."""
        if self._rules is None:
            settings = self.settings()
            entries = settings.get("failures", {}).get("reward", [])
            if not entries:
                self._rules = {}
                return self._rules
            from invrl.buffer.config import parse_failure_rules

            try:
                self._rules = parse_failure_rules(
                    tuple(str(entry) for entry in entries)
                )
            except (TypeError, ValueError) as error:
                self._rules_error = f"failures.reward cannot be read: {error}"
                self._rules = {}
        return self._rules

    def match_level(self) -> MatchLevel:
        """Return how much of a message the gateway compared; the default if the
        configuration does not tell."""
        from invrl.gateway.types import MatchLevel

        name = str(self.settings().get("gateway", {}).get("match_level", "")).upper()
        if name not in MatchLevel.__members__:
            return MatchLevel.REWRITTEN
        return MatchLevel[name]

    def token_reader(self) -> TokenReader | None:
        """Return a reader of tokens' texts, from the run's own copy of the tokenizer or
        from its model's folder."""
        from invrl.store.tokenizer_folder import token_reader

        with self._lock:
            if not self._tokens_read:
                self._tokens = token_reader(self.folder.path, self._model_path())
                self._tokens_read = True
            return self._tokens

    def _model_path(self) -> Path | None:
        path = self.settings().get("model", {}).get("model_path", "")
        if not isinstance(path, str) or not path:
            return None
        return Path(path).expanduser()

    def overview(self) -> dict[str, Any]:
        """Return the row `Run` of `/api/runs`."""
        phase = self.phase()
        started_at, incarnations, last_turn = self._from_store()
        times = [self.metrics.last_time, last_turn, phase.since if phase else None]
        known_times = [moment for moment in times if isinstance(moment, int | float)]
        has_text = (self.folder.tokenizer_path / "tokenizer.json").is_file()
        model_path = self._model_path()
        if not has_text and model_path is not None:
            has_text = (model_path / "tokenizer.json").is_file()
        return {
            "id": self.id,
            "name": self.folder.path.name,
            "path": str(self.folder.path),
            "state": self.state(),
            "started_at": started_at,
            "last_at": max(known_times, default=None),
            "step": self.metrics.last_step,
            "num_steps": self.num_steps(),
            "phase": phase.name if phase else "",
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
            },
            "outcome": self.outcome(),
            "log_end": self._last_words(),
            "notes": self.notes(),
        }

    def _last_words(self) -> str:
        """Return the last lines of the driver's log; "" unless the run failed or was
        interrupted."""
        if self.state() in ("running", "ended"):
            return ""
        return "\n".join(self.log_end().splitlines()[-_LOG_LINES:])

    def _from_store(self) -> tuple[float | None, int, float | None]:
        """Return the start of the first incarnation, the number of incarnations, and
        the end of the last turn."""
        try:
            with self.store.reading() as store:
                sql = "SELECT MIN(started_at), COUNT(*) FROM incarnations"
                started_at, incarnations = store.execute(sql).fetchone()
                sql = "SELECT finished_at FROM turns ORDER BY seq DESC LIMIT 1"
                row = store.execute(sql).fetchone()
        except (DamagedFileError, RunStoreError):
            return None, 0, None
        return started_at, incarnations, row[0] if row else None

    def notes(self) -> list[str]:
        """Return notes about unreadable parts, including the store and the index."""
        notes = [self.index_state.error, self._rules_error, self.failure]
        return [note for note in notes if note] + super().notes()


def open_runs(
    paths: Sequence[Path], cache: Path, defaults: Callable[[], Settings] = dict
) -> list[ViewedRun]:
    """Return one run for each folder, with different ids. Raises ConfigError for a
    folder that is not a run's."""
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
        runs[run_id] = ViewedRun(run_id, folder, cache, defaults)
    return list(runs.values())


def _check_folder(folder: RunFolder) -> None:
    fix = "give the folder that `invrl train` printed"
    if not folder.path.is_dir():
        raise ConfigError(
            "RUN",
            str(folder.path),
            "there is no such folder",
            path_fix(folder.path, fix),
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
