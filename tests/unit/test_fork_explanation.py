"""What the page says about the place where a turn departs from its session's
recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from handmade_rollouts import turn

from invrl.gateway.turns.matching.forest import Forest
from invrl.gateway.types import ForkReason, MatchLevel, Message, Node, Tool
from invrl.types.turns import FinishReason, Turn
from invrl.viewer.fork_explanation import Explanation, explain_forks, kept_reply

SYSTEM = Message("system", "You add.")
ASK = Message("user", "1+1")
REPLY = Message("assistant", "2 it is")
MORE = Message("user", "and 2+2")
REPLY_2 = Message("assistant", "4")
ADD = Tool(name="add", description="adds")
SUB = Tool(name="sub", description="subtracts")


class Session:
    """Places requests as the gateway does, and keeps what it would record."""

    def __init__(self) -> None:
        self.forest = Forest()
        self.recorded: list[tuple[Turn, bytes, bytes]] = []

    def say(
        self,
        request: Sequence[Message],
        reply: Message,
        tools: Sequence[Tool] = (),
        *,
        ids: Sequence[int] = (1, 2),
        fork: ForkReason | None = None,
    ) -> str:
        """`fork`: a reason that only the renderer would find; the turn is then a
        root."""
        match = self.forest.match(request, tools)
        parent = match.node
        messages = match.new
        reason = match.fork
        if fork is not None:
            parent = None
            messages = tuple(request)
            reason = fork
        if parent is None:
            messages = tuple(request)
        name = f"t-{len(self.recorded)}"
        parent_id = parent.turn.id if parent else None
        recorded_turn = replace(
            turn(name, parent_id, ids, [7]),
            fork_reason=reason.value if reason else "",
            finished_at=float(len(self.recorded)),
        )
        all_messages = (*messages, reply)
        self.forest.add(
            Node(
                turn=recorded_turn,
                parent=parent,
                messages=all_messages,
                closed=True,
                tools=tuple(tools),
            )
        )
        self.recorded.append(
            (
                recorded_turn,
                msgspec.json.encode(all_messages),
                msgspec.json.encode(list(tools)),
            )
        )
        return name

    def explained(self, turn_id: str) -> Explanation:
        explanations = explain_forks(self.recorded, MatchLevel.REWRITTEN, None)
        assert set(explanations) == {
            turn.id for turn, _, _ in self.recorded if turn.fork_reason
        }
        return explanations[turn_id]


def test_edited_reply_is_shown_with_the_recorded_reply() -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    session.say([SYSTEM, ASK, REPLY, MORE], REPLY_2)
    edited = Message("assistant", "2 it was")
    explanation = session.explained(session.say([SYSTEM, ASK, edited, MORE], REPLY_2))
    assert explanation.from_turn == "t-0"
    assert explanation.shared == 2
    assert explanation.messages == 4
    assert explanation.what == "Message 3 (assistant): another text"
    assert explanation.change
    assert explanation.change.recorded == "2 it is"
    assert explanation.change.sent == "2 it was"
    assert "as it got them" in explanation.advice


def test_an_edited_later_reply_branches_off_its_parent() -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    session.say([SYSTEM, ASK, REPLY, MORE], REPLY_2)
    name = session.say(
        [SYSTEM, ASK, REPLY, MORE, Message("assistant", "five"), MORE], REPLY_2
    )
    [turn] = [turn for turn, _, _ in session.recorded if turn.id == name]
    assert turn.parent_id == "t-0", "it records only what follows there"
    explanation = session.explained(name)
    assert explanation.from_turn == "t-1"
    assert explanation.shared == 4
    assert explanation.messages == 6
    assert explanation.what == "Message 5 (assistant): another text"


def test_a_changed_system_message_is_named() -> None:
    session = Session()
    session.say([Message("system", "It is 10:00."), ASK], REPLY)
    request = [Message("system", "It is 10:01."), ASK, REPLY, MORE]
    explanation = session.explained(session.say(request, REPLY_2))
    assert explanation.what == "The system message (message 1) has another text"
    assert explanation.change
    assert explanation.change.recorded == "It is 10:00."
    assert explanation.change.sent == "It is 10:01."
    assert "the time" in explanation.advice
    assert explanation.from_turn == ""


def test_first_request_with_another_system_message_is_explained_as_a_new_conversation() -> (
    None
):
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    explanation = session.explained(
        session.say([Message("system", "You add!"), ASK], REPLY_2)
    )
    assert explanation.what == "The system message (message 1) has another text"
    assert "send the system message as it was" in explanation.advice
    other = session.explained(
        session.say([SYSTEM, Message("user", "Give it a title")], REPLY_2)
    )
    assert other.what == "Message 2 (user): another text"
    assert "child session" in other.advice


def test_changed_tools_are_named() -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY, [ADD])
    request = [SYSTEM, ASK, REPLY, MORE]
    added = session.explained(session.say(request, REPLY_2, [ADD, SUB]))
    assert added.what == "The tools changed (added: sub)"
    assert "offer the same tools" in added.advice
    defined = session.explained(
        session.say(request, REPLY_2, [Tool(name="add", description="adds two")])
    )
    assert defined.what == "The definition of add changed"
    assert "descriptions" in defined.advice
    assert defined.change
    assert defined.change.recorded.strip() == "add: adds"
    assert defined.change.sent.strip() == "add: adds two"


def test_change_of_whitespace_is_explained_as_whitespace() -> None:
    session = Session()
    session.say([Message("system", "a\n\nb"), ASK], REPLY)
    explanation = session.explained(
        session.say([Message("system", "a\nb"), ASK, REPLY, MORE], REPLY_2)
    )
    assert "only whitespace differs" in explanation.what


def test_removed_messages_are_counted() -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    session.say([SYSTEM, ASK, REPLY, MORE], REPLY_2)
    explanation = session.explained(session.say([SYSTEM, REPLY_2, MORE], REPLY))
    assert (
        explanation.what
        == "From message 2 on, other messages were sent than were recorded"
    )
    assert explanation.change
    assert explanation.change.recorded.startswith("3 messages, the first is user: 1+1")
    assert explanation.change.sent == "0 messages"


def test_a_template_that_renders_the_history_differently_is_compared_by_tokens() -> (
    None
):
    session = Session()
    session.say([SYSTEM, ASK], REPLY, ids=(1, 2, 3))
    request = [SYSTEM, ASK, REPLY, MORE]
    name = session.say(
        request, REPLY_2, ids=(1, 9, 3, 7, 8), fork=ForkReason.TEMPLATE_CHANGED
    )
    explanation = session.explained(name)
    assert explanation.what.endswith("renders them differently from token 1 on")
    assert explanation.change
    assert explanation.change.recorded == "ids 1 2 3 7"
    assert explanation.change.sent == "ids 1 9 3 7 8"
    texts = explain_forks(
        session.recorded, MatchLevel.REWRITTEN, lambda ids: "-".join(map(str, ids))
    )
    change = texts[name].change
    assert change
    assert change.sent == "1-9-3-7-8"
    assert "check-template" in explanation.advice


@pytest.mark.parametrize(
    ("finish_reason", "ending"),
    [("abort", "was cancelled"), ("length", "ran out of tokens")],
)
def test_a_kept_interrupted_reply_is_named_with_how_it_ended(
    finish_reason: FinishReason, ending: str
) -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    turn, messages, tools = session.recorded[0]
    turn = replace(turn, finish_reason=finish_reason)
    session.recorded[0] = (turn, messages, tools)
    kept = [SYSTEM, ASK, Message("assistant", "2 it"), MORE]
    name = session.say(kept, REPLY_2, fork=ForkReason.INTERRUPTED_REPLY)
    found = session.explained(name)
    assert found.what == (
        "Message 3 is an interrupted reply that the agent keeps (its first 4 of 7"
        f" characters): the reply {ending}"
    )
    assert (found.from_turn, found.shared) == ("t-0", 2)
    assert kept_reply(turn) == f"The agent keeps the reply before it, which {ending}"
    assert kept_reply(replace(turn, finish_reason="stop")) == ""


def test_damaged_turns_are_left_out() -> None:
    session = Session()
    session.say([SYSTEM, ASK], REPLY)
    turn, messages, tools = session.recorded[0]
    session.say([SYSTEM, ASK, Message("assistant", "x"), MORE], REPLY_2)
    session.recorded[0] = (turn, b"\xff", tools)
    explanations = explain_forks(session.recorded, MatchLevel.REWRITTEN, None)
    assert explanations["t-1"].what == ""
    assert messages
