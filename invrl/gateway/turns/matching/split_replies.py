"""A recorded reply that comes back in several messages: agents keep a message for its
text and one for each of its calls, often with the call's result behind it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from invrl.gateway.turns.matching.message_identity import canonical_json
from invrl.gateway.types import Message, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedReplies:
    """Request with each split reply in one message again."""

    messages: tuple[Message, ...]
    positions: tuple[int, ...]
    """The position of each message in the request as it was sent; that of the first
    call of a reply that was split."""
    last: int
    """The position of the last reply that was split, in the request as it was sent."""
    recorded: Message
    """The recorded reply that it is."""


def made_calls(calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """Return the names and arguments of calls."""
    parts: list[str] = []
    for call in calls:
        parts += [call.name, canonical_json(call.arguments)]
    return tuple(parts)


def join_split_replies(
    messages: Sequence[Message], recorded_reply: Callable[[Message], Message | None]
) -> JoinedReplies | None:
    """Return the request with all calls of a reply in one message, in the place of the
    first of them; None if no reply was split. The results of calls keep their order:
    the model has made all of its calls before it is told the first result.
    `recorded_reply`: the recorded reply that begins with the first call of a
    message."""
    kept: list[Message] = []
    positions: list[int] = []
    last: tuple[int, Message] | None = None
    joined: set[int] = set()
    """The positions of messages that are part of an earlier one now."""
    for position, message in enumerate(messages):
        if position in joined:
            continue
        reply = recorded_reply(message)
        if reply is not None:
            parts = _find_parts(messages, position, reply)
            texts = [messages[part].content for part in parts]
            if parts and kept and _is_its_text(kept[-1], reply):
                texts.insert(0, kept.pop().content)
                positions.pop()
            if len(texts) > 1:
                joined.update(parts)
                last = (position, reply)
                text = next((text for text in texts if text.strip()), "")
                message = replace(message, content=text, tool_calls=reply.tool_calls)
        kept.append(message)
        positions.append(position)
    if last is None:
        return None
    return JoinedReplies(
        messages=tuple(kept), positions=tuple(positions), last=last[0], recorded=last[1]
    )


def _find_parts(
    messages: Sequence[Message], begin: int, reply: Message
) -> Sequence[int]:
    """Return the positions of the messages that have the calls of the reply, the first
    of them at `begin`. Empty unless they have exactly these calls, in their order, no
    other text than the reply's, and only results of these calls between them."""
    calls: list[ToolCall] = []
    parts: list[int] = []
    for position in range(begin, len(messages)):
        message = messages[position]
        if message.role == "tool":
            if all(message.tool_call_id != call.id for call in calls):
                return ()
            continue
        if not message.tool_calls or message.content.strip() not in reply.content:
            return ()
        calls += message.tool_calls
        parts.append(position)
        if len(calls) >= len(reply.tool_calls):
            break
    same_ids = [call.id for call in calls] == [call.id for call in reply.tool_calls]
    if not same_ids or made_calls(calls) != made_calls(reply.tool_calls):
        return ()
    return parts


def _is_its_text(message: Message, reply: Message) -> bool:
    """Whether the message has the text of the reply and nothing else."""
    text = message.content.strip()
    is_text = message.role == "assistant" and not message.tool_calls and text != ""
    return is_text and text == reply.content.strip()
