"""Other workers of the same gateway, as one worker reaches them.

Each worker has a separate address on the loopback interface. There it serves the same
routes for the same keys as on the public port.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from invrl.gateway.registry import WorkerPlace
from invrl.host.network.http_connection import HttpConnections, HttpError

_log = logging.getLogger(__name__)
_METRICS_TIMEOUT_S = 5.0
_CONNECT_S = 30.0
_IDLE_S = 15.0


class Peers:
    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self._connections = [
            HttpConnections(url, idle_s=_IDLE_S, connect_s=_CONNECT_S)
            for url in place.urls
        ]

    def connections(self, worker: int) -> HttpConnections:
        """Return the connections to the worker with this number."""
        return self._connections[worker]

    async def metrics(
        self, own: Mapping[str, object], env_key: str
    ) -> Mapping[str, object]:
        """Return the metrics of all workers, merged. A worker that does not answer is
        left out."""
        numbers = range(len(self.place.urls))
        answers = await asyncio.gather(
            *(
                self._fetch_metrics(number, env_key)
                for number in numbers
                if number != self.place.number
            )
        )
        others = [answer for answer in answers if answer is not None]
        return merge_metrics([own, *others])

    def close(self) -> None:
        for connections in self._connections:
            connections.close()

    async def _fetch_metrics(
        self, worker: int, env_key: str
    ) -> Mapping[str, object] | None:
        path = "/metrics?worker=own"
        headers = {"authorization": f"Bearer {env_key}"}
        try:
            async with (
                asyncio.timeout(_METRICS_TIMEOUT_S),
                self.connections(worker).request("GET", path, headers, b"") as answer,
            ):
                return msgspec.json.decode(await answer.read(), type=dict[str, object])
        except (HttpError, TimeoutError, msgspec.DecodeError) as error:
            _log.warning("metrics of worker %d: %r", worker, error)
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
