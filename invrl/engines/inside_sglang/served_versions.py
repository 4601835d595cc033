"""The versions of an adapter that an engine holds, and which of them a request gets.

A request gets the newest version when it arrives, and keeps it until it ends. A version
is unloaded by the first load that finds no request of it, neither here nor in SGLang: a
request whose client has left may still be running there, and an unload under it would
kill the engine. A load that finds the engine full ends the requests of the oldest
version with an abort. The gateway continues them, and they get the newest version.

Pure over `Adapters`. Use from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

_ABORT_DEADLINE_S = 30.0
_POLL_INTERVAL_S = 0.02
_HEALTH_QUESTION_S = 2.0
"""Longer than SGLang's own question whether an engine makes tokens keeps a version."""


class AdapterError(Exception):
    """A version cannot be loaded or unloaded, or is not there."""


class Adapters(Protocol):
    """The adapters in an engine, by version. Calls raise AdapterError."""

    max_versions: int
    """Versions that there is memory for."""

    def loaded(self) -> list[str]: ...
    async def load(self, version: str, folder: str) -> Mapping[str, str]:
        """Load a version. Returns checksums of what the engine then holds of it."""
        ...

    async def checksums(self, version: str) -> Mapping[str, str]: ...
    async def unload(self, version: str) -> None: ...
    def running(self, version: str) -> int:
        """Return the number of a version's requests that have not ended."""
        ...

    def abort(self, version: str) -> None:
        """Abort the requests of a version."""
        ...


class ServedVersions:
    """The versions in an engine, and the requests that use them."""

    def __init__(self) -> None:
        self.newest: str | None = None
        """Version that new requests get. None: they get the model without an
        adapter."""
        self._num_requests: Counter[str] = Counter()
        self._loading = asyncio.Lock()

    @contextmanager
    def request(self) -> Iterator[str | None]:
        """Yield the version of a request, which ends with the block."""
        version = self.newest
        if version is None:
            yield None
            return
        self._num_requests[version] += 1
        try:
            yield version
        finally:
            self._num_requests[version] -= 1

    async def load(
        self,
        adapters: Adapters,
        version: str,
        folder: str,
        expected: Mapping[str, str],
    ) -> Mapping[str, str]:
        """Load a version beside the newest, and return its checksums. A version that is
        held with other checksums than those expected is replaced, unless it is the
        newest. Raises AdapterError."""
        async with self._loading:
            if version in adapters.loaded():
                held = await adapters.checksums(version)
                if held == expected:
                    return held
                if version == self.newest:
                    raise AdapterError(
                        f"version {version} is served, with other tensors"
                    )
                await self._remove(adapters, version)
            await self._make_room(adapters)
            return await adapters.load(version, folder)

    def serve(self, adapters: Adapters, version: str) -> None:
        """Give this version to the requests that arrive from now on. If that goes back
        to an older version, abort the requests of the version that is left. Raises
        AdapterError."""
        if version not in adapters.loaded():
            raise AdapterError(f"version {version} is not loaded")
        left = self.newest
        self.newest = version
        if left is not None and int(version) < int(left):
            adapters.abort(left)

    async def _make_room(self, adapters: Adapters) -> None:
        """Unload the versions that no request uses, except the newest. If that leaves
        no room for one more, unload the oldest until there is."""
        patience_ends_at = time.monotonic() + _HEALTH_QUESTION_S
        while True:
            older = [version for version in adapters.loaded() if version != self.newest]
            for version in older:
                if not self._num_unended(adapters, version):
                    await self._remove(adapters, version)
            if len(adapters.loaded()) < adapters.max_versions:
                return
            if time.monotonic() > patience_ends_at:
                break
            await asyncio.sleep(_POLL_INTERVAL_S)
        for version in sorted(older, key=int):
            if len(adapters.loaded()) < adapters.max_versions:
                return
            if version in adapters.loaded():
                await self._remove(adapters, version)

    async def _remove(self, adapters: Adapters, version: str) -> None:
        """End the requests of a version, and unload it. Raises AdapterError."""
        deadline = time.monotonic() + _ABORT_DEADLINE_S
        while num_unended := self._num_unended(adapters, version):
            adapters.abort(version)
            if time.monotonic() > deadline:
                raise AdapterError(
                    f"{num_unended} requests of version {version} have not ended "
                    f"{_ABORT_DEADLINE_S:g} s after their abort"
                )
            await asyncio.sleep(_POLL_INTERVAL_S)
        await adapters.unload(version)
        del self._num_requests[version]

    def _num_unended(self, adapters: Adapters, version: str) -> int:
        """Return the number of a version's requests that are not known to have ended:
        some are only here (not yet in SGLang), others only there."""
        return max(self._num_requests[version], adapters.running(version))
