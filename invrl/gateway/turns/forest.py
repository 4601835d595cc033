"""The token forest of one session: which recorded turn a request continues, and why one does not. Pure.

A node is a turn in its place; its conversation is what the turn's ids stand for. A request continues the
deepest node whose conversation is a prefix of the request's, at the strictest `MatchLevel` that reaches
that deep. Invariants: nodes never change, so requests of one session can run side by side; only turns whose
answer is whole become nodes; one thread at a time matches, and nodes may be added meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from invrl.gateway.turns.message_identity import canonical_json, digests, tools_digest
from invrl.gateway.types import ADVICE, Change, ForkReason, MatchLevel, Message, Node, Tool

_CANDIDATES = 32
"""Recorded replies of one text that a departing request is compared with, the newest ones."""
_SHOWN = 120
"""Characters that a `Change` shows of either side."""
_CONTEXT = 24
"""Characters before the first that differs, of those."""


def advice(reason: ForkReason, change: Change | None) -> str:
    """What makes this fork go away."""
    if reason is ForkReason.HISTORY_EDITED and change is not None and change.level is not None:
        return f"--match-level {change.level.name.lower()} takes this reply for the one that was sampled"
    return ADVICE[reason]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a request's messages meet the forest."""

    node: Node | None
    depth: int
    """Messages of the request that the node's conversation covers."""
    fork: ForkReason | None
    """None: a first conversation, or one that goes on from what was recorded."""
    new: tuple[Message, ...] = ()
    """The messages behind `depth`. Results name the calls that they answer by our ids, where the client has
    given the calls others."""
    level: MatchLevel = MatchLevel.EXACT
    change: Change | None = None
    """Of a fork: how the request departs. Of a match at `REWRITTEN`: how the last altered reply came back."""


class _Replies:
    """The sampled replies that call tools, by the ids and names of their calls."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[tuple[str, str], ...], Node] = {}

    def add(self, node: Node) -> None:
        reply = node.messages[-1]
        if reply.tool_calls:
            self._nodes[_calls_of(reply)] = node

    def node(self, message: Message) -> Node | None:
        """The turn that made exactly the message's calls."""
        if message.role != "assistant" or not message.tool_calls:
            return None
        return self._nodes.get(_calls_of(message))

    def at_level(self, messages: Sequence[Message], level: MatchLevel) -> Sequence[Message]:
        """What counts of `messages` at a level: at `REWRITTEN` the recorded reply in the place of one that
        makes its calls."""
        if level is not MatchLevel.REWRITTEN or not self._nodes:
            return messages
        recorded = [self.node(message) for message in messages]
        pairs = zip(messages, recorded, strict=True)
        return [message if node is None else node.messages[-1] for message, node in pairs]


def _calls_of(message: Message) -> tuple[tuple[str, str], ...]:
    return tuple((call.id, call.name) for call in message.tool_calls)


class _Index:
    """The conversations of all nodes by their digests, at one level; `tools`: told apart by their tools. It
    follows when it is asked: most sessions need the strictest level alone."""

    def __init__(self, level: MatchLevel, replies: _Replies, *, tools: bool) -> None:
        self.level = level
        self._replies = replies
        self._tools = tools
        self.nodes: dict[bytes, list[Node]] = {}
        """The nodes of each conversation."""
        self.answered: dict[bytes, Node] = {}
        """The latest node whose reply follows a conversation."""
        self.said: dict[bytes, list[Node]] = {}
        """The nodes of each reply by itself (if tools are not told apart)."""
        self._ends: dict[str, tuple[bytes, int]] = {}
        """Where each turn's conversation ends: its digest, and how many messages it has."""
        self._apart: dict[str, list[bytes]] = {}
        """The digest by itself of each message that a turn adds, for turns that were asked for."""

    def follow(self, nodes: Sequence[Node]) -> Self:
        """`nodes`: all of the forest, in the order in which they were added."""
        for node in nodes[len(self._ends) :]:  # a copy: more may be added meanwhile
            seed = b""
            earlier = 0
            if node.parent is not None:
                seed, earlier = self._ends[node.parent.turn.id]
            elif self._tools:
                seed = tools_digest(node.tools)
            messages = self._replies.at_level(node.messages, self.level)
            calls = self._calls_before(node)
            *_, before, whole = digests(
                messages, self.level, seed, earlier=earlier, calls=calls, tools=node.tools
            )
            self.nodes.setdefault(whole, []).append(node)
            self.answered[before] = node
            self._ends[node.turn.id] = whole, earlier + len(node.messages)
            if not self._tools:
                alone = self.alone(node.messages[-1], node.tools)
                self.said.setdefault(alone, []).append(node)
        return self

    def alone(self, message: Message, tools: Sequence[Tool]) -> bytes:
        """The digest of a message by itself."""
        return digests(self._replies.at_level([message], self.level), self.level, tools=tools)[-1]

    def each_alone(self, node: Node) -> list[bytes]:
        """The digest by itself of each message of the node's conversation. Kept: an agent whose beginning
        changes with every request has each request compared with many nodes."""
        found: list[bytes] = []
        for step in node.path():
            apart = self._apart.get(step.turn.id)
            if apart is None:
                apart = [self.alone(message, step.tools) for message in step.messages]
                self._apart[step.turn.id] = apart
            found += apart
        return found

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

    def __init__(self, level: MatchLevel = MatchLevel.REWRITTEN) -> None:
        self._level = level
        self._replies = _Replies()
        self._indexes = [_Index(each, self._replies, tools=True) for each in MatchLevel if each <= level]
        self._any_tools = _Index(level, self._replies, tools=False)
        self._by_turn: dict[str, Node] = {}
        self._nodes: list[Node] = []
        """All, in the order in which they were added."""
        self.characters = 0
        """Of all messages that its turns add."""
        self._texts: dict[str, str] = {}
        """Of turns without a template: all that the ids of their paths stand for."""

    @property
    def size(self) -> int:
        return len(self._by_turn)

    def add(self, node: Node) -> None:
        """Its parent has been added before. Another thread may be matching meanwhile: it sees the node or
        does not."""
        self._by_turn[node.turn.id] = node
        self._nodes.append(node)
        self.characters += sum(message.characters for message in node.messages)
        self._replies.add(node)

    def turn(self, turn_id: str) -> Node | None:
        """The node of a turn; None if it is unknown or never became whole."""
        return self._by_turn.get(turn_id)

    def changes(self) -> dict[str, Change]:
        """How each turn that departed from what was recorded before it did so, by turn: found again from the
        nodes. Each of them takes as long as a request that departs."""
        earlier = Forest(self._level)
        found: dict[str, Change] = {}
        for node in tuple(self._nodes):
            if node.turn.fork_reason and not node.raw:
                before = node.parent.conversation() if node.parent else []
                change = earlier.match([*before, *node.messages[:-1]], node.tools).change
                if change is not None:
                    found[node.turn.id] = change
            earlier.add(node)
        return found

    def match_text(
        self, prompt: str | tuple[int, ...], shown: Callable[[Sequence[int]], str]
    ) -> tuple[Node | None, int]:
        """The node that a prompt without a template goes on from, and how much of the prompt its ids stand
        for: the most of all whose whole text, or ids, the prompt begins with. `shown`: ids as text."""
        found: tuple[Node | None, int] = (None, 0)
        for node in tuple(self._nodes):
            if not node.raw:
                continue
            turn_id = node.turn.id
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
            seen = self._replies.at_level(messages, index.level)
            prefixes = digests(seen, index.level, seed, tools=tools)
            nodes = index.follow(self._nodes).nodes
            deepest = next((n for n in reversed(replies) if n > depth and prefixes[n] in nodes), None)
            if deepest is not None:
                found = _nearest(nodes[prefixes[deepest]], messages[:deepest])
                depth = deepest
                at_level = index.level
            if depth == replies[-1]:
                break
        fork, change = None, None
        if self.size and (found is None or depth != replies[-1]):
            fork, change = self._why(messages, tools, replies, depth)
        elif found is not None and at_level is MatchLevel.REWRITTEN:
            change = self._last_rewritten(messages[:depth], found)
        new = tuple(messages[depth:]) if found is None else _with_our_ids(messages, depth, found)
        return Match(node=found, depth=depth, fork=fork, new=new, level=at_level, change=change)

    def _why(
        self, messages: Sequence[Message], tools: Sequence[Tool], replies: Sequence[int], depth: int
    ) -> tuple[ForkReason | None, Change | None]:
        """What became of the replies of ours behind `depth`."""
        index = self._any_tools.follow(self._nodes)
        seen = self._replies.at_level(messages, index.level)
        prefixes = digests(seen, index.level, tools=tools)
        unmatched = [n for n in replies if n > depth]
        for n in unmatched:
            if nodes := index.nodes.get(prefixes[n]):
                return ForkReason.TOOLS_CHANGED, _tools_change(nodes[-1].tools, tools)
        for n in unmatched:
            if (node := index.answered.get(prefixes[n - 1])) is not None:
                recorded = node.messages[-1]
                return ForkReason.HISTORY_EDITED, self._change(n - 1, recorded, messages[n - 1], tools)
        for n in reversed(unmatched):  # the newest recording is what the client goes on from
            candidates = self._recorded_like(messages[n - 1], tools)
            if candidates:
                return self._departed(messages[:n], candidates, tools)
        return (ForkReason.NEW_CONVERSATION if depth == 0 else None), None

    def _recorded_like(self, reply: Message, tools: Sequence[Tool]) -> list[Node]:
        """The latest turns whose replies are like this one."""
        index = self._any_tools
        candidates = index.said.get(index.alone(reply, tools), [])[-_CANDIDATES:]
        node = self._replies.node(reply)
        if node is not None and node not in candidates:
            candidates.append(node)
        return candidates

    def _departed(
        self, messages: Sequence[Message], candidates: Sequence[Node], tools: Sequence[Tool]
    ) -> tuple[ForkReason, Change | None]:
        """How what comes before the last one of `messages` differs from what came before it when it was
        sampled. Of the turns that it may be the reply of, the one that differs least."""
        index = self._any_tools
        before = messages[:-1]
        sent = [index.alone(message, tools) for message in before]
        differences = []
        for node in reversed(candidates):
            earlier = node.conversation()[:-1]
            recorded = index.each_alone(node)[:-1]
            first = _shared(recorded, sent)
            behind = _shared(recorded[first:][::-1], sent[first:][::-1])
            was = earlier[first : len(earlier) - behind]
            now = before[first : len(before) - behind]
            differences.append(_Difference(first=first, recorded=was, sent=now))
        least = min(differences, key=lambda each: len(each.recorded) + len(each.sent))
        if len(least.sent) < len(least.recorded):
            return ForkReason.COMPACTED, _messages_change(least)
        if len(least.sent) > len(least.recorded):
            return ForkReason.CONTEXT_EDITED, _messages_change(least)
        if not least.sent:  # the same messages, but results that answer other calls
            return ForkReason.CONTEXT_EDITED, self._results_change(before, candidates[-1], tools)
        was, now = least.recorded[0], least.sent[0]
        edited = was.role == now.role == "assistant"
        reason = ForkReason.HISTORY_EDITED if edited else ForkReason.CONTEXT_EDITED
        return reason, self._change(least.first, was, now, tools)

    def _results_change(self, before: Sequence[Message], node: Node, tools: Sequence[Tool]) -> Change | None:
        """The first result that names another call than the recorded one in its place."""
        pairs = enumerate(zip(before, node.conversation(), strict=False))
        for at, (message, recorded) in pairs:
            if message.tool_call_id != recorded.tool_call_id:
                return self._change(at, recorded, message, tools)
        return None

    def _last_rewritten(self, messages: Sequence[Message], node: Node) -> Change | None:
        """The last reply in `messages` that is not what the node's path holds, but for its reasoning."""
        conversation = node.conversation()
        level = MatchLevel.WITHOUT_REASONING
        for at in reversed(range(len(messages))):
            message, recorded = messages[at], conversation[at]
            if message.role == "assistant" and message != recorded:
                sides = [digests([each], level, tools=node.tools)[-1] for each in (message, recorded)]
                if sides[0] != sides[1]:
                    return self._change(at, recorded, message, node.tools)
        return None

    def _change(self, at: int, recorded: Message, sent: Message, tools: Sequence[Tool]) -> Change:
        """How a message differs from the recorded one in its place."""
        parts = _differing(recorded, sent)
        part, was, now = next(iter(parts), ("content", recorded.content, sent.content))
        was, now = _excerpts(was, now)
        higher = [level for level in MatchLevel if level > self._level]
        level = next((level for level in higher if _same(recorded, sent, level, tools)), None)
        return Change(message=at, role=sent.role, part=part, recorded=was, sent=now, level=level)


def _nearest(nodes: Sequence[Node], messages: Sequence[Message]) -> Node:
    """Of nodes whose conversations a level takes for the same: the one with most of the client's call ids,
    the newest of those."""
    newest_first = nodes[: -_CANDIDATES - 1 : -1]
    if len(newest_first) == 1:
        return newest_first[0]
    sent = {call.id for message in messages for call in message.tool_calls}

    def known(node: Node) -> int:
        return sum(call.id in sent for message in node.conversation() for call in message.tool_calls)

    return max(newest_first, key=known)


def _same(recorded: Message, sent: Message, level: MatchLevel, tools: Sequence[Tool]) -> bool:
    """Whether a level takes the two for the same reply."""
    if level is MatchLevel.REWRITTEN and recorded.tool_calls and _calls_of(recorded) == _calls_of(sent):
        return True
    return digests([recorded], level, tools=tools)[-1] == digests([sent], level, tools=tools)[-1]


def _differing(recorded: Message, sent: Message) -> Iterator[tuple[str, str, str]]:
    """Each part in which they differ: its name, and both texts."""
    calls = [
        ", ".join(f"{call.name}({canonical_json(call.arguments)})" for call in message.tool_calls)
        for message in (recorded, sent)
    ]
    ids = [", ".join(call.id for call in message.tool_calls) for message in (recorded, sent)]
    parts = (
        ("role", recorded.role, sent.role),
        ("content", recorded.content.strip(), sent.content.strip()),
        ("tool_calls", calls[0], calls[1]),
        ("tool_call_ids", ids[0], ids[1]),
        ("tool_call_id", recorded.tool_call_id, sent.tool_call_id),
        ("reasoning", recorded.reasoning, sent.reasoning),
        ("content", recorded.content, sent.content),
    )
    return ((part, was, now) for part, was, now in parts if was != now)


def _excerpts(recorded: str, sent: str) -> tuple[str, str]:
    """Of two texts what stands around the first character that differs."""
    common = _same_beginning(recorded, sent)
    begin = max(common - _CONTEXT, 0)
    shown = []
    for text in (recorded, sent):
        piece = text[begin : begin + _SHOWN]
        before = "…" if begin else ""
        after = "…" if begin + _SHOWN < len(text) else ""
        shown.append(before + piece + after)
    return shown[0], shown[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The stretch in which two conversations differ, between what they begin and end with alike."""

    first: int
    """The place of its first message."""
    recorded: Sequence[Message]
    sent: Sequence[Message]


def _messages_change(difference: _Difference) -> Change:
    """Messages taken out or put in."""
    shown = []
    for messages in (difference.recorded, difference.sent):
        begins = f", the first is {messages[0].role}: {messages[0].content[:_SHOWN]}" if messages else ""
        shown.append(f"{len(messages)} messages{begins}")
    role = (difference.sent or difference.recorded)[0].role
    return Change(message=difference.first, role=role, part="messages", recorded=shown[0], sent=shown[1])


def _tools_change(recorded: Sequence[Tool], sent: Sequence[Tool]) -> Change:
    """What a request offers instead of the tools that its conversation began with."""
    names = [", ".join(tool.name for tool in tools) for tools in (recorded, sent)]
    if names[0] == names[1]:
        changed = next(
            (n for n, tool in enumerate(sent) if tools_digest([tool]) != tools_digest([recorded[n]])), 0
        )
        names = [
            f"{tool.name}: {tool.description} {tool.parameters}"
            for tool in (recorded[changed], sent[changed])
        ]
    was, now = _excerpts(names[0], names[1])
    return Change(message=0, role="", part="tools", recorded=was, sent=now)


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items the two begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _same_beginning(one: str, other: str) -> int:
    """How many characters the two texts begin with alike. By halves: a prompt may have millions, and going
    through them one by one would stop the event loop for a second."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _with_our_ids(messages: Sequence[Message], depth: int, node: Node) -> tuple[Message, ...]:
    """The messages behind `depth`, in which results of calls on the node's path name them by our ids."""
    ours: dict[str, str] = {}
    for message, recorded in zip(messages, node.conversation(), strict=False):
        for call, known in zip(message.tool_calls, recorded.tool_calls, strict=True):
            ours[call.id] = known.id
    new = []
    for message in messages[depth:]:
        for call in message.tool_calls:
            ours.pop(call.id, None)
        known = ours.get(message.tool_call_id, message.tool_call_id)
        new.append(message if known == message.tool_call_id else replace(message, tool_call_id=known))
    return tuple(new)
