"""Turns of a live session as its environment sees them, with the reason of each fork
and advice."""

import asyncio
from dataclasses import asdict

from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.turns.matching.fork_changes import advice
from invrl.gateway.types import Change, ForkReason
from invrl.types.tasks import Json
from invrl.types.turns import Turn

_SHOWN_FIELDS = (
    "id",
    "parent_id",
    "fork_reason",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "constrained",
    "started_at",
    "finished_at",
)


async def overview(conversation: Conversation) -> list[dict[str, Json]]:
    """Return the fields of each turn. A forked turn has its reason, and a remedy. A
    turn that continues a reply which was out of tokens names it."""
    if conversation.restored:
        recorded_changes = await asyncio.to_thread(conversation.forest.changes)
        conversation.changes = recorded_changes | conversation.changes
        conversation.restored = False
    by_id = {turn.id: turn for turn in conversation.turns}
    lines: list[dict[str, Json]] = []
    for turn in conversation.turns:
        line: dict[str, Json] = {name: getattr(turn, name) for name in _SHOWN_FIELDS}
        line["delivered"] = turn.id in conversation.delivered
        line["sampled_tokens"] = len(turn.sampled_ids_T)
        line["segments"] = [
            asdict(segment) for segment in conversation.segments.get(turn.id, ())
        ]
        if turn.parent_id in by_id and by_id[turn.parent_id].finish_reason != "stop":
            line["keeps_interrupted_reply"] = turn.parent_id
        lines.append(line | _explanation(turn, conversation.changes.get(turn.id)))
    return lines


def _explanation(turn: Turn, change: Change | None) -> dict[str, Json]:
    """Explain why a turn forked, and what the user can do about it. For a turn that
    continues a reply which came back altered: how it was altered."""
    explanation: dict[str, Json] = {}
    if turn.fork_reason:
        explanation["advice"] = advice(ForkReason(turn.fork_reason), change)
    if change is not None:
        explanation["changed"] = {
            "message": change.message,
            "role": change.role,
            "part": change.part,
            "recorded": change.recorded,
            "sent": change.sent,
        }
    return explanation
