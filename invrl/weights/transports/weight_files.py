"""A version's weight files, as an engine opens them: on a disk shared with the trainer,
or fetched from the trainer over HTTP (`file_server.py`).

A fetched file is kept in a folder of TMPDIR until the load ends. It may be cut or
changed on the way: its reader compares it with the trainer's checksums, as with a file
on a shared disk.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from invrl.errors import WeightSyncError
from invrl.host.network.direct_connections import direct_client

_TRIES = 3
_SILENCE_S = 30.0
"""Seconds of silence of a server, before or after it accepts the connection."""


class FileSource(msgspec.Struct, frozen=True, kw_only=True):
    """Server of the trainer's version folders."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"FileSource(url={self.url!r})"


class ServedHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `StagedWeights.handle`, as JSON, when engines fetch the files that
    `handle` names."""

    source: FileSource
    handle: str


class WeightFiles:
    """Files on a disk that the engine shares with the trainer."""

    def path(self, folder: str, name: str) -> Path:
        """Return the path where the folder's file can be opened. Raises WeightSyncError
        if it cannot be fetched."""
        return Path(folder, name)

    def close(self) -> None:
        """Remove fetched files."""


class FetchedFiles(WeightFiles):
    """Files that are fetched on first use."""

    def __init__(
        self, source: FileSource, *, deadline_s: float, max_file_bytes: int
    ) -> None:
        """`deadline_s`: for all files together. A file larger than `max_file_bytes` is
        refused."""
        self._source = source
        self._max_file_bytes = max_file_bytes
        self._give_up_at = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._folder = TemporaryDirectory(prefix="invrl-weights-")
        self._http = direct_client(
            source.url,
            headers={"Authorization": f"Bearer {source.key}"},
            timeout_s=min(_SILENCE_S, deadline_s / _TRIES),
        )
        self._socket: socket.socket | None = None
        # httpx has a deadline for each read, and a head that trickles in takes any
        # number of them.
        self._alarm = threading.Timer(deadline_s, self._end_connection)
        self._alarm.daemon = True
        self._alarm.start()

    def path(self, folder: str, name: str) -> Path:
        version = Path(folder).name
        target = Path(self._folder.name, version, name)
        if target.exists():
            return target
        target.parent.mkdir(exist_ok=True)
        partial = target.with_name(f"{name}.partial")
        for remaining_tries in reversed(range(_TRIES)):
            self._check_deadline(f"{version}/{name}")
            try:
                self._fetch(f"/{version}/{name}", partial)
                break
            except (httpx.HTTPError, OSError) as error:
                self._check_deadline(f"{version}/{name}")
                if remaining_tries == 0:
                    reason = f"{version}/{name} was not fetched from {self._source.url}: {error!r}"
                    raise WeightSyncError(
                        f"{reason}, in the last of {_TRIES} tries"
                    ) from error
        partial.rename(target)
        return target

    def close(self) -> None:
        self._alarm.cancel()
        self._http.close()
        self._folder.cleanup()

    def _fetch(self, path: str, target: Path) -> None:
        """Fetch one file. Raises httpx.HTTPError or OSError if another try may help,
        else WeightSyncError."""
        with self._http.stream(
            "GET", path, extensions={"trace": self._note_socket}
        ) as answer:
            if answer.status_code != 200:
                raise WeightSyncError(
                    f"{self._source.url} answered {path} with {answer.status_code}: the version may be gone"
                )
            with target.open("wb") as file:
                for chunk in answer.iter_raw():
                    self._check_deadline(path[1:])
                    if file.tell() + len(chunk) > self._max_file_bytes:
                        reason = f"it has more than {self._max_file_bytes} bytes"
                        raise WeightSyncError(
                            f"{path[1:]} of {self._source.url} is refused: {reason}"
                        )
                    file.write(chunk)

    def _note_socket(self, event: str, details: Mapping[str, Any]) -> None:
        """Remember the connection's socket. httpcore calls this at each step of a
        request."""
        if event != "connection.connect_tcp.complete":
            return
        self._socket = details["return_value"].get_extra_info("socket")
        if time.monotonic() > self._give_up_at:
            self._end_connection()

    def _end_connection(self) -> None:
        """Shut the connection down, so that a read that waits for the server fails."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _check_deadline(self, path: str) -> None:
        """Raise WeightSyncError past the deadline. `path`: the file being fetched."""
        if time.monotonic() > self._give_up_at:
            reason = f"the weights were not fetched from {self._source.url} within {self._deadline_s:g} s"
            raise WeightSyncError(f"{reason}: {path} was not there")
