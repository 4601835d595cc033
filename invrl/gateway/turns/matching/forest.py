"""The token forest of one session: finds the recorded turn that a request continues, or
the reason of a fork. Pure.

A node is a recorded turn; its conversation is the messages that the ids of its path
stand for. A request continues the deepest node whose conversation is a prefix of the
request's, at the strictest `MatchLevel` that reaches that depth. Invariants: nodes
never change, so requests of one session can run concurrently; only turns whose answer
is complete become nodes; only one thread at a time matches, and nodes may be added
meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from invrl.gateway.turns.matching.conversation_index import ConversationIndex
from invrl.gateway.turns.matching.fork_changes import (
    Difference,
    differing_part,
    is_handoff,
    message_change,
    messages_change,
    reply_calls,
    tools_change,
)
from invrl.gateway.turns.matching.message_identity import (
    digests,
    is_same_message,
    tools_digest,
)
from invrl.gateway.turns.matching.path_texts import PathTexts, RawPrompt
from invrl.gateway.turns.matching.recorded_replies import (
    MAX_CANDIDATES,
    RecordedReplies,
)
from invrl.gateway.turns.matching.restored_text import is_text_moved
from invrl.gateway.types import (
    Change,
    Decode,
    ForkReason,
    MatchLevel,
    Message,
    Node,
    Tool,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Meeting point of a request's messages and the forest."""

    node: Node | None
    depth: int
    """Number of messages of the request that the node's conversation covers."""
    fork: ForkReason | None
    """None if this is a first conversation, or one that continues the recording."""
    new: tuple[Message, ...] = ()
    """Messages after `depth`. Results name the calls that they answer by our ids, even
    if the client has given the calls other ids."""
    level: MatchLevel = MatchLevel.EXACT
    change: Change | None = None
    """Departure of a forking request, or, for a match at `REWRITTEN`, how the last
    altered reply came back."""
    kept: Node | None = None
    """Turn whose interrupted reply the request keeps, the reason of its fork."""

    @property
    def continues(self) -> bool:
        """Whether all replies in the request are on the node's path."""
        return self.node is not None and all(
            message.role != "assistant" for message in self.new
        )


@dataclass(frozen=True, slots=True)
class _Fork:
    """Departure of a request from the recording."""

    reason: ForkReason | None
    change: Change | None = None
    kept: Node | None = None


_NO_FORK = _Fork(None)
"""The request continues a recorded turn and adds replies where none was recorded, for
example ones that its author wrote. It replaces nothing."""


class Forest:
    """Turns of one session. `level` is the maximum difference of a returned message.
    `delivered` are ids of the turns whose answer reached the client; None if
    unknown."""

    def __init__(
        self,
        level: MatchLevel = MatchLevel.REWRITTEN,
        delivered: Collection[str] | None = None,
    ) -> None:
        self._level = level
        self._delivered = delivered
        self._replies = RecordedReplies()
        self._indexes = [
            ConversationIndex(index_level, self._replies, tools=True)
            for index_level in MatchLevel
            if index_level <= level
        ]
        self._any_tools = ConversationIndex(level, self._replies, tools=False)
        self._by_turn: dict[str, Node] = {}
        self._nodes: list[Node] = []
        """All nodes, in the order in which they were added."""
        self._interrupted: list[Node] = []
        """Turns whose reply was cancelled or out of tokens."""
        self.characters = 0
        """Characters of all messages that the turns add."""
        self._path_texts = PathTexts()

    @property
    def size(self) -> int:
        return len(self._by_turn)

    def add(self, node: Node) -> None:
        """Add a node, after its parent. If another thread is matching, it sees the node
        or does not."""
        self._by_turn[node.turn.id] = node
        self._nodes.append(node)
        self.characters += sum(message.characters for message in node.messages)
        self._replies.add(node)
        if node.turn.finish_reason != "stop":
            self._interrupted.append(node)

    def add_cancelled(self, node: Node) -> None:
        """Add a turn that no request continues. It explains a request that has its
        reply."""
        self._interrupted.append(node)

    def turn(self, turn_id: str) -> Node | None:
        """Return the node of a turn; None if the turn is unknown or never became
        complete."""
        return self._by_turn.get(turn_id)

    def changes(self) -> dict[str, Change]:
        """Return, by turn, how each turn departed from the recording before it.
        Recomputed from the nodes, which takes as long for each of them as matching a
        departing request."""
        earlier = Forest(self._level, self._delivered)
        for node in self._interrupted:
            if node.turn.finish_reason == "abort":
                earlier.add_cancelled(node)
        changes: dict[str, Change] = {}
        for node in tuple(self._nodes):
            if node.turn.fork_reason and not node.raw:
                messages: list[Message] = []
                if node.parent is not None:
                    messages = node.parent.conversation()
                messages.extend(node.messages[:-1])
                change = earlier.match(messages, node.tools).change
                if change is not None:
                    changes[node.turn.id] = change
            earlier.add(node)
        return changes

    def match_text(self, prompt: RawPrompt, decode: Decode) -> tuple[Node | None, int]:
        """Return the node that a prompt without a template continues, and how much of
        the prompt it covers. It is the longest one whose whole text, or ids, the prompt
        begins with."""
        longest: Node | None = None
        longest_size = 0
        for node in tuple(self._nodes):
            size = self._path_texts.covered(prompt, node, decode) if node.raw else 0
            if size > longest_size:
                longest = node
                longest_size = size
        return longest, longest_size

    def interrupted_text(self, prompt: RawPrompt, decode: Decode) -> int:
        """Return how much of a prompt without a template is the text, or the ids, of a
        cancelled turn; 0 if it begins with none. Call it after `match_text`."""
        return max(
            (
                self._path_texts.covered(prompt, node, decode)
                for node in self._interrupted[-MAX_CANDIDATES:]
                if node.raw and node.turn.finish_reason == "abort"
            ),
            default=0,
        )

    def match(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Match:
        """Return the deepest node that `messages` continue. If there is a node and a
        `fork`, the client has replaced a later reply on its path."""
        as_sent = self._match(messages, tools)
        if as_sent.continues or self._level is not MatchLevel.REWRITTEN:
            return as_sent
        mended = self._replies.restored(messages)
        if mended is None:
            return as_sent
        match = self._match(mended.messages, tools)
        if match.fork is not None or not (match.continues or as_sent.fork):
            return as_sent
        position = mended.position
        change = self._change(position, mended.recorded, messages[position], tools)
        return replace(match, level=MatchLevel.REWRITTEN, change=change)

    def _match(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Match:
        reply_ends = [
            end
            for end, message in enumerate(messages, 1)
            if message.role == "assistant"
        ]
        node: Node | None = None
        depth = 0
        level = MatchLevel.EXACT
        if self.size and reply_ends:
            node, depth, level = self._deepest(messages, tools, reply_ends)
        fork: ForkReason | None = None
        change: Change | None = None
        kept: Node | None = None
        is_continuation = node is not None and depth == reply_ends[-1]
        if not is_continuation and (self.size or self._interrupted):
            departure = self._explain_fork(messages, tools, reply_ends, depth)
            fork = departure.reason
            change = departure.change
            kept = departure.kept
        elif node is not None and level is MatchLevel.REWRITTEN:
            change = self._last_rewritten(messages[:depth], node)
        new = tuple(messages[depth:])
        if node is not None:
            new = _with_our_ids(messages, depth, node)
        return Match(
            node=node,
            depth=depth,
            fork=fork,
            new=new,
            level=level,
            change=change,
            kept=kept,
        )

    def _deepest(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        reply_ends: Sequence[int],
    ) -> tuple[Node | None, int, MatchLevel]:
        """Return the deepest node that `messages` continue, the number of messages that
        it covers, and the strictest level that reaches it."""
        deepest: Node | None = None
        depth = 0
        deepest_level = MatchLevel.EXACT
        seed = tools_digest(tools)
        for index in self._indexes:
            compared = self._replies.at_level(messages, index.level)
            prefix_digests = digests(compared, index.level, seed, tools=tools)
            index.update(self._nodes)
            for end in reversed(reply_ends):
                if end <= depth:
                    break
                nodes = index.nodes.get(prefix_digests[end])
                if nodes:
                    deepest = _nearest(nodes, messages[:end])
                    depth = end
                    deepest_level = index.level
                    break
            if depth == reply_ends[-1]:
                break
        return deepest, depth, deepest_level

    def _explain_fork(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        reply_ends: Sequence[int],
        depth: int,
    ) -> _Fork:
        """Explain why the replies after `depth` differ from the recorded ones. Four
        explanations are tried, the one that leaves most of the recording unchanged
        first: the whole conversation is recorded with other tools; a reply is, so far,
        one that was interrupted; everything before a reply is recorded, with another
        reply; only a reply is recorded, after other messages. All of them compare
        conversations without their tools."""
        index = self._any_tools
        index.update(self._nodes)
        compared = self._replies.at_level(messages, index.level)
        prefix_digests = digests(compared, index.level, tools=tools)
        unmatched = [end for end in reply_ends if end > depth]
        for end in unmatched:
            nodes = index.nodes.get(prefix_digests[end])
            if nodes:
                return _Fork(
                    ForkReason.TOOLS_CHANGED, tools_change(nodes[-1].tools, tools)
                )
        for end in unmatched:
            position = end - 1
            before = prefix_digests[position]
            kept = self._interrupted_reply(messages, position, before)
            node = kept or index.answered.get(before)
            if node is None:
                continue
            change = self._change(
                position, node.messages[-1], messages[position], tools
            )
            if kept is not None:
                return _Fork(ForkReason.INTERRUPTED_REPLY, change, kept)
            if is_text_moved(node.conversation(), messages, position):
                return _Fork(ForkReason.TEXT_MOVED, change)
            return _Fork(ForkReason.HISTORY_EDITED, change)
        for end in reversed(unmatched):  # the client continues the newest recording
            candidates = self._similar_replies(messages[end - 1], tools)
            if candidates:
                return self._changed_before(messages[: end - 1], candidates, tools)
        if depth == 0 and self.size:
            return _Fork(ForkReason.NEW_CONVERSATION)
        return _NO_FORK

    def _interrupted_reply(
        self, messages: Sequence[Message], position: int, before: bytes
    ) -> Node | None:
        """Return the turn whose reply did not end for the client, and that has the
        message at `position` as its reply or the beginning of it. `before` is the
        digest of the messages before."""
        index = self._any_tools
        candidates = self._interrupted[-MAX_CANDIDATES:]
        answered = index.answered.get(before)
        if answered is not None and self._is_undelivered(answered):
            candidates.append(answered)
        for node in reversed(candidates):
            if not _begins(messages[position], node.messages[-1]):
                continue
            prompt = node.conversation()[:-1]
            compared = self._replies.at_level(prompt, index.level)
            if digests(compared, index.level, tools=node.tools)[-1] == before:
                return node
        return None

    def _is_undelivered(self, node: Node) -> bool:
        return self._delivered is not None and node.turn.id not in self._delivered

    def _similar_replies(self, reply: Message, tools: Sequence[Tool]) -> list[Node]:
        """Return the latest turns with a reply like this one."""
        index = self._any_tools
        nodes = index.nodes_by_reply.get(index.alone(reply, tools), [])
        candidates = nodes[-MAX_CANDIDATES:]
        node = self._replies.node(reply)
        if node is not None and node not in candidates:
            candidates.append(node)
        return candidates

    def _changed_before(
        self,
        before: Sequence[Message],
        candidates: Sequence[Node],
        tools: Sequence[Tool],
    ) -> _Fork:
        """Explain how the messages before a reply differ from those before it when it
        was sampled. `candidates` are the turns that the reply may come from."""
        difference = self._smallest_difference(before, candidates, tools)
        recorded = difference.recorded
        sent = difference.sent
        other_tools = all(node.tools != tuple(tools) for node in candidates)
        handoff = is_handoff(recorded, sent, other_tools=other_tools)
        if handoff and not (recorded and sent):
            return _Fork(ForkReason.HANDOFF, messages_change(difference))
        if len(sent) < len(recorded):
            return _Fork(ForkReason.COMPACTED, messages_change(difference))
        if len(sent) > len(recorded):
            return _Fork(ForkReason.CONTEXT_EDITED, messages_change(difference))
        if not sent:  # the messages are the same, but results answer other calls
            change = self._results_change(before, candidates[-1], tools)
            return _Fork(ForkReason.CONTEXT_EDITED, change)
        change = self._change(difference.first, recorded[0], sent[0], tools)
        if handoff:
            return _Fork(ForkReason.HANDOFF, change)
        if recorded[0].role == "assistant" and sent[0].role == "assistant":
            return _Fork(ForkReason.HISTORY_EDITED, change)
        return _Fork(ForkReason.CONTEXT_EDITED, change)

    def _smallest_difference(
        self,
        before: Sequence[Message],
        candidates: Sequence[Node],
        tools: Sequence[Tool],
    ) -> Difference:
        """Return the smallest of the differences between `before` and the messages
        before each candidate's reply; of equal ones the newest candidate's."""
        index = self._any_tools
        sent_digests = [index.alone(message, tools) for message in before]
        differences: list[Difference] = []
        for node in reversed(candidates):
            recorded_digests = index.each_alone(node)[:-1]
            recorded = node.conversation()[:-1]
            differences.append(
                differing_part(recorded, recorded_digests, before, sent_digests)
            )
        return min(differences, key=lambda difference: difference.size)

    def _results_change(
        self, before: Sequence[Message], node: Node, tools: Sequence[Tool]
    ) -> Change | None:
        """Return the first result that answers another call than the recorded one in
        its position."""
        for position, (message, recorded) in enumerate(
            zip(before, node.conversation(), strict=False)
        ):
            if message.tool_call_id != recorded.tool_call_id:
                return self._change(position, recorded, message, tools)
        return None

    def _last_rewritten(self, messages: Sequence[Message], node: Node) -> Change | None:
        """Return the last reply in `messages` that differs from the node's path in more
        than its reasoning."""
        conversation = node.conversation()
        level = MatchLevel.WITHOUT_REASONING
        for position in reversed(range(len(messages))):
            message = messages[position]
            recorded = conversation[position]
            if message.role != "assistant" or message == recorded:
                continue
            if not is_same_message(recorded, message, level, node.tools):
                return self._change(position, recorded, message, node.tools)
        return None

    def _change(
        self, position: int, recorded: Message, sent: Message, tools: Sequence[Tool]
    ) -> Change:
        return message_change(position, recorded, sent, self._level, tools)


def _begins(message: Message, reply: Message) -> bool:
    """Whether the message has the reply's text or the beginning of it, and no calls
    that the reply lacks."""
    text = message.content.strip()
    return (
        text != ""
        and reply.content.strip().startswith(text)
        and reply_calls(message) == reply_calls(reply)[: len(message.tool_calls)]
    )


def _nearest(nodes: Sequence[Node], messages: Sequence[Message]) -> Node:
    """Return one of the nodes whose conversations are the same at a level: the one with
    most of the client's call ids, and the newest of those."""
    newest_first = nodes[: -MAX_CANDIDATES - 1 : -1]
    if len(newest_first) == 1:
        return newest_first[0]
    sent_ids = {call.id for message in messages for call in message.tool_calls}

    def count_sent_ids(node: Node) -> int:
        return sum(
            call.id in sent_ids
            for message in node.conversation()
            for call in message.tool_calls
        )

    return max(newest_first, key=count_sent_ids)


def _with_our_ids(
    messages: Sequence[Message], depth: int, node: Node
) -> tuple[Message, ...]:
    """Return the messages after `depth`. Results of calls on the node's path name them
    by our ids."""
    our_ids: dict[str, str] = {}
    for message, recorded in zip(messages, node.conversation(), strict=False):
        for call, recorded_call in zip(
            message.tool_calls, recorded.tool_calls, strict=True
        ):
            our_ids[call.id] = recorded_call.id
    new: list[Message] = []
    for message in messages[depth:]:
        for call in message.tool_calls:
            our_ids.pop(call.id, None)
        our_id = our_ids.get(message.tool_call_id, message.tool_call_id)
        if our_id != message.tool_call_id:
            message = replace(message, tool_call_id=our_id)
        new.append(message)
    return tuple(new)
