"""Which recorded turn a request continues, and why one departs from what was recorded."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from invrl.gateway.forest import Forest, ForkReason, Message, Node
from invrl.types import Turn, VersionSpan, WeightVersion

SYSTEM, ASK, REPLY = Message("system", "s"), Message("user", "q"), Message("assistant", "a")
MORE, REPLY_2 = Message("user", "more"), Message("assistant", "b")


def node(name: str, messages: list[Message], parent: Node | None = None) -> Node:
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
    return Node(turn=turn, parent=parent, messages=tuple(messages), closed=True)


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
    for messages in ([SYSTEM, MORE], [Message("user", "a title for this, please")], [MORE, REPLY, ASK]):
        assert forest.match(messages).fork is ForkReason.NEW_CONVERSATION


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
