"""Suggests the right base URL to a client whose path shows that it was set wrong.
Pure."""

import difflib
import re
from collections.abc import Sequence

_ROUTES = (
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "models",
)
"""Routes that agents call, below `/v1`."""
_BASE_URLS = (
    "the base URL is http://HOST:PORT/s/KEY/v1, for Anthropic's clients http://HOST:PORT/s/KEY, without a "
    "slash at its end"
)
_GOOGLE_ROUTE = re.compile(
    r"models/.+:(generatecontent|streamgeneratecontent|counttokens)"
)


def hint(path: str) -> str:
    """Suggest a change for an unknown path; "" if it resembles none that agents
    call."""
    parts = [part for part in path.lower().split("/") if part]
    if parts[:1] == ["s"]:
        parts = parts[2:]
    while parts[:1] == ["v1"]:
        parts = parts[1:]
    google_route = _GOOGLE_ROUTE.search("/".join(parts))
    if google_route:
        return "the base URL of Google's clients is http://HOST:PORT/s/KEY, to which they add /v1beta"
    if not parts:
        return (
            f"this is no route but a base URL, to which clients add one ({_BASE_URLS})"
        )
    route = _nearest_route(parts)
    if not route:
        return ""
    return f"did you mean /v1/{route}? ({_BASE_URLS})"


def _nearest_route(parts: Sequence[str]) -> str:
    """Return the route with which the path ends, whatever is before it (`/api/v1`,
    `/v2`, a deployment), or else the one that the path misspells; "" if there is
    neither."""
    for begin in range(len(parts)):
        route = "/".join(parts[begin:])
        if route in _ROUTES:
            return route
    close = difflib.get_close_matches("/".join(parts), _ROUTES, n=1, cutoff=0.8)
    return close[0] if close else ""
