"""The tables of a run's store. A store that another version of invrl wrote is refused,
and is not changed."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from invrl.errors import DamagedFileError
from invrl.run.checkpoints.store_check import check_store
from invrl.store.run_store import RunStore
from invrl.store.schema import SCHEMA_VERSION, connect


def make_store(path: Path, version: int) -> None:
    """A store whose only table is of the schema `version`."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(
            "CREATE TABLE sessions (id TEXT PRIMARY KEY, member INTEGER NOT NULL)"
        )
        db.execute(f"PRAGMA user_version={version}")


@pytest.mark.parametrize(
    ("version", "age"),
    [
        (0, "an earlier"),
        (SCHEMA_VERSION + 1, "a later"),
    ],
)
@pytest.mark.parametrize("read", [connect, check_store, RunStore])
def test_a_store_of_another_version_is_refused(
    tmp_path: Path, version: int, age: str, read
) -> None:
    path = tmp_path / "run.sqlite"
    make_store(path, version)
    with pytest.raises(
        DamagedFileError, match=rf"run\.sqlite: {age} version .*--run-name NEW"
    ):
        read(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchone() == ("sessions",)
        assert db.execute("PRAGMA user_version").fetchone() == (version,)


def test_a_new_store_and_an_empty_file_get_the_tables(tmp_path: Path) -> None:
    (tmp_path / "empty.sqlite").touch()
    for name in ("new.sqlite", "empty.sqlite"):
        with contextlib.closing(connect(tmp_path / name)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        check_store(tmp_path / name)
        RunStore(tmp_path / name).close()
