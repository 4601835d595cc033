"""The difference where a turn departs from its session's recorded turns, and advice for
the user.

It is computed again from the recorded turns, with the comparison by which the gateway
placed them. If the messages are the same and the template renders them differently, the
tokens are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np

from invrl.gateway.turns.matching.forest import Forest
from invrl.gateway.turns.matching.fork_changes import (
    advice,
    common_items,
    message_change,
    tools_change,
)
from invrl.gateway.types import (
    ADVICE,
    Change,
    Decode,
    ForkReason,
    MatchLevel,
    Message,
    Node,
    Tool,
)
from invrl.types.turns import Turn

_MAX_COMPARED = 64
"""Newest earlier turns that a fork is compared with."""
_TOKENS_BEFORE = 8
_TOKENS_SHOWN = 32
"""Tokens around the first different one, and how many of them come before it."""
_OF_THE_TEMPLATE = (ForkReason.TEMPLATE_CHANGED, ForkReason.THINKING_STRIPPED)
_ENDINGS = {
    "abort": "was cancelled",
    "length": "ran out of tokens",
    "stop": "did not reach the agent whole",
}
"""Interruption of a reply, by its finish reason."""
_PARTS = {
    "content": "text",
    "reasoning": "reasoning",
    "tool_calls": "tool calls",
    "tool_call_ids": "ids of its tool calls",
    "tool_call_id": "call that it answers",
    "role": "role",
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of one fork. `messages` counts those of its whole request, `shared`
    those at its beginning that are in the conversation of turn `from_turn` ("" if none
    is)."""

    advice: str
    from_turn: str
    shared: int
    messages: int
    what: str
    """One sentence; "" if no difference was found."""
    change: Change | None

    def row(self) -> Row:
        """Return the explanation as the page gets it."""
        row = asdict(self)
        del row["advice"]
        if self.change is not None:
            del row["change"]["level"]
        return row


def explain_forks(
    recorded: Sequence[tuple[Turn, bytes, bytes]],
    level: MatchLevel,
    decode: Decode | None,
    stops: Mapping[str, str] = {},
) -> dict[str, Explanation]:
    """Return explanations by turn, for the turns of one session in commit order, each
    with its messages and tools. `decode`: returns the text of token ids; None if the
    run has no tokenizer. `stops`: stop strings that ended replies, by turn. Unreadable
    turns are left out, with those that continue them."""
    delivered = {turn.id for turn, _, _ in recorded if turn.delivered}
    forest = Forest(level, delivered)
    nodes: dict[str, Node] = {}
    decoded_tools: dict[bytes, tuple[Tool, ...]] = {}
    explanations: dict[str, Explanation] = {}
    for turn, messages, tools in recorded:
        try:
            if tools not in decoded_tools:
                decoded_tools[tools] = tuple(
                    msgspec.json.decode(tools, type=list[Tool])
                )
            node = _turn_node(turn, messages, decoded_tools[tools], nodes, stops)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if node is None:
            continue
        reason = turn.fork_reason
        if reason in set(ForkReason) and not node.raw:
            explanations[turn.id] = _explained(
                node, ForkReason(reason), forest, nodes, level, decode
            )
        if turn.finish_reason == "abort":
            forest.add_cancelled(node)
        else:
            nodes[turn.id] = node
            forest.add(node)
    return explanations


def _turn_node(
    turn: Turn,
    encoded: bytes,
    tools: tuple[Tool, ...],
    nodes: dict[str, Node],
    stops: Mapping[str, str],
) -> Node | None:
    """Return the turn's node; None if its parent is not among `nodes`, or it has no
    messages. Raises MsgspecError or UnicodeDecodeError for damaged messages."""
    parent = None
    if turn.parent_id is not None:
        parent = nodes.get(turn.parent_id)
        if parent is None:
            return None
    messages = tuple(msgspec.json.decode(encoded, type=list[Message]))
    if not messages:
        return None
    return Node(
        turn=turn,
        parent=parent,
        messages=messages,
        closed=False,
        tools=tools,
        stop=stops.get(turn.id, ""),
    )


def _explained(
    node: Node,
    reason: ForkReason,
    forest: Forest,
    nodes: dict[str, Node],
    level: MatchLevel,
    decode: Decode | None,
) -> Explanation:
    messages = node.conversation()[:-1]
    earlier = list(nodes.values())[-_MAX_COMPARED:]
    nearest, shared = _nearest(messages, earlier)
    change = None
    what = ""
    other_tools: Sequence[Tool] = nearest.tools if nearest is not None else ()
    if reason is ForkReason.TOOLS_CHANGED:
        other_tools = _recorded_tools(messages, earlier, other_tools)
        change = tools_change(other_tools, node.tools)
    elif reason in _OF_THE_TEMPLATE:
        match = forest.match(messages, node.tools)
        if match.node is not None:
            change = _token_change(match.node, node, decode)
    elif reason is ForkReason.NEW_CONVERSATION:
        if nearest is not None:
            change = _beginning_change(messages, node.tools, nearest, shared, level)
    else:
        match = forest.match(messages, node.tools)
        change = match.change
        if match.kept is not None and change is not None:
            nearest = match.kept
            shared = change.message
            what = _kept_sentence(match.kept, messages[shared], shared)
    return Explanation(
        advice=_advice(reason, change, node.tools, other_tools),
        from_turn=nearest.turn.id if nearest is not None and shared else "",
        shared=shared,
        messages=len(messages),
        what=what or _sentence(change, node.tools, other_tools),
        change=change,
    )


def kept_reply(turn: Turn) -> str:
    """Return a sentence about a turn whose interrupted reply a later request keeps; ""
    if it was not interrupted."""
    if turn.finish_reason == "stop":
        return ""
    return f"The agent keeps the reply before it, which {_ENDINGS[turn.finish_reason]}"


def _kept_sentence(kept: Node, sent: Message, position: int) -> str:
    whole = len(kept.messages[-1].content.strip())
    size = len(sent.content.strip())
    part = "whole" if size == whole else f"its first {size} of {whole} characters"
    return (
        f"Message {position + 1} is an interrupted reply that the agent keeps ({part}): the reply"
        f" {_ENDINGS[kept.turn.finish_reason]}"
    )


def _nearest(
    messages: Sequence[Message], earlier: Sequence[Node]
) -> tuple[Node | None, int]:
    """Return the first earlier turn whose conversation shares most messages with the
    request's beginning, and their number."""
    nearest: Node | None = None
    most = 0
    for node in earlier:
        shared = common_items(messages, node.conversation())
        if nearest is None or shared > most:
            nearest = node
            most = shared
    return nearest, most


def _recorded_tools(
    messages: Sequence[Message], earlier: Sequence[Node], default: Sequence[Tool]
) -> Sequence[Tool]:
    """Return the tools recorded with the conversation that the request continues with
    other tools."""
    whole = [node for node in earlier if _continues(messages, node)]
    if not whole:
        return default
    return min(reversed(whole), key=lambda node: len(node.conversation())).tools


def _continues(messages: Sequence[Message], node: Node) -> bool:
    conversation = node.conversation()
    return common_items(messages, conversation) == len(conversation)


def _beginning_change(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    nearest: Node,
    shared: int,
    level: MatchLevel,
) -> Change | None:
    """Return how a conversation without a recorded reply differs from the one with the
    most similar beginning."""
    recorded = nearest.conversation()
    if shared < len(messages) and shared < len(recorded):
        return message_change(shared, recorded[shared], messages[shared], level, tools)
    if tuple(tools) != nearest.tools:
        return tools_change(nearest.tools, tools)
    return None


def _token_change(recorded: Node, node: Node, decode: Decode | None) -> Change | None:
    """Return where the rendered prompt leaves the recorded ids. Without `decode`: in
    ids."""
    recorded_ids = np.asarray(recorded.ids(), np.int32)
    sent_ids = np.asarray(
        [*(node.parent.ids() if node.parent else ()), *node.turn.context_ids_T.tolist()]
    )
    shorter = min(len(recorded_ids), len(sent_ids))
    different = np.flatnonzero(recorded_ids[:shorter] != sent_ids[:shorter])
    if not len(different):
        return None
    position = int(different[0])
    part_T = slice(
        max(0, position - _TOKENS_BEFORE), position - _TOKENS_BEFORE + _TOKENS_SHOWN
    )
    if decode is None:
        decode = _ids_text
    return Change(
        message=position,
        role="",
        part="tokens",
        recorded=decode(recorded_ids[part_T].tolist()),
        sent=decode(sent_ids[part_T].tolist()),
    )


def _ids_text(ids: Sequence[int]) -> str:
    return f"ids {' '.join(map(str, ids))}"


def _sentence(
    change: Change | None, tools: Sequence[Tool], recorded_tools: Sequence[Tool]
) -> str:
    if change is None:
        return ""
    if change.part == "tokens":
        return f"The messages are the same; the template renders them differently from token {change.message} on"
    if change.part == "tools":
        return _tools_sentence(recorded_tools, tools)
    place = f"Message {change.message + 1}"
    if change.part == "messages":
        return f"From message {change.message + 1} on, other messages were sent than were recorded"
    if change.role == "system" and change.part == "content":
        place = f"The system message (message {change.message + 1})"
        sentence = f"{place} has another text"
    else:
        sentence = (
            f"{place} ({change.role}): another {_PARTS.get(change.part, change.part)}"
        )
    if change.recorded.split() == change.sent.split():
        sentence += ", of which only whitespace differs in what is shown"
    return sentence


def _tools_sentence(recorded: Sequence[Tool], sent: Sequence[Tool]) -> str:
    recorded_names = [tool.name for tool in recorded]
    sent_names = [tool.name for tool in sent]
    added = [name for name in sent_names if name not in recorded_names]
    removed = [name for name in recorded_names if name not in sent_names]
    if added or removed:
        parts = []
        if added:
            parts.append(f"added: {', '.join(added)}")
        if removed:
            parts.append(f"removed: {', '.join(removed)}")
        return f"The tools changed ({'; '.join(parts)})"
    if recorded_names != sent_names:
        return "The same tools are offered in another order"
    changed = [
        name
        for name, old, new in zip(sent_names, recorded, sent, strict=True)
        if old != new
    ] or sent_names
    return f"The definition of {', '.join(changed)} changed"


def _advice(
    reason: ForkReason,
    change: Change | None,
    tools: Sequence[Tool],
    recorded_tools: Sequence[Tool],
) -> str:
    names, recorded_names = (
        sorted(tool.name for tool in each) for each in (tools, recorded_tools)
    )
    if reason is ForkReason.TOOLS_CHANGED and names == recorded_names:
        return "keep order, descriptions and schemas of the tools as they were in the first request"
    if (
        reason is ForkReason.NEW_CONVERSATION
        and change is not None
        and change.role == "system"
    ):
        return (
            "if it is meant to be the same conversation, send the system message as it was, and tell what"
            " changes (the time, a status) in the newest message; " + ADVICE[reason]
        )
    return advice(reason, change)
