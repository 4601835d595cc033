"""The private index of a run's rollouts: one SQLite file in the user's cache folder,
with one row per rollout and a full-text index of its turns.

Invariant: its content can be computed again from the run folder. An index of another
version of the viewer, or of an earlier run at the same path, is removed.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from invrl.host.files.private_file import make_private

INDEX_VERSION = 1
"""Raised with every change of the tables or their content."""
TURN_BITS = 20
"""Shift for the full-text index, whose documents are turns: a turn's row is the
rollout's row shifted by this, plus the number of the turn in the rollout."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL, task TEXT NOT NULL,
  group_id TEXT NOT NULL, "index" INTEGER NOT NULL, attempt INTEGER NOT NULL, purpose TEXT NOT NULL,
  evaluation TEXT NOT NULL DEFAULT '', step INTEGER, state TEXT NOT NULL, reason TEXT, failure TEXT,
  detail TEXT NOT NULL DEFAULT '', reward REAL, components TEXT NOT NULL DEFAULT '{}', turns INTEGER,
  sampled_tokens INTEGER, truncated INTEGER NOT NULL DEFAULT 0, forks INTEGER NOT NULL DEFAULT 0,
  fork_reasons TEXT NOT NULL DEFAULT '{}', oldest_version INTEGER, newest_version INTEGER,
  staleness INTEGER, opened_at REAL NOT NULL, seconds REAL, advantage REAL, logprob REAL, gap REAL,
  surprise REAL, ended INTEGER NOT NULL DEFAULT 0, trained INTEGER NOT NULL DEFAULT 0,
  turns_read INTEGER NOT NULL DEFAULT 0, logprob_sum REAL NOT NULL DEFAULT 0,
  logprob_count INTEGER NOT NULL DEFAULT 0);
CREATE INDEX rollouts_of_group ON rollouts (group_id);
CREATE INDEX rollouts_of_task ON rollouts (task);
CREATE INDEX rollouts_of_step ON rollouts (step);
CREATE INDEX rollouts_not_ended ON rollouts (id) WHERE ended = 0;
CREATE TABLE children (session_id TEXT PRIMARY KEY, rollout INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE forks (reason TEXT NOT NULL, rollout INTEGER NOT NULL, count INTEGER NOT NULL,
  PRIMARY KEY (reason, rollout)) WITHOUT ROWID;
CREATE TABLE component_values (name TEXT NOT NULL, rollout INTEGER NOT NULL, value REAL,
  PRIMARY KEY (name, rollout)) WITHOUT ROWID;
CREATE TABLE places (group_id TEXT NOT NULL, "index" INTEGER NOT NULL, attempt INTEGER NOT NULL,
  session_id TEXT NOT NULL, PRIMARY KEY (group_id, "index", attempt)) WITHOUT ROWID;
CREATE TABLE fates (session_id TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT, step INTEGER)
  WITHOUT ROWID;
CREATE VIRTUAL TABLE said USING fts5(
  text, content='', tokenize="unicode61 remove_diacritics 2", prefix='2 3');
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexState:
    """Progress of the index through the store, for the page."""

    rollouts_indexed: int = 0
    rollouts: int = 0
    turns_indexed: int = 0
    turns: int = 0
    ready: bool = False
    error: str = ""


class IndexFile:
    """Index at `folder`/index.sqlite. Any number of processes may read it; one fills
    it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "index.sqlite"

    def open_writer(self, identity: str) -> sqlite3.Connection:
        """Open a connection that writes. `identity`: of the run; another run's index is
        removed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        db = self._opened()
        try:
            if read_meta(db, "identity") == identity:
                return db
        except sqlite3.DatabaseError:
            pass  # no tables yet, or a damaged file
        db.close()
        return self.recreate(identity)

    def recreate(self, identity: str) -> sqlite3.Connection:
        """Make a new index, for a run that no longer fits the old one, and open it as
        `open_writer` does."""
        for ending in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        db = self._opened()
        db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        set_meta(db, "identity", identity)
        return db

    def _opened(self) -> sqlite3.Connection:
        make_private(self.path)
        db = sqlite3.connect(
            self.path, timeout=5.0, isolation_level=None, check_same_thread=False
        )
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")  # it can be computed again
            db.execute("PRAGMA cache_size=-65536")
        except sqlite3.DatabaseError:
            db.close()
            self.path.unlink(missing_ok=True)
            return self._opened()
        return db

    def reading(self) -> sqlite3.Connection | None:
        """Open a connection that reads; None while there is no index."""
        if not self.path.exists():
            return None
        db = sqlite3.connect(
            self.path, timeout=5.0, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA query_only=1")
        db.execute("PRAGMA mmap_size=1073741824")
        db.execute("PRAGMA cache_size=-32768")
        try:
            sql = "SELECT 1 FROM sqlite_master WHERE name='said'"
            has_tables = db.execute(sql).fetchone() is not None
        except sqlite3.DatabaseError:
            has_tables = False
        if has_tables:
            return db
        db.close()
        return None


def read_meta(db: sqlite3.Connection, key: str) -> object:
    """Return a value; None if it is not set."""
    row = db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
    if row is None:
        return None
    return row[0]


def meta_number(db: sqlite3.Connection, key: str) -> int:
    """Return a number; 0 if it is not set."""
    value = read_meta(db, key)
    if isinstance(value, int):
        return value
    return 0


def set_meta(db: sqlite3.Connection, key: str, value: int | str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, value))


def session_rollout(db: sqlite3.Connection, session_id: str) -> int | None:
    """Return the row of the rollout that a session belongs to."""
    sql = "SELECT id FROM rollouts WHERE session_id=? UNION ALL SELECT rollout FROM children WHERE session_id=?"
    row = db.execute(sql, (session_id, session_id)).fetchone()
    if row is None:
        return None
    return row[0]
