"""What ends the reading of a folder's files before they are read."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from invrl.errors import DamagedFileError
from invrl.store.manifest import MANIFEST_NAME, check_manifest, write_manifest

_CHUNK = bytes(65_536)
_CHUNKS = 20_000
"""Of a file that would take a while: 1.3 GB."""


class LongFile:
    """A pipe by name. Whoever reads it gets `_CHUNKS` chunks, unless the reader leaves
    before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.mkfifo(path)
        self.read_on = threading.Event()
        """Some of it has been read."""
        self.chunks = 0
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def _feed(self) -> None:
        try:
            with self._path.open("wb", buffering=0) as file:
                for self.chunks in range(1, _CHUNKS + 1):
                    file.write(_CHUNK)
                    if self.chunks == 100:
                        self.read_on.set()
        except BrokenPipeError:
            pass

    def end(self) -> None:
        self._thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its manifest names `long`, and more files than are read side by side."""
    for number in range(200):
        (tmp_path / f"short-{number:03d}").write_bytes(b"x")
    (tmp_path / "long").write_bytes(b"")
    write_manifest(tmp_path, {})
    (tmp_path / "long").unlink()
    return tmp_path


@pytest.fixture
def python_hears_interrupts() -> Iterator[None]:
    """Commands that ran in this process before have left handlers of their own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_ends_a_manifest_check_at_once(
    folder: Path, python_hears_interrupts: None
) -> None:
    long = LongFile(folder / "long")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        long.read_on.wait()
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        check_manifest(folder)
    interrupter.join()
    long.end()
    assert long.chunks < _CHUNKS


def test_manifest_check_stops_reading_after_a_damaged_file(folder: Path) -> None:
    """`a-damaged` is compared first, and found out while `long` is being read."""
    manifest = folder / MANIFEST_NAME
    entry = '"a-damaged": {"bytes": 1, "checksum": "00"},'
    manifest.write_text(
        manifest.read_text().replace('"files": {', '"files": {' + entry)
    )
    os.mkfifo(folder / "a-damaged")
    long = LongFile(folder / "long")

    def feed_damaged() -> None:
        with (folder / "a-damaged").open("wb") as file:
            long.read_on.wait()
            file.write(b"x")

    feeder = threading.Thread(target=feed_damaged)
    feeder.start()
    with pytest.raises(DamagedFileError, match="a-damaged"):
        check_manifest(folder)
    feeder.join()
    long.end()
    assert long.chunks < _CHUNKS
