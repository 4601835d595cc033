"""Replies that a session has sampled, by their calls and their texts, and a request with
its replies as they were recorded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invrl.gateway.turns.matching.fork_changes import reply_calls
from invrl.gateway.turns.matching.restored_text import restore_text
from invrl.gateway.turns.matching.split_replies import join_split_replies, made_calls
from invrl.gateway.types import MatchLevel, Message, Node

MAX_CANDIDATES = 32
"""Maximum number of recorded replies of one text that are compared with a departing
request; the newest ones."""


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """A request with replies as they were recorded. `position`: of the last of them
    that came back otherwise, in the request as it was sent; `recorded`: that reply."""

    messages: tuple[Message, ...]
    position: int
    recorded: Message


class RecordedReplies:
    """Sampled replies that are recognised by more than their text: those with tool
    calls by the ids and names of their calls, those that a stop string ended by their
    text with that string."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[tuple[str, str], ...], Node] = {}
        self._stopped: dict[str, Message] = {}
        self._with_text: dict[tuple[str, ...], list[Message]] = {}
        """Replies that have a text in addition to their calls, by these calls without
        their ids."""
        self._by_first_call: dict[str, Message] = {}
        """Replies with calls by the id of their first call."""

    def add(self, node: Node) -> None:
        reply = node.messages[-1]
        if reply.tool_calls:
            self._nodes[reply_calls(reply)] = node
            self._by_first_call[reply.tool_calls[0].id] = reply
            if reply.content:
                made = made_calls(reply.tool_calls)
                self._with_text.setdefault(made, []).append(reply)
        elif node.stop:
            self._stopped[(reply.content + node.stop).strip()] = reply

    def node(self, message: Message) -> Node | None:
        """Return the turn that made exactly the message's calls."""
        if message.role != "assistant" or not message.tool_calls:
            return None
        return self._nodes.get(reply_calls(message))

    def with_text(self, message: Message) -> list[Message]:
        """Return the replies with a text in addition to the calls of the message: first
        the one with the ids of these calls, then the newest."""
        replies = self._with_text.get(made_calls(message.tool_calls), [])
        newest_first = replies[: -MAX_CANDIDATES - 1 : -1]
        node = self.node(message)
        if node is not None:
            newest_first.insert(0, node.messages[-1])
        return newest_first

    def beginning_with(self, message: Message) -> Message | None:
        """The reply whose first call is the first call of the message."""
        if not message.tool_calls:
            return None
        return self._by_first_call.get(message.tool_calls[0].id)

    def at_level(
        self, messages: Sequence[Message], level: MatchLevel
    ) -> Sequence[Message]:
        """Return the messages to compare at a level. At `REWRITTEN` a recorded reply
        replaces each message that has its calls, or its text followed by the stop
        string."""
        if level is not MatchLevel.REWRITTEN or not (self._nodes or self._stopped):
            return messages
        return [self._recorded(message) for message in messages]

    def _recorded(self, message: Message) -> Message:
        """Return the recorded reply that the message is; the message itself if it is
        none."""
        node = self.node(message)
        if node is not None:
            return node.messages[-1]
        if message.role != "assistant" or message.tool_calls:
            return message
        return self._stopped.get(message.content.strip(), message)

    def restored(self, messages: Sequence[Message]) -> RestoredRequest | None:
        """Return the request with its replies as they were recorded, where they were split or
        their text was moved; None where they were not."""
        joined = join_split_replies(messages, self.beginning_with)
        mended: RestoredRequest | None = None
        if joined is not None:
            messages = joined.messages
            mended = RestoredRequest(messages, joined.last, joined.recorded)
        put_back = restore_text(messages, self.with_text)
        if put_back is not None:
            position = put_back.position
            if joined is not None:
                position = joined.positions[position]
            mended = RestoredRequest(put_back.messages, position, put_back.recorded)
        return mended
