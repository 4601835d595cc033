"""Which recorded turn a request continues, and why one departs from what was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.gateway.forest import Forest, ForkReason, Node
from invrl.gateway.message import MatchLevel, Message, Tool, ToolCall, digests
from invrl.types import Turn, VersionSpan, WeightVersion

SYSTEM, ASK, REPLY = Message("system", "s"), Message("user", "q"), Message("assistant", "a")
MORE, REPLY_2 = Message("user", "more"), Message("assistant", "b")


def node(
    name: str, messages: list[Message], parent: Node | None = None, tools: tuple[Tool, ...] = ()
) -> Node:
    turn = Turn(
        id=name,
        session_id="s",
        parent_id=parent.turn.id if parent else None,
        context_ids_T=np.array([1, 2], np.int32),
        sampled_ids_T=np.array([3], np.int32),
        logprobs_T=np.array([-1], np.float32),
        spans=(VersionSpan(version=WeightVersion(0), start=0, end=1),),
        finish_reason="stop",
        request_digest="",
        delivered=True,
        temperature=1.0,
        prompt_tokens=2,
        cached_tokens=0,
        fork_reason="",
        started_at=0.0,
        finished_at=0.0,
    )
    return Node(turn=turn, parent=parent, messages=tuple(messages), closed=True, tools=tools)


def test_a_first_request_is_no_fork():
    match = Forest().match([SYSTEM, ASK])
    assert (match.node, match.depth, match.fork) == (None, 0, None)


def test_a_request_continues_the_deepest_turn():
    forest = Forest()
    first = node("1", [SYSTEM, ASK, REPLY])
    second = node("2", [MORE, REPLY_2], first)
    forest.add(first)
    forest.add(second)
    match = forest.match([SYSTEM, ASK, REPLY, MORE, REPLY_2, MORE])
    assert (match.node, match.depth, match.fork) == (second, 5, None)
    assert second.ids() == [1, 2, 3, 1, 2, 3]
    branch = forest.match([SYSTEM, ASK, REPLY, Message("user", "something else")])
    assert (branch.node, branch.depth, branch.fork) == (first, 3, None)


def test_a_replaced_reply_is_an_edited_history():
    forest = Forest()
    first = node("1", [ASK, REPLY])
    forest.add(first)
    forest.add(node("2", [MORE, REPLY_2], first))
    root = forest.match([ASK, Message("assistant", "edited"), MORE])
    assert (root.node, root.fork) == (None, ForkReason.HISTORY_EDITED)
    branch = forest.match([ASK, REPLY, MORE, Message("assistant", "edited"), MORE])
    assert (branch.node, branch.depth, branch.fork) == (first, 2, ForkReason.HISTORY_EDITED)


def test_a_conversation_that_shares_no_reply_is_a_new_one():
    forest = Forest()
    forest.add(node("1", [SYSTEM, ASK, REPLY]))
    for messages in ([SYSTEM, MORE], [Message("user", "a title for this, please")]):
        assert forest.match(messages).fork is ForkReason.NEW_CONVERSATION


def test_a_reply_with_less_before_it_was_compacted():
    forest = Forest()
    forest.add(node("1", [SYSTEM, ASK, REPLY, MORE, REPLY_2]))
    summary = Message("user", "so far: the user asked q and got a")
    assert forest.match([SYSTEM, summary, REPLY_2, MORE]).fork is ForkReason.COMPACTED


def test_other_tools_are_a_fork_of_their_own():
    forest = Forest()
    calc, shell = Tool(name="calc", parameters='{"a": 1, "b": 2}'), Tool(name="shell")
    first = node("1", [ASK, REPLY], tools=(calc,))
    forest.add(first)
    assert forest.match([ASK, REPLY, MORE], (Tool(name="calc", parameters='{"b":2,"a":1}'),)).node is first
    assert forest.match([ASK, REPLY, MORE], (calc, shell)).fork is ForkReason.TOOLS_CHANGED
    assert forest.match([ASK, REPLY, MORE]).fork is ForkReason.TOOLS_CHANGED


CALLS = Message(
    "assistant", " sure ", "hm", (ToolCall("c1", "calc", '{"a": 1, "b": 2}'), ToolCall("c2", "calc", "{}"))
)
RESULTS = [Message("tool", "3", tool_call_id="c1"), Message("tool", "0", tool_call_id="c2")]


@pytest.mark.parametrize(
    ("calls", "level"),
    [
        (CALLS, MatchLevel.EXACT),
        (replace(CALLS, content="sure"), MatchLevel.CANONICAL),
        (
            replace(CALLS, tool_calls=(ToolCall("c1", "calc", '{"b":2,"a":1}'), CALLS.tool_calls[1])),
            MatchLevel.CANONICAL,
        ),
        (replace(CALLS, reasoning=""), MatchLevel.WITHOUT_REASONING),
        (replace(CALLS, reasoning="", content="other"), None),
        (replace(CALLS, tool_calls=CALLS.tool_calls[::-1]), None),
        (replace(CALLS, tool_calls=CALLS.tool_calls[:1]), None),
    ],
)
def test_a_reply_that_comes_back_altered_matches_at_its_level(calls: Message, level: MatchLevel | None):
    for most in MatchLevel:
        forest = Forest(most)
        first = node("1", [ASK, CALLS])
        forest.add(first)
        match = forest.match([ASK, calls, *RESULTS])
        if level is None or level > most:
            assert match.node is None
        else:
            assert (match.node, match.depth, match.fork, match.level) == (first, 2, None, level)


def test_new_call_ids_match_if_the_results_answer_the_same_calls():
    forest = Forest()
    forest.add(node("1", [ASK, CALLS]))
    last = node("2", [*RESULTS, REPLY], forest.turn("1"))
    forest.add(last)
    renamed = replace(
        CALLS, tool_calls=tuple(replace(call, id="x" + call.id) for call in CALLS.tool_calls), reasoning=""
    )
    results = [replace(result, tool_call_id="x" + result.tool_call_id) for result in RESULTS]
    assert forest.match([ASK, renamed, *results, REPLY, MORE]).node is last
    assert forest.match([ASK, renamed, *results[::-1], REPLY, MORE]).depth == 2


def test_roles_and_contents_cannot_be_confused():
    forest = Forest()
    forest.add(node("1", [Message("user", "ab"), REPLY]))
    assert forest.match([Message("usera", "b"), REPLY, MORE]).node is None
    assert forest.match([Message("user", "a"), Message("user", "b"), REPLY, MORE]).node is None


messages = st.builds(Message, st.sampled_from(["user", "assistant"]), st.sampled_from(["", "x", "y"]))


@given(st.lists(st.lists(messages, min_size=1, max_size=3), min_size=1, max_size=6), st.data())
def test_match_agrees_with_comparing_every_conversation(turns: list[list[Message]], data: st.DataObject):
    forest, nodes = Forest(), []
    for number, added in enumerate(turns):
        parent = data.draw(st.sampled_from([None, *nodes]))
        nodes.append(node(str(number), [*added, REPLY], parent))
        forest.add(nodes[-1])
    start = data.draw(st.sampled_from(nodes)).conversation()
    request = start[: data.draw(st.integers(0, len(start)))] + data.draw(st.lists(messages, max_size=4))
    expected = max((len(c) for n in nodes if (c := n.conversation()) == request[: len(c)]), default=0)
    match = forest.match(request)
    assert match.depth == expected
    assert (match.node.conversation() if match.node else []) == request[:expected]


@pytest.mark.parametrize("level", list(MatchLevel))
@pytest.mark.parametrize("split", range(6))
def test_digests_go_on_from_any_prefix(level: MatchLevel, split: int):
    talk = [ASK, CALLS, *RESULTS, REPLY, MORE]
    whole = digests(talk, level, b"tools")
    before = digests(talk[:split], level, b"tools")
    calls = {"c1": "1.0", "c2": "1.1"} if split > 1 else {}
    after = digests(talk[split:], level, before[-1], earlier=split, calls=calls)
    assert before + after[1:] == whole


@pytest.mark.parametrize("level", list(MatchLevel))
def test_a_conversation_in_many_turns_is_the_one_that_a_request_holds(level: MatchLevel):
    """Also where a tool's result answers a call of turns ago, and ids of calls come again."""
    again = replace(CALLS, tool_calls=CALLS.tool_calls[:1])
    turns = [[ASK, CALLS], [RESULTS[0], again], [RESULTS[0], REPLY], [RESULTS[1], MORE, REPLY_2]]
    forest, path, said = Forest(level), None, []
    for at, added in enumerate(turns):
        path = node(str(at), added, path)
        forest.add(path)
        said += added
        found = forest.match([*said, MORE])
        assert (found.node, found.depth, found.fork) == (path, len(said), None)
    renamed = [
        replace(each, tool_call_id="x" + each.tool_call_id if each.tool_call_id else "") for each in said
    ]
    calls = [tuple(replace(call, id="x" + call.id) for call in each.tool_calls) for each in said]
    renamed = [replace(each, tool_calls=own) for each, own in zip(renamed, calls, strict=True)]
    assert (forest.match(renamed).node is path) == (level > MatchLevel.EXACT)
