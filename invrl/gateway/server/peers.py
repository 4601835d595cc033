"""The other workers of one gateway, as one of them reaches them.

Each worker has an address of its own on the loopback interface, where it serves exactly what it serves on the
public port, for the same keys. Used by `forwarder.py` and `app.py`."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from invrl.gateway.registry import WorkerPlace

_log = logging.getLogger(__name__)
_ASK_S = 5.0


class Peers:
    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self._session: aiohttp.ClientSession | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        """Without deadlines of its own; one per event loop, made when it is first needed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
                timeout=aiohttp.ClientTimeout(),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            )
        return self._session

    async def metrics(self, own: Mapping[str, object], env_key: str) -> Mapping[str, object]:
        """Those of all workers as one; without those of a worker that does not answer."""
        others = [url for number, url in enumerate(self.place.urls) if number != self.place.number]
        found = await asyncio.gather(*(self._ask(url + "/metrics?worker=own", env_key) for url in others))
        return merged([own, *(each for each in found if each is not None)])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, url: str, env_key: str) -> Mapping[str, object] | None:
        headers, timeout = {"authorization": f"Bearer {env_key}"}, aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with self.http.get(url, headers=headers, timeout=timeout) as answer:
                return msgspec.json.decode(await answer.read(), type=dict[str, object])
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            _log.warning("metrics of %s: %r", url, error)
            return None


def merged(parts: Sequence[Mapping[str, Any]], *, reduce: Any = sum) -> Mapping[str, object]:
    """Numbers are added up, those below `loop_lag_ms` are the largest; of other values the first counts."""
    names = dict.fromkeys(name for part in parts for name in part)
    whole: dict[str, object] = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        if isinstance(values[0], Mapping):
            whole[name] = merged(values, reduce=max if name == "loop_lag_ms" else reduce)
        else:
            whole[name] = reduce(values) if isinstance(values[0], int | float) else values[0]
    return whole
