"""What `invrl view` makes of run folders in any state, and that none of them is
touched."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from indexed_run import closed, notes_of, refreshed, rollout_rows, session_ids, view_of
from recorded_run import record_run

from invrl.errors import ConfigError, RunStoreError
from invrl.observe.metrics.metrics_table import MetricsTable
from invrl.viewer.page_server import encoded
from invrl.viewer.rollout_queries import EVERY_ROW
from invrl.viewer.run_pages import (
    evaluations_page,
    ledger_page,
    metric_names_page,
    timeline_page,
    weights_page,
)
from invrl.viewer.viewed_run import open_runs

ROOT = Path(__file__).parents[2]
_READER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from indexed_run import session_ids, refreshed
from invrl.viewer.conversation_page import rollout_detail
from invrl.viewer.turn_tokens import turn_tokens
from invrl.viewer.page_server import runs_page
from invrl.viewer.run_pages import ledger_page
from invrl.viewer.viewed_run import open_runs
[run] = open_runs([Path(sys.argv[1])], Path(sys.argv[2]))
refreshed(run)
runs_page([run])
ledger_page(run)
for session_id in session_ids(run):
    detail = rollout_detail(run, session_id, full=False)
    turn_tokens(run, detail["turns"][0]["id"], full=False)
print(len(session_ids(run)), run.index_state.error)
"""


def contents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Of every file: a hash of what it holds, its mode, and when it was changed."""
    entries: dict[str, tuple[str, int, int]] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        entries[str(path.relative_to(folder))] = (
            digest,
            facts.st_mode,
            facts.st_mtime_ns,
        )
    return entries


def read_elsewhere(folder: Path, cache: Path) -> str:
    """Views the run in a process of its own, as a user does, and returns what it
    prints."""
    script = _READER.format(tests=str(ROOT / "tests"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(cache)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_live_run_is_read_without_changing_its_folder(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    for number in range(5):
        recorded.add(f"t{number}", "hello", 1.0)
    folder = recorded.folder.path
    assert (folder / "run.sqlite-wal").stat().st_size > 0, (
        "the store is open and has a log"
    )
    before = contents(folder)
    assert read_elsewhere(folder, tmp_path / "cache").startswith("5")
    assert contents(folder) == before


def test_dead_run_is_read_without_changing_its_folder(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "hello", 1.0)
    folder = closed(recorded)
    assert not (folder / "run.sqlite-wal").exists()
    before = contents(folder)
    assert read_elsewhere(folder, tmp_path / "cache").startswith("1")
    assert contents(folder) == before


@pytest.mark.parametrize(
    "endings",
    [
        ("", "-wal"),
        ("", "-wal", "-shm"),
    ],
    ids=["log", "log and its index"],
)
def test_copy_of_a_killed_run_is_read_completely(
    tmp_path: Path, endings: tuple[str, ...]
) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "hello", 1.0)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(recorded.folder.config_path, copy)
    for ending in endings:
        shutil.copy(f"{recorded.folder.store_path}{ending}", copy)
    before = contents(copy)
    assert read_elsewhere(copy, tmp_path / "cache").startswith("1")
    assert contents(copy) == before
    for path in (tmp_path / "cache").rglob("*.sqlite*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_read_only_run_folder_is_read(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "hello", 1.0)
    folder = closed(recorded)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(folder)
    try:
        assert read_elsewhere(folder, tmp_path / "cache").startswith("1")
        assert contents(folder) == before
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)


def test_torn_store_is_named_and_metrics_are_shown(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    for number in range(20):
        recorded.add(f"t{number}", "hello " * 200, 1.0)
    folder = closed(recorded)
    recorded.folder.metrics_path.write_text('{"step": 1, "time": 5.0, "a": 1.5}\n')
    store = recorded.folder.store_path
    content = store.read_bytes()
    store.write_bytes(content[: len(content) // 2])
    run = view_of(folder, tmp_path / "cache")
    assert "SQLite cannot read it" in notes_of(run)
    assert "Fix: " in notes_of(run)
    assert metric_names_page([run], "")["names"][0]["name"] == "a"


def test_store_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    folder = closed(recorded)
    recorded.folder.store_path.write_bytes(b"hello" * 1000)
    assert "SQLite cannot read it" in notes_of(view_of(folder, tmp_path / "cache"))


def test_a_store_of_a_later_version_is_named(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    folder = closed(recorded)
    with sqlite3.connect(recorded.folder.store_path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    assert "a later version of invrl wrote it (schema 99" in notes_of(
        view_of(folder, tmp_path / "cache")
    )


def test_exclusively_locked_store_is_named_and_read_later(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "hello", 1.0)
    holder = sqlite3.connect(recorded.folder.store_path, isolation_level=None)
    holder.execute("SELECT COUNT(*) FROM sessions").fetchone()
    folder = closed(recorded)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("INSERT INTO flushes VALUES (77, 1.0)")
    assert recorded.folder.store_path.with_name("run.sqlite-shm").exists()
    run = view_of(folder, tmp_path / "cache")
    assert "another process holds it alone" in notes_of(run)
    holder.close()
    refreshed(run)
    assert session_ids(run) == {session}
    assert notes_of(run) == ""


def test_exclusively_locked_store_without_a_shared_index_is_read(
    tmp_path: Path,
) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "hello", 1.0)
    folder = closed(recorded)
    holder = sqlite3.connect(recorded.folder.store_path, isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("INSERT INTO flushes VALUES (77, 1.0)")
    assert session_ids(view_of(folder, tmp_path / "cache")) == {session}
    holder.close()


def test_run_without_a_store_shows_its_other_files(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    folder = closed(recorded)
    recorded.folder.store_path.unlink()
    recorded.folder.metrics_path.write_text(
        '{"step": 1, "time": 5.0, "train/loss": 1.5, "sync/load_s": 2.0}\n'
    )
    run = view_of(folder, tmp_path / "cache")
    assert "a run on a file has no rollouts" in notes_of(run)
    assert evaluations_page(run, EVERY_ROW) == {
        "scores": [],
        "gains": [],
        "tasks": {"total": 0, "rows": []},
    }
    [update] = weights_page(run)["updates"]
    assert update["seconds"] == {"load": 2.0}
    assert not timeline_page(run)["spans"]


def test_half_written_metrics_line_is_read_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "time": 1.0, "a": 1}\n\xff\xfe\n[1]\n{"step": 2, "time": 2.0, "a": NaN}\n{"step"'
    )
    table = MetricsTable(path)
    table.refresh()
    assert table.series(["a"]) == {"a": [(1, 1.0, 1.0), (2, 2.0, None)]}
    assert table.damaged_lines == 2
    assert table.ends_incomplete
    with path.open("ab") as file:
        file.write(b': 3, "time": 3.0, "a": 5}\n')
    table.refresh()
    assert table.series(["a"])["a"][-1] == (3, 3.0, 5.0)
    assert not table.ends_incomplete
    path.write_text('{"step": 1, "time": 9.0, "b": 1}\n')  # a run that resumed
    table.refresh()
    assert table.all_series() == {"b": [(1, 9.0, 1.0)]}


def test_evaluation_of_an_earlier_step_joins_its_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 1, "b": 3}\n')
    table = MetricsTable(path)
    table.refresh()
    assert table.last_step == 2
    assert table.rows(["a", "b"]) == [{"step": 1, "a": 1, "b": 3}, {"step": 2, "a": 2}]


def test_ten_thousand_metrics_are_read_and_found(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    names = ", ".join(f'"m/{number}": {number}' for number in range(10_000))
    lines = [f'{{"step": {step}, "time": {step}.0, {names}}}\n' for step in range(20)]
    recorded.folder.metrics_path.write_text("".join(lines))
    run = view_of(closed(recorded), tmp_path / "cache")
    assert len(metric_names_page([run], "")["names"]) == 10_000
    [name] = metric_names_page([run], "m/9999")["names"]
    assert name == {"name": "m/9999", "runs": ["run"], "last": 9999.0}


def test_large_and_binary_texts_are_shown(tmp_path: Path) -> None:
    from invrl.viewer.conversation_page import rollout_detail

    recorded = record_run(tmp_path)
    large = recorded.add("large", "needle " + "x" * 1_000_000, 1.0)
    binary = recorded.add(
        "bin\x00ary\x1b[31m", "\x00\x01\x7f \U0001f600 \ufffe marker", 1.0
    )
    run = view_of(closed(recorded), tmp_path / "cache")
    assert session_ids(run, q="needle") == {large}
    assert session_ids(run, q="marker") == {binary}
    cut = rollout_detail(run, large, full=False)
    whole = rollout_detail(run, large, full=True)
    assert cut
    assert whole
    assert cut["turns"][0]["reply"]["cut"]
    assert len(cut["turns"][0]["reply"]["content"]) == 100_000
    assert len(whole["turns"][0]["reply"]["content"]) == 1_000_007
    assert not whole["turns"][0]["reply"]["cut"]
    encoded(rollout_detail(run, binary, full=False))
    [row] = rollout_rows(run, task="bin\x00ary\x1b[31m")
    assert row["session_id"] == binary


def test_unreadable_configuration_becomes_a_note(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "x", 1.0)
    folder = closed(recorded)
    recorded.folder.config_path.write_bytes(b"[run\n\xff")
    run = view_of(folder, tmp_path / "cache")
    assert session_ids(run) == {session}
    assert "config.resolved.toml cannot be read" in notes_of(run)


def test_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "not a run folder"),
        (tmp_path / "none", "there is no such folder"),
    ):
        with pytest.raises(ConfigError) as error:
            open_runs([path], tmp_path / "cache")
        assert reason in error.value.reason
        assert error.value.field == "RUN"
        assert error.value.fix


def test_failures_are_counted_by_message(tmp_path: Path) -> None:
    from invrl.types.reasons import FailureReason

    recorded = record_run(tmp_path)
    trace = "Traceback (most recent call last):\n  File 'a.py'\nValueError: no number"
    for index in range(3):
        recorded.add(
            "a", "x", 0.0, index=index, failure=FailureReason.EXCEPTION, detail=trace
        )
    recorded.add("b", "x", 0.0, failure=FailureReason.TIMEOUT, detail="late")
    run = view_of(closed(recorded), tmp_path / "cache")
    page = ledger_page(run)
    assert [
        (kind["failure"], kind["line"], kind["count"]) for kind in page["failures"]
    ] == [
        ("exception", "ValueError: no number", 3),
        ("timeout", "late", 1),
    ]
    assert page["failures"][0]["detail"] == trace
    assert {count["reason"] for count in page["counts"]} == {"replaced"}


def test_broken_ledger_is_named(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "x", 1.0, step=1)
    recorded.add("b", "x", 1.0, step=2)
    folder = closed(recorded)
    run = view_of(folder, tmp_path / "cache")
    assert ledger_page(run)["lineage"] == "ok"
    with sqlite3.connect(recorded.folder.store_path) as db:
        db.execute("DELETE FROM ledger WHERE batch_id=0")
    db.close()
    assert "the batches of the lineage are [1]" in ledger_page(run)["lineage"]


def test_lost_ledger_entries_are_not_counted(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "x", 1.0, step=1)
    sequence = recorded.sequence
    recorded.add("b", "x", 1.0, step=2)
    recorded.ledger.begin(parent=1, step=1, sequence=sequence)
    page = ledger_page(view_of(closed(recorded), tmp_path / "cache"))
    assert page["counts"] == [
        {"state": "trained", "reason": None, "failure": None, "count": 1}
    ]
    assert [row["lost"] for row in page["incarnations"]] == [5, 0]
    assert page["lineage"] == "ok"


def test_a_rollout_whose_outcome_or_messages_are_damaged_is_shown(
    tmp_path: Path,
) -> None:
    from invrl.viewer.conversation_page import rollout_detail

    recorded = record_run(tmp_path)
    whole = recorded.add("a", "x", 1.0)
    damaged = recorded.add("b", "x", 1.0)
    silent = recorded.add("c", "x", 1.0)
    folder = closed(recorded)
    with sqlite3.connect(recorded.folder.store_path) as db:
        db.execute("UPDATE sessions SET outcome=X'FF7B' WHERE id=?", (damaged,))
        db.execute("UPDATE turns SET messages=X'00FF' WHERE session_id=?", (silent,))
    db.close()
    run = view_of(folder, tmp_path / "cache")
    assert session_ids(run) == {whole, damaged, silent}
    assert session_ids(run, q="x") == {whole, damaged}
    [row] = rollout_rows(run, session=damaged)
    assert "its outcome in the store is damaged" in row["detail"]
    with pytest.raises(RunStoreError, match="damaged"):
        rollout_detail(run, damaged, full=False)
    detail = rollout_detail(run, silent, full=False)
    assert detail
    assert "cannot be read" in detail["notes"][0]
