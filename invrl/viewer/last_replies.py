"""The model's last reply in each rollout of one task, to compare them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from invrl.gateway.types import Message
from invrl.viewer.rollout_queries import MAX_ROWS
from invrl.viewer.viewed_run import ViewedRun

_MAX_TEXT = 2_000
"""Characters of a reply that are sent; the rollout's own page has all of them."""
_MAX_READ_BYTES = 64_000_000
"""Most bytes of messages that one response reads; later replies are left out."""
_LAST_TURNS = """
    SELECT session_id, messages FROM turns WHERE seq IN (
        SELECT MAX(seq) FROM turns WHERE session_id IN (SELECT value FROM json_each(?)) GROUP BY session_id)
    ORDER BY seq DESC
"""

Row = dict[str, Any]


def last_replies(
    run: ViewedRun, task: str, *, only: Collection[str] | None = None
) -> Row:
    """Return the body `{"replies": {session_id: {text, characters}}}` of the task's
    first 1,000 rollouts by step, without those that have no turn. `only`: restricts
    them. Raises RunStoreError or DamagedFileError if the store cannot be read."""
    order = {"sort": ["step"], "order": ["asc"], "limit": [str(MAX_ROWS)]}
    with run.queries() as queries:
        rows = queries.rollouts({"task": [task], **order})["rows"]
    session_ids = [
        row["session_id"] for row in rows if only is None or row["session_id"] in only
    ]
    replies: dict[str, Row] = {}
    read_bytes = 0
    with run.store.reading() as db:
        for session_id, encoded in db.execute(_LAST_TURNS, (json.dumps(session_ids),)):
            read_bytes += len(encoded)
            if read_bytes > _MAX_READ_BYTES:
                break
            text = _reply_text(encoded)
            replies[session_id] = {"text": text[:_MAX_TEXT], "characters": len(text)}
    return {"replies": replies}


def _reply_text(encoded: bytes) -> str:
    """Return the reply's content and calls, or its thinking if that is all. "" if it
    cannot be read."""
    try:
        messages = msgspec.json.decode(encoded, type=list[Message])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    if not messages:
        return ""
    reply = messages[-1]
    parts = [
        reply.content.strip(),
        *(f"{call.name}({call.arguments})" for call in reply.tool_calls),
    ]
    return "\n".join(part for part in parts if part) or reply.reasoning.strip()
