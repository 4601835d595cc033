"""The routes on which clients sample: a request that each takes, and requests that it
refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
from running_gateway import ASK

FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {}},
}


@dataclass(frozen=True, kw_only=True)
class Route:
    """A sampling route, a request that it takes, and changes to it that it does not."""

    path: str
    good: dict[str, Any]
    limit: str
    """The field that bounds an answer's tokens."""
    refused: dict[str, dict[str, Any]]
    anthropic: bool = False

    def check(self, answer: httpx.Response, status: int, code: str = "") -> None:
        """`answer` is a refusal as this API's clients know it."""
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        if self.anthropic:
            kinds = {
                401: "authentication_error",
                404: "not_found_error",
                408: "timeout_error",
                413: "request_too_large",
            }
            body = answer.json()
            assert body.keys() == {"type", "error", "request_id"}
            assert body["type"] == "error"
            assert body["error"].keys() == {"type", "message"}
            assert body["error"]["type"] == kinds.get(status, "invalid_request_error")
            assert body["error"]["message"]
        else:
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            kinds = {401: "authentication_error", 429: "rate_limit_error"}
            assert error["type"] == kinds.get(status, "invalid_request_error")
            assert error["message"]
            assert code in ("", error["code"])


CHAT = {"model": "tiny", "messages": [ASK]}


CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": FUNCTION["parameters"]}


NO_TOOL = {"type": "function", "function": {"name": "other"}}


ROUTES = [
    Route(
        path="/chat/completions",
        good=CHAT,
        limit="max_tokens",
        refused={
            "unknown tool": {
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": NO_TOOL,
            },
            "unknown tool choice": {"tool_choice": "sometimes"},
            "wrong type": {"messages": 1},
            "negative n": {"n": -1},
            "absurd n": {"n": 10**30},
        },
    ),
    Route(
        path="/completions",
        good={"model": "tiny", "prompt": "What is 12*13?"},
        limit="max_tokens",
        refused={
            "wrong type": {"prompt": {}},
            "negative n": {"n": -1},
            "absurd n": {"n": 10**30},
        },
    ),
    Route(
        path="/responses",
        good={"model": "tiny", "input": "What is 12*13?"},
        limit="max_output_tokens",
        refused={
            "unknown tool": {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "other"},
            },
            "unknown tool choice": {"tool_choice": "sometimes"},
            "wrong type": {"input": 1},
            "no such sampling": {"n": -1},
        },
    ),
    Route(
        path="/messages",
        good={"model": "tiny", "max_tokens": 8, "messages": [ASK]},
        limit="max_tokens",
        refused={
            "unknown tool": {
                "tools": [CLAUDE_TOOL],
                "tool_choice": {"type": "tool", "name": "other"},
            },
            "unknown tool choice": {"tool_choice": {"type": "sometimes"}},
            "wrong type": {"messages": 1},
            "no such sampling": {"n": -1},
        },
        anthropic=True,
    ),
    Route(
        path="/messages/count_tokens",
        good={"model": "tiny", "messages": [ASK]},
        limit="",
        refused={
            "unknown tool choice": {"tool_choice": {"type": "sometimes"}},
            "wrong type": {"messages": 1},
            "no such sampling": {"n": -1},
        },
        anthropic=True,
    ),
]
