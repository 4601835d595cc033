"""The files of a version of the weights, as an engine opens them: on a disk that it shares with the trainer,
or fetched from the trainer over HTTP (`file_server.py`).

A fetched file is kept in a folder of TMPDIR until the load ends. On the way it may be cut or changed: whoever
reads it compares what it has read with the trainer's checksums, as with a file of a shared disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec

from invrl.errors import WeightSyncError

_TRIES = 3
_SILENCE_S = 30.0
"""Of a server that has accepted the connection, or has not."""


class FileSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer serves the folders of its versions."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"FileSource(url={self.url!r})"


class ServedHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `StagedWeights.handle`, as JSON, where engines fetch what `handle` names."""

    source: FileSource
    handle: str


class WeightFiles:
    """Files of a disk that the engine shares with the trainer."""

    def path(self, folder: str, name: str) -> Path:
        """Where the file of the folder can be opened. Raises WeightSyncError if it cannot be fetched."""
        return Path(folder, name)

    def close(self) -> None:
        """Removes what was fetched."""


class FetchedFiles(WeightFiles):
    """Files that are fetched when they are asked for, once each."""

    def __init__(self, source: FileSource, *, deadline_s: float) -> None:
        """`deadline_s`: for all of them together."""
        self._source = source
        self._give_up_at = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._folder = TemporaryDirectory(prefix="invrl-weights-")
        self._http = httpx.Client(
            base_url=source.url,
            headers={"Authorization": f"Bearer {source.key}"},
            timeout=min(_SILENCE_S, deadline_s / _TRIES),
            trust_env=False,
        )

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
                if remaining_tries == 0:
                    reason = f"{version}/{name} was not fetched from {self._source.url}: {error!r}"
                    raise WeightSyncError(f"{reason}, in the last of {_TRIES} tries") from error
        partial.rename(target)
        return target

    def close(self) -> None:
        self._http.close()
        self._folder.cleanup()

    def _fetch(self, path: str, target: Path) -> None:
        """Raises httpx.HTTPError or OSError where another try may help, else WeightSyncError."""
        with self._http.stream("GET", path) as answer:
            if answer.status_code != 200:
                raise WeightSyncError(
                    f"{self._source.url} answered {path} with {answer.status_code}: the version may be gone"
                )
            with target.open("wb") as file:
                for chunk in answer.iter_raw():
                    self._check_deadline(path[1:])
                    file.write(chunk)

    def _check_deadline(self, path: str) -> None:
        """Raises WeightSyncError. `path`: of the file that is being fetched."""
        if time.monotonic() > self._give_up_at:
            reason = f"the weights were not fetched from {self._source.url} within {self._deadline_s:g} s"
            raise WeightSyncError(f"{reason}: {path} was not there")
