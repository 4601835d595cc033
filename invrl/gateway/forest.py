"""The token forest of one session: which recorded turn a request continues, and why one does not. Pure.

A node is a turn in its place; its conversation is what the turn's ids stand for. A request continues the
deepest node whose conversation is a prefix of the request's, at the strictest `MatchLevel` that reaches
that deep. Invariant: nodes never change, so requests of one session can run side by side; only turns whose
answer is whole become nodes. Used by `conversation.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Self

from invrl.gateway.message import MatchLevel, Message, Tool, digests, tools_digest
from invrl.types import Turn


class ForkReason(StrEnum):
    """Why a request departs from what was recorded."""

    NEW_CONVERSATION = "new_conversation"
    """Shares no sampled reply with an earlier one: an auxiliary call, or a parallel conversation."""
    HISTORY_EDITED = "history_edited"
    """Holds another text where a reply of ours was recorded."""
    COMPACTED = "compacted"
    """Holds a recorded reply, but less before it than there was."""
    TOOLS_CHANGED = "tools_changed"
    """The same conversation with other tools, which the template shows at its beginning."""
    THINKING_STRIPPED = "thinking_stripped"
    """The template drops earlier thinking from the history, and the run keeps to the template."""
    TEMPLATE_CHANGED = "template_changed"
    """The template renders the recorded part otherwise once messages follow it."""


ADVICE: Mapping[ForkReason, str] = {
    ForkReason.NEW_CONVERSATION: "expected of title, summary and sub-agent calls; open a child session for"
    " each sub-agent to keep their rewards apart",
    ForkReason.HISTORY_EDITED: "let the agent send replies back as it got them; if it only re-formats them,"
    " raise --match-level",
    ForkReason.COMPACTED: "expected of agents that shorten their history; raise their limit if the context"
    " length allows it",
    ForkReason.TOOLS_CHANGED: "offer the same tools in the same order in every request of a conversation",
    ForkReason.THINKING_STRIPPED: "set --keep-thinking to continue with the thinking that was sampled",
    ForkReason.TEMPLATE_CHANGED: "`invrl check-template MODEL` tells which messages the template re-writes",
}
"""What makes a fork go away, by its reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A recorded turn in its place."""

    turn: Turn
    parent: Node | None
    messages: tuple[Message, ...]
    """What the turn adds: the request's new messages, then the reply as it was returned."""
    closed: bool
    """The sampled ids end with the template's own end-of-turn token."""
    tools: tuple[Tool, ...] = ()
    """What the path's beginning was rendered with."""

    @property
    def raw(self) -> bool:
        """The prompt was rendered by no template (completions): its message is a piece of text."""
        return self.messages[0].role == "text"

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
    level: MatchLevel = MatchLevel.EXACT


class _Index:
    """The conversations of all nodes by their digests, at one level; `tools`: told apart by their tools. It
    follows when it is asked: most sessions need the strictest level alone."""

    def __init__(self, level: MatchLevel, *, tools: bool) -> None:
        self.level, self._tools = level, tools
        self.nodes: dict[bytes, Node] = {}
        """The latest node of each conversation."""
        self.answered: set[bytes] = set()
        """Conversations that a recorded reply follows."""
        self.reply_depth: dict[bytes, int] = {}
        """Of each reply by itself: the most messages that came before it (if tools are not told apart)."""
        self._ends: dict[str, tuple[bytes, int]] = {}
        """Where each turn's conversation ends: its digest, and how many messages it has."""

    def follow(self, nodes: Mapping[str, Node]) -> Self:
        for turn_id, node in islice(nodes.items(), len(self._ends), None):
            seed, earlier = b"", 0
            if node.parent is not None:
                seed, earlier = self._ends[node.parent.turn.id]
            elif self._tools:
                seed = tools_digest(node.tools)
            calls = self._calls_before(node)
            *_, before, whole = digests(node.messages, self.level, seed, earlier=earlier, calls=calls)
            length = earlier + len(node.messages)
            self.nodes[whole] = node
            self.answered.add(before)
            self._ends[turn_id] = whole, length
            if not self._tools:
                [_, alone] = digests(node.messages[-1:], self.level)
                self.reply_depth[alone] = max(self.reply_depth.get(alone, 0), length - 1)
        return self

    def _calls_before(self, node: Node) -> dict[str, str]:
        """The places of earlier calls that the node's messages answer: as a rule its parent's."""
        missing = {message.tool_call_id for message in node.messages} - {""}
        found, above = dict[str, str](), node.parent
        while missing and above is not None:
            first = self._ends[above.turn.id][1] - len(above.messages)
            for at, message in enumerate(above.messages, first):
                places = {call.id: f"{at}.{nth}" for nth, call in enumerate(message.tool_calls)}
                found |= {name: place for name, place in places.items() if name in missing}
            missing, above = missing - found.keys(), above.parent
        return found


class Forest:
    """The turns of one session. `level`: the most that a returned message may differ."""

    def __init__(self, level: MatchLevel = MatchLevel.WITHOUT_REASONING) -> None:
        self._indexes = [_Index(each, tools=True) for each in MatchLevel if each <= level]
        self._any_tools = _Index(level, tools=False)
        self._by_turn: dict[str, Node] = {}
        self._texts: dict[str, str] = {}
        """Of turns without a template: all that the ids of their paths stand for."""

    @property
    def size(self) -> int:
        return len(self._by_turn)

    def add(self, node: Node) -> None:
        """Its parent has been added before."""
        self._by_turn[node.turn.id] = node

    def turn(self, turn_id: str) -> Node | None:
        """The node of a turn; None if it is unknown or never became whole."""
        return self._by_turn.get(turn_id)

    def match_text(
        self, prompt: str | tuple[int, ...], shown: Callable[[Sequence[int]], str]
    ) -> tuple[Node | None, int]:
        """The node that a prompt without a template goes on from, and how much of the prompt its ids stand
        for: the most of all whose whole text, or ids, the prompt begins with. `shown`: ids as text."""
        found: tuple[Node | None, int] = (None, 0)
        for turn_id, node in self._by_turn.items():
            if not node.raw:
                continue
            sampled = node.turn.sampled_ids_T.tolist()
            if turn_id not in self._texts:
                before = self._texts[node.parent.turn.id] if node.parent else ""
                self._texts[turn_id] = before + node.messages[0].content + shown(sampled)
            if isinstance(prompt, str):
                size = len(self._texts[turn_id])
                begins = prompt.startswith(self._texts[turn_id])
            else:
                size, end = node.turn.prompt_tokens + len(sampled), tuple(sampled)
                begins = prompt[size - len(end) : size] == end and prompt[:size] == tuple(node.ids())
            if begins and size > found[1]:
                found = node, size
        return found

    def match(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Match:
        """The deepest node that `messages` continue. With a node, `fork` tells that a later reply on
        its path was replaced by the client."""
        found, depth, at_level = None, 0, MatchLevel.EXACT
        replies = [at + 1 for at, message in enumerate(messages) if message.role == "assistant"]
        seed = tools_digest(tools)
        for index in self._indexes if self.size and replies else ():
            prefixes = digests(messages, index.level, seed)
            nodes = index.follow(self._by_turn).nodes
            deepest = next((n for n in reversed(replies) if n > depth and prefixes[n] in nodes), None)
            if deepest is not None:
                found, depth, at_level = nodes[prefixes[deepest]], deepest, index.level
            if depth == replies[-1]:
                break
        fork = None
        if self.size and (found is None or depth != replies[-1]):
            fork = self._why(messages, replies, depth)
        return Match(node=found, depth=depth, fork=fork, level=at_level)

    def _why(self, messages: Sequence[Message], replies: Sequence[int], depth: int) -> ForkReason | None:
        """What became of the replies of ours behind `depth`."""
        index = self._any_tools.follow(self._by_turn)
        prefixes = digests(messages, index.level)
        unmatched = [n for n in replies if n > depth]
        if any(prefixes[n] in index.nodes for n in unmatched):
            return ForkReason.TOOLS_CHANGED
        if any(prefixes[n - 1] in index.answered for n in unmatched):
            return ForkReason.HISTORY_EDITED
        alone = [(n - 1, digests(messages[n - 1 : n], index.level)[-1]) for n in unmatched]
        if any(before < index.reply_depth.get(digest, 0) for before, digest in alone):
            return ForkReason.COMPACTED
        return ForkReason.NEW_CONVERSATION if depth == 0 else None
