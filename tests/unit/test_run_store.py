"""The run's store: what was committed is there after kill -9, and outcomes go out
exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from stored_rollouts import open_session, stored_session, turn

from invrl.buffer.ledger.ledger_store import LedgerStore
from invrl.errors import DamagedFileError
from invrl.gateway.server.processes.heartbeat_page import beat_interval_s
from invrl.store import run_store_writer
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore, trajectories
from invrl.store.run_store_writer import RunStoreWriter
from invrl.store.schema import busy_timeout_s
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.turns import Segment, Turn
from invrl.types.weights import WeightVersion


def summary(session_id: str, reward: float = 0.5) -> RolloutSummary:
    return RolloutSummary(
        session_id=session_id,
        task_id="t",
        group_id="g",
        index=0,
        attempt=0,
        reward=reward,
        reward_components={"exact": 1.0},
        num_turns=2,
        prompt_tokens=10,
        cached_tokens=4,
        later_prompt_tokens=5,
        later_cached_tokens=2,
        sampled_tokens=6,
        trained_tokens=6,
        truncated=False,
        oldest_version=WeightVersion(3),
        newest_version=WeightVersion(4),
        forks=0,
        started_at=1.0,
        finished_at=3.0,
    )


def failure(session_id: str) -> FailedRollout:
    return FailedRollout(
        session_id=session_id,
        task_id="t",
        group_id="g",
        index=1,
        attempt=0,
        reason=FailureReason.TIMEOUT,
        detail="late",
    )


def same(left: Turn, right: Turn) -> bool:
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype
        if isinstance(a, np.ndarray)
        else a == b
        for a, b in (
            (getattr(left, f.name), getattr(right, f.name)) for f in fields(Turn)
        )
    )


def test_stored_rollout_is_read_back_unchanged(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    writer.open_sessions([stored_session("a", b"hash-a", 1.0)])
    for written_turn in (turn("1"), turn("2", parent="1"), turn("3", parent="1")):
        writer.add_turn(written_turn, b"[]")
    writer.mark_delivered("1")
    writer.close_session("a", "finished", summary("a"), hand_over=True).result(60)
    rollout = reader.rollout("a")
    assert rollout.summary == summary("a")
    paths = [[t.id for t in trajectory.turns] for trajectory in rollout.trajectories]
    assert paths == [["1", "2"], ["1", "3"]]
    assert same(rollout.trajectories[0].turns[1], turn("2", parent="1"))
    assert rollout.trajectories[0].turns[0].delivered
    assert [stored.summary.session_id for stored in [reader.rollout("a")]] == ["a"]
    writer.close()


def test_engines_of_a_moved_turn_are_read_back_in_their_order(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    segments = (
        Segment(engine="engine-1.b", start=0, end=2),
        Segment(engine=None, start=2, end=11),
        Segment(engine="engine-0.a", start=11, end=12),
    )
    writer.add_turn(turn("moved", sampled=12), b"[]", segments=segments).result(60)
    writer.add_turn(turn("stayed"), b"[]").result(60)
    writer.add_turn(turn("elsewhere", session_id="b"), b"[]", segments=segments)
    assert reader.turn_segments("a") == {"moved": segments}
    assert set(reader.turn_segments("a", "b")) == {"moved", "elsewhere"}
    writer.close()


def test_outcomes_leave_the_outbox_in_order_and_once(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    writer.open_sessions(
        [
            stored_session(name, name.encode(), 1.0, index)
            for index, name in enumerate("abc")
        ]
    )
    assert reader.outbox_after(0) == []
    writer.close_session("a", "finished", summary("a"), hand_over=True)
    writer.close_session("b", "expired", failure("b"), hand_over=True)
    writer.close_session("c", "finished", summary("c"), hand_over=False).result(60)
    rows = reader.outbox_after(0)
    assert [outcome for _, outcome in rows] == [summary("a"), failure("b")]
    assert reader.outbox_after(rows[0][0]) == rows[1:]
    assert reader.outbox_after(rows[1][0]) == []
    assert [reader.closed_session(name).state for name in "abc"] == [
        "finished",
        "expired",
        "finished",
    ]
    with pytest.raises(KeyError):
        reader.rollout("b")
    with pytest.raises(KeyError):
        reader.rollout("nobody")
    writer.close()


def test_closing_a_session_is_one_transaction(tmp_path: Path):
    """The state must not change when the outbox row cannot be written."""
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    writer.open_sessions([stored_session("a", b"a", 1.0)]).result(60)
    writer.close_session("a", "finished", summary("a"), hand_over=True).result(60)
    again = writer.close_session("a", "aborted", failure("a"), hand_over=True)
    with pytest.raises(sqlite3.IntegrityError):
        again.result(60)
    assert reader.closed_session("a").state == "finished"
    assert [outcome for _, outcome in reader.outbox_after(0)] == [summary("a")]
    writer.close()


def test_failed_write_does_not_fail_other_writes(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    blocker = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # so that all writes below are one batch
    futures = [writer.add_turn(turn(name), b"[]") for name in ("1", "2", "2", "3")]
    blocker.execute("ROLLBACK")
    failed = []
    for future in futures:
        failed.append(future.exception(30) is not None)
    assert failed == [False, False, True, False]
    assert [t.id for t in reader.turns("a")] == ["1", "2", "3"]
    writer.close()


def test_commits_are_immediate_and_in_order_behind_waiting_writes(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    assert writer.add_turn(turn("1"), b"[]").done()
    blocker = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    waiting = [writer.add_turn(turn(name), b"[]") for name in ("2", "3")]
    assert not any(written.done() for written in waiting)
    blocker.execute("ROLLBACK")
    for written in (*waiting, writer.add_turn(turn("4"), b"[]")):
        written.result(60)
    assert [t.id for t in reader.turns("a")] == ["1", "2", "3", "4"]
    writer.close()


def test_long_write_ahead_log_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_store_writer, "_LONG_LOG", 100)
    # once, when nothing more is written
    monkeypatch.setattr(run_store_writer, "_CHECKPOINT_EVERY", 200)
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    for number in range(200):
        writer.add_turn(turn(str(number)), b" " * 10_000)
    writer.close()
    assert (tmp_path / "run.db-wal").stat().st_size == 0
    assert [t.id for t in reader.turns("a")] == [str(number) for number in range(200)]


def test_long_reader_does_not_block_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_store_writer, "_LONG_LOG", 10)
    monkeypatch.setattr(run_store_writer, "_CHECKPOINT_EVERY", 50)
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = sqlite3.connect(tmp_path / "run.db")
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM turns").fetchone() == (0,)
    for number in range(100):
        # of the 30 s that a connection waits
        writer.add_turn(turn(str(number)), b"[]").result(20)
    reader.close()
    writer.close()


@pytest.mark.parametrize("heartbeat_timeout_s", [0.5, 30.0, 600.0])
def test_writer_waits_longer_than_a_stopped_process_may_live(
    tmp_path: Path, heartbeat_timeout_s: float
):
    """Stopped within a commit, it holds the store until its silence has killed it."""
    path = tmp_path / "run.db"
    options = {"heartbeat_timeout_s": heartbeat_timeout_s}
    with (
        contextlib.closing(RunStoreWriter(path, **options)) as writer,
        contextlib.closing(LeaseStore(path, **options)) as leases,
        contextlib.closing(LedgerStore(path, **options)) as ledger,
    ):
        writer._checkpoint()  # sets it for a moment
        for db in (writer._patient, leases._db, ledger._db):
            (waits_ms,) = db.execute("PRAGMA busy_timeout").fetchone()
            assert waits_ms >= 1000 * (2 * heartbeat_timeout_s + 30)
    # The supervisor looks again after a second at most, or an eighth of the timeout.
    assert busy_timeout_s(
        heartbeat_timeout_s
    ) > heartbeat_timeout_s + 2 * beat_interval_s(heartbeat_timeout_s)


def test_cancelled_waiter_does_not_undo_its_commit(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    reader = RunStore(tmp_path / "run.db")
    blocker = sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    cancelled = writer.add_turn(turn("1"), b"[]")
    assert not cancelled.cancel()
    blocker.execute("ROLLBACK")
    cancelled.result(60)
    writer.add_turn(turn("2"), b"[]").result(60)
    assert [t.id for t in reader.turns("a")] == ["1", "2"]
    writer.close()


def test_unstorable_turn_fails_alone(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    other = RunStoreWriter(tmp_path / "run.db")
    with pytest.raises(UnicodeEncodeError):
        writer.add_turn(turn("\ud800"), b"[]").result(60)
    assert other.add_turn(turn("1"), b"[]").done()  # nothing holds the database
    assert writer.add_turn(turn("2"), b"[]").done()
    writer.close()
    other.close()


def test_store_file_contains_no_session_keys(tmp_path: Path):
    writer = RunStoreWriter(tmp_path / "run.db")
    writer.open_sessions([stored_session("a", b"hash", 1.0)]).result(60)
    writer.close()
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"isk-secret" not in stored
    [stored] = RunStore(tmp_path / "run.db").live_sessions()
    assert stored.key_hash == b"hash"
    assert stored.session == replace(open_session("a"), key="", base_url="")


def test_acknowledged_turns_survive_kill_9(tmp_path: Path):
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from stored_rollouts import stored_session, turn
        from invrl.store.run_store_writer import RunStoreWriter
        writer = RunStoreWriter(Path(sys.argv[1]))
        writer.open_sessions([stored_session("a", b"a", 1.0)])
        for number in range(100_000):
            writer.add_turn(turn(str(number)), b"[]").result(60)
            print(number, flush=True)
        """
    )
    command = [
        sys.executable,
        "-c",
        program,
        str(tmp_path / "run.db"),
        str(Path(__file__).parents[1]),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 50:
            break
    os.kill(child.pid, signal.SIGKILL)
    acknowledged = [int(line) for line in child.stdout]
    child.wait(60)
    last = max([50, *acknowledged])
    kept = RunStore(tmp_path / "run.db").turns("a")
    assert [t.id for t in kept][: last + 1] == [str(n) for n in range(last + 1)]
    assert all(same(t, turn(t.id)) for t in kept)
    writer = RunStoreWriter(tmp_path / "run.db")
    writer.close_session("a", "finished", summary("a"), hand_over=True).result(60)
    assert len(RunStore(tmp_path / "run.db").outbox_after(0)) == 1
    writer.close()


def test_trajectories_of_a_forest_are_its_root_to_leaf_paths():
    turns = [
        turn("1"),
        turn("2", parent="1"),
        turn("3"),
        turn("4", parent="2"),
        turn("5", parent="1"),
    ]
    paths = [[t.id for t in trajectory.turns] for trajectory in trajectories(turns)]
    assert paths == [["3"], ["1", "2", "4"], ["1", "5"]]


def num_bytes(path: Path) -> int:
    """Size of a store."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        sql = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        [(size,)] = db.execute(sql)
    return size


def test_equal_tools_are_stored_once(tmp_path: Path):
    path = tmp_path / "run.db"
    writer = RunStoreWriter(path)
    empty = num_bytes(path)
    own = [
        b'[{"name": "%d", "description": "%s"}]' % (number, b"x" * 50_000)
        for number in range(3)
    ]
    writer.open_sessions(
        [stored_session("a", b"a", 0.0), stored_session("b", b"b", 0.0)]
    ).result(60)
    for number in range(60):
        written_turn = turn(str(number), session_id="ab"[number % 2])
        writer.add_turn(written_turn, b"[]", own[number % 3]).result(60)
    writer.add_turn(turn("none"), b"[]").result(60)
    writer.close()
    store = RunStore(path)
    tools_by_turn = {
        recorded.id: tools
        for name in "ab"
        for recorded, _, tools in store.recorded_turns(name)
    }
    assert tools_by_turn == {str(number): own[number % 3] for number in range(60)} | {
        "none": b"[]"
    }
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM tool_lists").fetchone() == (4,)
    assert num_bytes(path) - empty < 4 * 50_000  # 60 times would be 3 MB


def test_store_of_the_old_format_with_tools_in_turns_is_refused(tmp_path: Path):
    """Such stores are from before the schema had a version."""
    path = tmp_path / "run.db"
    writer = RunStoreWriter(path)
    tools = b'[{"name": "a"}]'
    writer.open_sessions([stored_session("a", b"a", 0.0)]).result(60)
    writer.add_turn(turn("1"), b"[]", tools).result(60)
    writer.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE turns SET tools=?", (tools,))
        db.execute("DROP TABLE tool_lists")
        db.execute("PRAGMA user_version=0")
        db.commit()
    with pytest.raises(DamagedFileError, match="an earlier version of invrl wrote it"):
        RunStore(path)
