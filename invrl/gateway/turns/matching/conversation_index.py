"""Conversations of the recorded turns of a session by their digests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invrl.gateway.turns.matching.message_identity import digests, tools_digest
from invrl.gateway.turns.matching.recorded_replies import RecordedReplies
from invrl.gateway.types import MatchLevel, Message, Node, Tool


@dataclass(frozen=True, slots=True)
class _ConversationEnd:
    """End of a turn's conversation."""

    digest: bytes
    num_messages: int


class ConversationIndex:
    """Conversations of all nodes by their digests, at one level. `tools`: conversations
    with different tools are told apart. The index is updated when it is used, because
    most sessions need only the strictest level."""

    def __init__(
        self, level: MatchLevel, replies: RecordedReplies, *, tools: bool
    ) -> None:
        self.level = level
        self._replies = replies
        self._tools = tools
        self.nodes: dict[bytes, list[Node]] = {}
        """Nodes of each conversation."""
        self.answered: dict[bytes, Node] = {}
        """Latest node whose reply follows a conversation."""
        self.nodes_by_reply: dict[bytes, list[Node]] = {}
        """Nodes of each reply, whatever comes before it (if tools are not told
        apart)."""
        self._ends: dict[str, _ConversationEnd] = {}
        """Ends by turn."""
        self._message_digests: dict[str, list[bytes]] = {}
        """Digest of each single message that a turn adds, by turn; filled by
        `each_alone`."""

    def update(self, nodes: Sequence[Node]) -> None:
        """Update from all nodes of the forest, in the order in which they were
        added."""
        new_nodes = nodes[len(self._ends) :]  # a copy: more may be added meanwhile
        for node in new_nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        seed = b""
        num_earlier = 0
        if node.parent is not None:
            parent_end = self._ends[node.parent.turn.id]
            seed = parent_end.digest
            num_earlier = parent_end.num_messages
        elif self._tools:
            seed = tools_digest(node.tools)
        prefix_digests = digests(
            self._replies.at_level(node.messages, self.level),
            self.level,
            seed,
            earlier=num_earlier,
            calls=self._answered_calls(node),
            tools=node.tools,
        )
        before_reply = prefix_digests[-2]
        whole = prefix_digests[-1]
        self.nodes.setdefault(whole, []).append(node)
        self.answered[before_reply] = node
        num_messages = num_earlier + len(node.messages)
        self._ends[node.turn.id] = _ConversationEnd(
            digest=whole, num_messages=num_messages
        )
        if not self._tools:
            reply = self.alone(node.messages[-1], node.tools)
            self.nodes_by_reply.setdefault(reply, []).append(node)

    def alone(self, message: Message, tools: Sequence[Tool]) -> bytes:
        """Return the digest of a single message."""
        compared = self._replies.at_level([message], self.level)
        return digests(compared, self.level, tools=tools)[-1]

    def each_alone(self, node: Node) -> list[bytes]:
        """Return the digest of each single message of the node's conversation. They are
        kept: the requests of an agent that changes the beginning of its conversation
        each time are compared with many nodes."""
        path_digests: list[bytes] = []
        for step in node.path():
            step_digests = self._message_digests.get(step.turn.id)
            if step_digests is None:
                step_digests = [
                    self.alone(message, step.tools) for message in step.messages
                ]
                self._message_digests[step.turn.id] = step_digests
            path_digests += step_digests
        return path_digests

    def _answered_calls(self, node: Node) -> dict[str, str]:
        """Return the places of earlier calls that the node's messages answer; usually
        its parent made them."""
        missing = {message.tool_call_id for message in node.messages} - {""}
        places: dict[str, str] = {}
        ancestor = node.parent
        while missing and ancestor is not None:
            first = self._ends[ancestor.turn.id].num_messages - len(ancestor.messages)
            for position, message in enumerate(ancestor.messages, first):
                for number, call in enumerate(message.tool_calls):
                    if call.id in missing:
                        places[call.id] = f"{position}.{number}"
            missing -= places.keys()
            ancestor = ancestor.parent
        return places
