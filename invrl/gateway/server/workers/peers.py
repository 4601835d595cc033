"""Other workers of the same gateway, as one worker reaches them.

Each worker has a separate address on the loopback interface. There it serves the same
routes for the same keys as on the public port.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from invrl.gateway.registry import WorkerPlace

_log = logging.getLogger(__name__)
_METRICS_TIMEOUT_S = 5.0


class Peers:
    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self._session: aiohttp.ClientSession | None = None

    @property
    def http(self) -> aiohttp.ClientSession:
        """Client without deadlines. It belongs to one event loop and is created on
        first use."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
                timeout=aiohttp.ClientTimeout(),
                auto_decompress=False,
                skip_auto_headers=(
                    "user-agent",
                    "accept",
                    "accept-encoding",
                    "content-type",
                ),
            )
        return self._session

    async def metrics(
        self, own: Mapping[str, object], env_key: str
    ) -> Mapping[str, object]:
        """Return the metrics of all workers, merged. A worker that does not answer is
        left out."""
        other_urls = [
            url
            for number, url in enumerate(self.place.urls)
            if number != self.place.number
        ]
        answers = await asyncio.gather(
            *(self._fetch_metrics(url, env_key) for url in other_urls)
        )
        others = [answer for answer in answers if answer is not None]
        return merge_metrics([own, *others])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fetch_metrics(
        self, worker_url: str, env_key: str
    ) -> Mapping[str, object] | None:
        url = worker_url + "/metrics?worker=own"
        headers = {"authorization": f"Bearer {env_key}"}
        timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
        try:
            async with self.http.get(url, headers=headers, timeout=timeout) as answer:
                return msgspec.json.decode(await answer.read(), type=dict[str, object])
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            _log.warning("metrics of %s: %r", url, error)
            return None


def merge_metrics(
    parts: Sequence[Mapping[str, Any]], *, reduce: Any = sum
) -> Mapping[str, object]:
    """Merge metrics. Numbers are added; those below `loop_lag_ms` become their maximum.
    Other values are the first part's."""
    names = dict.fromkeys(name for part in parts for name in part)
    merged: dict[str, object] = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        if isinstance(values[0], Mapping):
            inner_reduce = max if name == "loop_lag_ms" else reduce
            merged[name] = merge_metrics(values, reduce=inner_reduce)
        elif isinstance(values[0], int | float):
            merged[name] = reduce(values)
        else:
            merged[name] = values[0]
    return merged
