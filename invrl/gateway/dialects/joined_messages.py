"""Joins adjacent messages that are parts of one: clients send some replies back in
several pieces."""

from collections.abc import Sequence

from invrl.gateway.types import Message


class JoinedMessages:
    """Messages in their order. The parts of a message are joined once, when all of them
    are there: joining two at a time would copy the text so far for each part that
    follows."""

    def __init__(self) -> None:
        self._groups: list[list[Message]] = []
        """Parts of each message."""
        self._separators: list[str] = []
        """Text between the parts of each message."""
        self._has_content = False
        """Whether the last message has content so far."""
        self._has_calls = False
        """Whether the last message has calls so far."""

    @property
    def last_role(self) -> str:
        """Role of the last message; "" if there is none yet."""
        if not self._groups:
            return ""
        return self._groups[-1][-1].role

    def continues_reply(self, message: Message) -> bool:
        """Whether this message and the last one were one reply of the model: its text
        and its calls, which the client separates. Two texts are two replies, unless the
        first is empty."""
        if message.role != "assistant" or self.last_role != "assistant":
            return False
        if self._has_calls or message.tool_calls:
            return True
        return not self._has_content

    def add(self, message: Message) -> None:
        """Append a message."""
        self._groups.append([message])
        self._separators.append("")
        self._has_content = bool(message.content)
        self._has_calls = bool(message.tool_calls)

    def join(self, message: Message, separator: str = "") -> None:
        """Make this message a part of the last one, which must have the same role. All
        parts of one message have the same separator."""
        self._groups[-1].append(message)
        self._separators[-1] = separator
        if message.content:
            self._has_content = True
        if message.tool_calls:
            self._has_calls = True

    def messages(self) -> tuple[Message, ...]:
        messages = []
        for parts, separator in zip(self._groups, self._separators, strict=True):
            messages.append(_joined(parts, separator))
        return tuple(messages)


def _joined(parts: Sequence[Message], separator: str) -> Message:
    if len(parts) == 1:
        return parts[0]
    calls = []
    for part in parts:
        calls.extend(part.tool_calls)
    return Message(
        parts[0].role,
        content=separator.join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(calls),
    )
