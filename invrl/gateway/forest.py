"""The token forest of a session: which recorded ids a new request continues. Pure.

A node is one turn: it stores only the tokens and the messages that it adds to its parent's. A request
continues the deepest node whose conversation (its path's messages, the reply last) is a prefix of the
request's. Invariant: nodes never change, so requests of one session can run side by side; only turns
whose answer is whole become nodes. Used by `conversation.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from invrl.types import Turn


class ForkReason(StrEnum):
    """Why a request departs from what was recorded."""

    NEW_CONVERSATION = "new_conversation"
    """Shares no sampled reply with an earlier one: an auxiliary call, or a parallel conversation."""
    HISTORY_EDITED = "history_edited"
    """Holds another text where a reply of ours was recorded."""
    THINKING_STRIPPED = "thinking_stripped"
    """The template drops earlier thinking from the history."""
    TEMPLATE_CHANGED = "template_changed"
    """The template renders the recorded part otherwise once messages follow it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the chat template sees it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A recorded turn in its place."""

    turn: Turn
    parent: Node | None
    messages: tuple[Message, ...]
    """What the turn adds: the request's new messages, then the reply as it was returned."""
    closed: bool
    """The sampled ids end with the template's own end-of-turn token."""

    def path(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def conversation(self) -> list[Message]:
        return [message for node in self.path() for message in node.messages]

    def ids(self) -> list[int]:
        """Exactly what the engine consumed and emitted along the path."""
        ids: list[int] = []
        for node in self.path():
            ids += [*node.turn.context_ids_T.tolist(), *node.turn.sampled_ids_T.tolist()]
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a request's messages meet the forest."""

    node: Node | None
    depth: int
    """Messages of the request that the node's conversation covers."""
    fork: ForkReason | None
    """None: a first conversation, or one that goes on from what was recorded."""


class Forest:
    """The turns of one session."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        """The latest node of each conversation, by the conversation's digest."""
        self._answered: set[bytes] = set()
        """Digests of conversations that a recorded reply follows."""
        self.size = 0

    def add(self, node: Node) -> None:
        digests = _digests(node.conversation())
        self._answered.add(digests[-2])
        self._nodes[digests[-1]] = node
        self.size += 1

    def match(self, messages: Sequence[Message]) -> Match:
        """The deepest node that `messages` continue. With a node, `fork` tells that a later reply on
        its path was replaced by the client."""
        digests = _digests(messages)
        edited = any(
            digests[at] in self._answered
            and messages[at].role == "assistant"
            and digests[at + 1] not in self._nodes
            for at in range(len(messages))
        )
        for depth in range(len(messages), 0, -1):
            node = self._nodes.get(digests[depth])
            if node is not None:
                return Match(node=node, depth=depth, fork=ForkReason.HISTORY_EDITED if edited else None)
        new = ForkReason.NEW_CONVERSATION if self.size else None
        return Match(node=None, depth=0, fork=ForkReason.HISTORY_EDITED if edited else new)


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """One digest per prefix of the conversation, the empty one first."""
    digest = b""
    digests = [digest]
    for message in messages:
        role, content = message.role.encode(), message.content.encode("utf-8", "surrogatepass")
        lengths = b"%d,%d," % (len(role), len(content))
        digest = hashlib.blake2b(digest + lengths + role + content, digest_size=16).digest()
        digests.append(digest)
    return digests
