"""Suggests the right base URL to a client whose path shows that it was set wrong.
Pure."""

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


def hint(path: str) -> str:
    """Suggest a change for an unknown path; "" if it resembles none that agents
    call."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["s"]:
        parts = parts[2:]
    while parts[:1] == ["v1"]:
        parts = parts[1:]
    if not parts:
        return (
            f"this is no route but a base URL, to which clients add one ({_BASE_URLS})"
        )
    route = "/".join(parts)
    if route not in _ROUTES:
        return ""
    return f"did you mean /v1/{route}? ({_BASE_URLS})"
