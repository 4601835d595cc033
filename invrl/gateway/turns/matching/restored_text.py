"""Text that accompanied a tool call, in a request that has it elsewhere: agents keep
the calls of a reply in one message, and its text in a later one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from invrl.gateway.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredText:
    """A request with such texts restored to their calls."""

    messages: tuple[Message, ...]
    position: int
    """Index of the last of these calls in the request as sent."""
    recorded: Message
    """Recorded reply with these calls."""


def restore_text(
    messages: Sequence[Message], replies: Callable[[Message], Sequence[Message]]
) -> RestoredText | None:
    """Return the request with each text restored to its call, if the next text of the
    assistant begins with it; None if no text was moved. `replies` returns the recorded
    replies with the calls of a message, the likeliest first."""
    texts = [message.content for message in messages]
    moved_from: set[int] = set()
    last: tuple[int, Message] | None = None
    for position, message in enumerate(messages):
        if not _lacks_text(message):
            continue
        place = _next_text(messages, texts, position)
        if place is None:
            continue
        for reply in replies(message):
            text = reply.content.strip()
            rest = texts[place].strip()
            if text and rest.startswith(text):
                texts[position] = reply.content
                texts[place] = rest[len(text) :].lstrip()
                moved_from.add(place)
                last = (position, reply)
                break
    if last is None:
        return None
    kept = []
    for position, (message, text) in enumerate(zip(messages, texts, strict=True)):
        is_empty = not (text or message.tool_calls or message.reasoning)
        if position not in moved_from or not is_empty:
            kept.append(replace(message, content=text))
    position, recorded = last
    return RestoredText(messages=tuple(kept), position=position, recorded=recorded)


def is_text_moved(
    recorded: Sequence[Message], sent: Sequence[Message], position: int
) -> bool:
    """Whether the two differ at `position` because a text next to a call has left that
    message, or has come to it. Before it they are the same."""
    recorded_text = recorded[position].content.strip()
    sent_text = sent[position].content.strip()
    if recorded_text and _lacks_text(sent[position]):
        texts = [message.content for message in sent]
        place = _next_text(sent, texts, position, roles=("assistant", "user"))
        return place is not None and recorded_text in texts[place]
    if recorded_text not in sent_text:
        return False
    for earlier, message in zip(recorded[:position], sent[:position], strict=True):
        text = earlier.content.strip()
        if text and _lacks_text(message) and text in sent_text:
            return True
    return False


def _lacks_text(message: Message) -> bool:
    """Whether it is a reply with calls and no text."""
    return bool(message.tool_calls) and not message.content.strip()


def _next_text(
    messages: Sequence[Message],
    texts: Sequence[str],
    position: int,
    *,
    roles: Sequence[str] = ("assistant",),
) -> int | None:
    """Return the index of the next message with a text, ignoring results of tools; None
    if it has another role."""
    for place in range(position + 1, len(messages)):
        if messages[place].role == "tool" or not texts[place].strip():
            continue
        return place if messages[place].role in roles else None
    return None
