"""The tables of a run's store, and connections to it.

The store is one SQLite file. The gateway writes sessions, rewards, turns and the
outbox; the driver writes leases; the buffer writes the ledger. A file with another
schema version is refused.
"""

import sqlite3
from pathlib import Path

from invrl.errors import DamagedFileError
from invrl.host.files.private_file import make_private, restrict

HEARTBEAT_TIMEOUT_S = 30.0
"""Default of `run.heartbeat_timeout_s`, for stores whose processes nobody watches."""
SCHEMA_VERSION = 2
"""Stored in the file as `PRAGMA user_version`."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, key_hash BLOB NOT NULL UNIQUE, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
  "index" INTEGER NOT NULL, attempt INTEGER NOT NULL, purpose TEXT NOT NULL, sampling BLOB NOT NULL,
  opened_at REAL NOT NULL, state TEXT NOT NULL, reward REAL, components BLOB, outcome BLOB,
  parent_id TEXT NOT NULL, limits BLOB NOT NULL, reward_deadline REAL);
CREATE INDEX IF NOT EXISTS live_sessions ON sessions (id) WHERE state IN ('open', 'unrewarded');
CREATE INDEX IF NOT EXISTS children ON sessions (parent_id) WHERE parent_id!='';
CREATE TABLE IF NOT EXISTS rewards (
  session_id TEXT NOT NULL, of TEXT NOT NULL, turn_id TEXT NOT NULL, reward REAL NOT NULL, components BLOB,
  PRIMARY KEY (session_id, of, turn_id));
CREATE TABLE IF NOT EXISTS leases (
  group_id TEXT NOT NULL, "index" INTEGER NOT NULL, attempt INTEGER NOT NULL, seq INTEGER NOT NULL,
  task BLOB NOT NULL, taken_at REAL, PRIMARY KEY (group_id, "index", attempt));
CREATE TABLE IF NOT EXISTS turns (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, parent_id TEXT,
  context_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL, logprobs BLOB NOT NULL, spans BLOB NOT NULL,
  finish_reason TEXT NOT NULL, request_digest TEXT NOT NULL, delivered INTEGER NOT NULL,
  temperature REAL NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  fork_reason TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL,
  constrained INTEGER NOT NULL, grammar TEXT NOT NULL, messages BLOB NOT NULL, tools BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS turns_of_session ON turns (session_id, seq);
CREATE TABLE IF NOT EXISTS tool_lists (digest BLOB PRIMARY KEY, tools BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS routed_experts (
  turn_id TEXT PRIMARY KEY, bytes_each INTEGER NOT NULL, layers INTEGER NOT NULL, chosen INTEGER NOT NULL,
  experts BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, failed INTEGER NOT NULL,
  outcome BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS incarnations (
  incarnation INTEGER PRIMARY KEY, parent INTEGER NOT NULL, step INTEGER NOT NULL, sequence INTEGER NOT NULL,
  started_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS flushes (incarnation INTEGER PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS ledger (
  incarnation INTEGER NOT NULL, sequence INTEGER NOT NULL, group_id TEXT NOT NULL, "index" INTEGER NOT NULL,
  attempt INTEGER NOT NULL, task_id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, failure TEXT,
  detail TEXT NOT NULL, batch_id INTEGER, session_id TEXT NOT NULL, at REAL NOT NULL,
  PRIMARY KEY (incarnation, sequence)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS numbers (
  -- turn_id: '' for numbers of the rollout
  session_id TEXT NOT NULL, turn_id TEXT NOT NULL, name TEXT NOT NULL, number REAL NOT NULL,
  PRIMARY KEY (session_id, turn_id, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS token_numbers (
  turn_id TEXT NOT NULL, name TEXT NOT NULL, numbers BLOB NOT NULL, PRIMARY KEY (turn_id, name));
CREATE TABLE IF NOT EXISTS top_logprobs (
  -- int32 and float32, `width` for each sampled token
  turn_id TEXT PRIMARY KEY, width INTEGER NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS session_times (
  -- of sessions that are open or wait for their reward: lived seconds of their gateway worker
  session_id TEXT PRIMARY KEY, opened REAL NOT NULL, reward_deadline REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checksums (
  -- item: what the checksum is of, see `row_checksums.py`
  item TEXT PRIMARY KEY, checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS matched_stops (
  -- the client's stop strings that ended replies: they decide which turn a later request
  -- continues, never what is trained of one
  turn_id TEXT PRIMARY KEY, stop TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turn_segments (
  -- rows only for turns that more than one request to an engine sampled; engine: NULL if it
  -- has no name. Training reads the versions of tokens (`turns.spans`), not these
  turn_id TEXT NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL, engine TEXT,
  PRIMARY KEY (turn_id, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turn_traces (
  -- hexadecimal digits; rows only with OpenTelemetry
  turn_id TEXT PRIMARY KEY, trace_id TEXT NOT NULL, span_id TEXT NOT NULL) WITHOUT ROWID;
"""


def busy_timeout_s(heartbeat_timeout_s: float) -> float:
    """Return how long a connection waits for another process that holds the store. A
    process that is stopped in the middle of a commit holds it until it has been silent
    for `heartbeat_timeout_s` and is killed. If its supervisor is stopped too, that
    takes as long again."""
    return 2 * heartbeat_timeout_s + 30.0


def connect(
    path: Path, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
) -> sqlite3.Connection:
    """Open an autocommit connection to a store with all its tables. The first process
    that connects creates the file. The connection waits for other processes for
    `busy_timeout_s`. Raises DamagedFileError for a store of another version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)  # SQLite gives its log and its index the same mode
    # The process that closes the store last removes these two. A killed one leaves them.
    for ending in ("-wal", "-shm"):
        restrict(path.with_name(path.name + ending))
    timeout_s = busy_timeout_s(heartbeat_timeout_s)
    db = sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        has_tables = check_version(db, path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if not has_tables:
            schema = f"{_SCHEMA} PRAGMA user_version={SCHEMA_VERSION};"
            db.executescript(f"BEGIN IMMEDIATE; {schema} COMMIT;")
    except BaseException:
        db.close()
        raise
    return db


def check_version(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the store has its tables. Raises DamagedFileError if a version of invrl
    with another schema made them."""
    # In this order: tables and version appear in one transaction, perhaps between the
    # two statements.
    (num_tables,) = db.execute(
        "SELECT COUNT(*) FROM sqlite_master WHERE type='table'"
    ).fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if num_tables and version != SCHEMA_VERSION:
        age = "an earlier" if version < SCHEMA_VERSION else "a later"
        raise DamagedFileError(
            path,
            f"{age} version of invrl wrote it (schema {version}; this version has schema {SCHEMA_VERSION})",
            "read and continue this run with the version that wrote it, or begin a new run (--run-name NEW)",
        )
    return num_tables > 0
