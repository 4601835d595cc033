"""Counts of answered requests of one worker, by route and status, and their durations.

Invariant: a route is named by its template, so neither a session's id nor a key becomes
the name of a count.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BOUNDS_S = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Upper bounds of the histogram's buckets, in seconds. One more bucket has longer
durations."""
UNKNOWN_ROUTE = "other"
"""Name of every path that is no route."""
CLIENT_LEFT = 499
"""Status of a request whose client left before an answer began."""
_INTERNAL_ERROR = 500
_KEY_PREFIX = "/s/{key}"


@dataclass(slots=True)
class _RouteCounts:
    statuses: Counter[int] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0


class RequestCounts:
    """Counts since the start of this worker."""

    def __init__(self) -> None:
        self._routes: dict[str, _RouteCounts] = {}

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a request. `seconds` are from the request's head to the last byte of
        its answer."""
        counts = self._routes.get(route)
        if counts is None:
            counts = self._routes[route] = _RouteCounts()
        counts.statuses[status] += 1
        counts.buckets[bisect_left(BOUNDS_S, seconds)] += 1
        counts.seconds += seconds

    def summary(self) -> Mapping[str, Mapping[str, object]]:
        """Return, by route, `statuses` (answers by status), `buckets` (cumulative
        counts by upper bound as text; the last is "+Inf") and the total `seconds`."""
        summary: dict[str, Mapping[str, object]] = {}
        for route, counts in self._routes.items():
            buckets: dict[str, int] = {}
            num_requests = 0
            for bound, count in zip(
                (*map(str, BOUNDS_S), "+Inf"), counts.buckets, strict=True
            ):
                num_requests += count
                buckets[bound] = num_requests
            statuses = {str(status): count for status, count in counts.statuses.items()}
            summary[route] = {
                "statuses": statuses,
                "buckets": buckets,
                "seconds": counts.seconds,
            }
        return summary


class CountedApp:
    """An ASGI app whose requests are counted. `route_of` names the route of a completed
    request."""

    def __init__(
        self, app: ASGIApp, *, counts: RequestCounts, route_of: Callable[[Scope], str]
    ) -> None:
        self._app = app
        self._counts = counts
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at = time.perf_counter()
        status = CLIENT_LEFT

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if status == CLIENT_LEFT:
                status = _INTERNAL_ERROR  # the status that the outer layer sends
            raise
        finally:
            self._counts.count(
                self._route_of(scope), status, time.perf_counter() - began_at
            )


def route_names(routes: Sequence[BaseRoute]) -> Callable[[Scope], str]:
    """Return a function that names the route of a completed request: its path, without
    the prefix that holds a key; `UNKNOWN_ROUTE` if there is none. FastAPI notes the
    route in the scope, Starlette only the handler: `routes` are those of Starlette. Of
    several routes with one handler the first gives the name."""
    names: dict[object, str] = {}
    for route in routes:
        if isinstance(route, Route):
            names.setdefault(route.endpoint, route.path.removeprefix(_KEY_PREFIX))

    def route_name(scope: Scope) -> str:
        route = scope.get("route")
        if isinstance(route, Route):
            return route.path
        return names.get(scope.get("endpoint"), UNKNOWN_ROUTE)

    return route_name
