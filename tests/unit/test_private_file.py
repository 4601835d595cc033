"""Keys, conversations and logs are their owner's from the moment they exist, whatever
the umask is."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from invrl.host.files.private_file import make_private, open_private, restrict
from invrl.host.processes.process import ServerProcess
from invrl.store.run_store_writer import RunStoreWriter
from invrl.store.schema import connect


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_file_is_private_also_if_it_existed(tmp_path: Path) -> None:
    for append, expected in ((False, b"new"), (True, b"oldnew")):
        path = tmp_path / str(append)
        path.write_bytes(b"old")
        assert mode(path) == 0o666
        with open_private(path, append=append) as file:
            assert mode(path) == 0o600
            file.write(b"new")
        assert path.read_bytes() == expected
        with open_private(tmp_path / f"{append} new", append=append):
            assert mode(tmp_path / f"{append} new") == 0o600
    make_private(tmp_path / "empty")
    (tmp_path / "full").write_bytes(b"stays")
    make_private(tmp_path / "full")
    assert [mode(tmp_path / name) for name in ("empty", "full")] == [0o600, 0o600]
    assert (tmp_path / "full").read_bytes() == b"stays"


def test_making_a_file_private_keeps_its_locks(tmp_path: Path) -> None:
    """To open and close it would drop them, and SQLite's with them."""
    path = tmp_path / "locked"
    path.touch(mode=0o666)
    ask = f"import fcntl; fcntl.lockf(open({str(path)!r}, 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with path.open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        make_private(path)
        assert subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, timeout=120
        ).returncode
    assert subprocess.run([sys.executable, "-c", ask], timeout=120).returncode == 0


def test_run_store_is_private_with_its_log_and_index(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    writer = RunStoreWriter(path)
    files = [path, tmp_path / "run.sqlite-wal", tmp_path / "run.sqlite-shm"]
    assert [mode(file) for file in files] == [0o600] * 3
    for file in files:  # as an earlier version left them
        file.chmod(0o644)
    connect(path).close()
    assert [mode(file) for file in files] == [0o600] * 3
    writer.close()


def test_file_removed_by_another_process_is_not_recreated(tmp_path: Path) -> None:
    """Whoever closes the store last removes its log, also while another process
    connects."""
    restrict(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    (tmp_path / "there").touch(mode=0o666)
    restrict(tmp_path / "there")
    assert mode(tmp_path / "there") == 0o600


def test_process_log_is_private(tmp_path: Path) -> None:
    process = ServerProcess("a server", ["true"], log=tmp_path / "logs" / "server.log")
    assert mode(tmp_path / "logs" / "server.log") == 0o600
    process.stop()
