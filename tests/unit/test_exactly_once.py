"""The check of a store finds whatever a run may have trained twice or lost."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from exactly_once import NotExactlyOnce, check_exactly_once
from recorded_run import record_run

from invrl.types.reasons import DropReason


def record(folder: Path) -> Path:
    """Two rollouts that were trained, and one that was dropped."""
    run = record_run(folder)
    run.add("one", "4", 1.0, group="g0")
    run.add("two", "5", 0.0, group="g1")
    run.add("three", "6", 0.0, group="g2", drop=DropReason.INCOMPLETE)
    run.writer.close()
    run.ledger.close()
    return run.folder.store_path


def test_run_without_a_fault_is_counted(tmp_path: Path) -> None:
    assert check_exactly_once(record(tmp_path)) == {
        "batches_trained": 1,
        "sessions_trained": 2,
        "turns_continued": 0,
        "turns_moved_to_another_engine": 0,
        "dropped_incomplete": 1,
    }


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (
            'INSERT INTO ledger SELECT incarnation, sequence + 1000, group_id, "index", attempt + 1, task_id, state, '
            "reason, failure, detail, batch_id, session_id, at FROM ledger WHERE state = 'trained' AND group_id = 'g0'",
            "1 places trained twice",
        ),
        (
            "UPDATE ledger SET session_id = (SELECT MIN(session_id) FROM ledger WHERE session_id <> '') "
            "WHERE state = 'finished'",
            "1 sessions trained at two places",
        ),
        (
            "UPDATE ledger SET state = 'dropped', reason = 'stale' WHERE state = 'taken' AND group_id = 'g0'",
            "1 attempts that ended twice",
        ),
        ("DELETE FROM ledger WHERE state = 'dropped'", "1 attempts that did not end"),
        (
            "UPDATE ledger SET reason = NULL WHERE state = 'dropped'",
            "1 drops without a reason",
        ),
        (
            "DELETE FROM ledger WHERE state = 'finished' AND group_id = 'g1'",
            "1 trained places that had not finished",
        ),
        (
            "DELETE FROM turns WHERE session_id = (SELECT id FROM sessions WHERE group_id = 'g1')",
            "1 trained sessions without a turn",
        ),
        (
            "INSERT INTO turn_segments SELECT id, 0, 99, 'engine-0' FROM turns LIMIT 1",
            "1 continued turns whose segments are not their tokens",
        ),
        (
            "DELETE FROM ledger WHERE group_id = 'g2'",
            "1 outcomes of which no ledger knows",
        ),
        (
            "UPDATE ledger SET batch_id = batch_id + 1 WHERE group_id = 'g1'; "
            "UPDATE ledger SET state = 'trained', batch_id = 0 WHERE group_id = 'g2' AND state = 'dropped'",
            "1 batches of another size",
        ),
    ],
)
def test_fault_in_a_store_is_named(tmp_path: Path, change: str, violation: str) -> None:
    path = record(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as store:
        store.executescript(change)
    with pytest.raises(NotExactlyOnce, match=violation):
        check_exactly_once(path)
