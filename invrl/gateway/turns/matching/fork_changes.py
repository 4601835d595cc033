"""Difference between a request and the recording, described for the user: the first
difference, and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invrl.gateway.turns.matching.message_identity import (
    canonical_json,
    is_same_message,
    tools_digest,
)
from invrl.gateway.types import ADVICE, Change, ForkReason, MatchLevel, Message, Tool

_EXCERPT = 120
"""Characters that a `Change` shows of each side."""
_EXCERPT_BEFORE = 24
"""Number of them before the first character that differs."""


def advice(reason: ForkReason, change: Change | None) -> str:
    """Say what the user can do about this fork."""
    if (
        reason in (ForkReason.HISTORY_EDITED, ForkReason.TEXT_MOVED)
        and change is not None
        and change.level is not None
    ):
        return f"--gateway.match-level {change.level.name.lower()} takes this reply for the one that was sampled"
    return ADVICE[reason]


def reply_calls(message: Message) -> tuple[tuple[str, str], ...]:
    """Return the ids and names of the message's tool calls. At `MatchLevel.REWRITTEN`
    they identify a reply."""
    return tuple((call.id, call.name) for call in message.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The part in which two conversations differ, between an equal beginning and an
    equal end."""

    first: int
    recorded: Sequence[Message]
    sent: Sequence[Message]

    @property
    def size(self) -> int:
        return len(self.recorded) + len(self.sent)


def differing_part(
    recorded: Sequence[Message],
    recorded_digests: Sequence[bytes],
    sent: Sequence[Message],
    sent_digests: Sequence[bytes],
) -> Difference:
    """Return the part in which two conversations differ. The digests are those of their
    single messages."""
    first = common_items(recorded_digests, sent_digests)
    num_same_at_end = common_items(
        recorded_digests[first:][::-1], sent_digests[first:][::-1]
    )
    return Difference(
        first=first,
        recorded=recorded[first : len(recorded) - num_same_at_end],
        sent=sent[first : len(sent) - num_same_at_end],
    )


def message_change(
    position: int,
    recorded: Message,
    sent: Message,
    session_level: MatchLevel,
    tools: Sequence[Tool],
) -> Change:
    """Describe how a message differs from the recorded one in its position, compared at
    `session_level`."""
    part, recorded_text, sent_text = _first_differing_part(recorded, sent)
    recorded_excerpt, sent_excerpt = _excerpts(recorded_text, sent_text)
    return Change(
        message=position,
        role=sent.role,
        part=part,
        recorded=recorded_excerpt,
        sent=sent_excerpt,
        level=_same_reply_level(recorded, sent, session_level, tools),
    )


def messages_change(difference: Difference) -> Change:
    """Return the change in which messages were removed or inserted."""
    first_message = difference.sent[0] if difference.sent else difference.recorded[0]
    return Change(
        message=difference.first,
        role=first_message.role,
        part="messages",
        recorded=_describe(difference.recorded),
        sent=_describe(difference.sent),
    )


def tools_change(recorded: Sequence[Tool], sent: Sequence[Tool]) -> Change:
    """Describe how the tools of a request differ from those with which its conversation
    began."""
    recorded_text = ", ".join(tool.name for tool in recorded)
    sent_text = ", ".join(tool.name for tool in sent)
    if recorded_text == sent_text:
        position = _first_changed_tool(recorded, sent)
        recorded_text = _tool_text(recorded[position])
        sent_text = _tool_text(sent[position])
    recorded_excerpt, sent_excerpt = _excerpts(recorded_text, sent_text)
    return Change(
        message=0, role="", part="tools", recorded=recorded_excerpt, sent=sent_excerpt
    )


def common_items(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the equal items at the beginning of both sequences."""
    shorter = min(len(first), len(second))
    for position in range(shorter):
        if first[position] != second[position]:
            return position
    return shorter


def common_characters(first: str, second: str) -> int:
    """Count the equal characters at the beginning of both texts. By bisection: a prompt
    may have millions of characters, and a loop over them would stop the event loop for
    a second."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_handoff(
    recorded: Sequence[Message], sent: Sequence[Message], *, other_tools: bool
) -> bool:
    """Whether the differing messages are system prompts of two agents, or one agent has
    none. Two prompts with most of their text in common are one agent's, edited, unless
    it has `other_tools` too: agents of one team often share a preamble."""
    roles = {message.role for message in (*recorded, *sent)}
    if roles != {"system"} or max(len(recorded), len(sent)) > 1:
        return False
    if other_tools or not (recorded and sent):
        return True
    old = recorded[0].content
    new = sent[0].content
    common_begin = common_characters(old, new)
    common_end = common_characters(old[common_begin:][::-1], new[common_begin:][::-1])
    return 2 * (common_begin + common_end) < max(len(old), len(new))


def _first_differing_part(recorded: Message, sent: Message) -> tuple[str, str, str]:
    """Return the name of the first part that differs, and its text in both messages.
    Whitespace around the content counts only if nothing else differs."""
    parts = (
        ("role", recorded.role, sent.role),
        ("content", recorded.content.strip(), sent.content.strip()),
        ("tool_calls", _calls_text(recorded), _calls_text(sent)),
        ("tool_call_ids", _call_ids_text(recorded), _call_ids_text(sent)),
        ("tool_call_id", recorded.tool_call_id, sent.tool_call_id),
        ("reasoning", recorded.reasoning, sent.reasoning),
    )
    for part, recorded_text, sent_text in parts:
        if recorded_text != sent_text:
            return part, recorded_text, sent_text
    return "content", recorded.content, sent.content


def _calls_text(message: Message) -> str:
    return ", ".join(
        f"{call.name}({canonical_json(call.arguments)})" for call in message.tool_calls
    )


def _call_ids_text(message: Message) -> str:
    return ", ".join(call.id for call in message.tool_calls)


def _same_reply_level(
    recorded: Message, sent: Message, session_level: MatchLevel, tools: Sequence[Tool]
) -> MatchLevel | None:
    """Return the lowest level above the session's at which the two count as the same
    reply."""
    for level in MatchLevel:
        if level > session_level and _is_same_reply(recorded, sent, level, tools):
            return level
    return None


def _is_same_reply(
    recorded: Message, sent: Message, level: MatchLevel, tools: Sequence[Tool]
) -> bool:
    if (
        level is MatchLevel.REWRITTEN
        and recorded.tool_calls
        and reply_calls(recorded) == reply_calls(sent)
    ):
        return True
    return is_same_message(recorded, sent, level, tools)


def _excerpts(recorded: str, sent: str) -> tuple[str, str]:
    """Return the text around the first differing character of both texts."""
    begin = max(common_characters(recorded, sent) - _EXCERPT_BEFORE, 0)
    return _excerpt(recorded, begin), _excerpt(sent, begin)


def _excerpt(text: str, begin: int) -> str:
    excerpt = text[begin : begin + _EXCERPT]
    if begin > 0:
        excerpt = "…" + excerpt
    if begin + _EXCERPT < len(text):
        excerpt += "…"
    return excerpt


def _describe(messages: Sequence[Message]) -> str:
    if not messages:
        return "0 messages"
    first = messages[0]
    return f"{len(messages)} messages, the first is {first.role}: {first.content[:_EXCERPT]}"


def _first_changed_tool(recorded: Sequence[Tool], sent: Sequence[Tool]) -> int:
    for position, (recorded_tool, sent_tool) in enumerate(
        zip(recorded, sent, strict=False)
    ):
        if tools_digest([recorded_tool]) != tools_digest([sent_tool]):
            return position
    return 0


def _tool_text(tool: Tool) -> str:
    return f"{tool.name}: {tool.description} {tool.parameters}"
