"""Which recorded turn a request continues, and why one departs from what was
recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from handmade_rollouts import turn
from hypothesis import given
from hypothesis import strategies as st

import invrl.gateway.turns.matching.forest as forest_module
from invrl.gateway.sessions.conversation_roots import auxiliary_roots
from invrl.gateway.turns.matching.forest import Forest, Match
from invrl.gateway.turns.matching.fork_changes import advice, common_characters
from invrl.gateway.turns.matching.message_identity import digests
from invrl.gateway.types import (
    ADVICE,
    ForkReason,
    MatchLevel,
    Message,
    Node,
    Tool,
    ToolCall,
)
from invrl.types.turns import Turn

SYSTEM = Message("system", "s")
ASK = Message("user", "q")
REPLY = Message("assistant", "a")
MORE = Message("user", "more")
REPLY_2 = Message("assistant", "b")


def node(
    name: str,
    messages: list[Message],
    parent: Node | None = None,
    tools: tuple[Tool, ...] = (),
) -> Node:
    parent_id = parent.turn.id if parent else None
    sampled_turn = turn(name, parent_id, [1, 2], [3])
    return Node(
        turn=sampled_turn,
        parent=parent,
        messages=tuple(messages),
        closed=True,
        tools=tools,
    )


def test_first_request_is_not_a_fork():
    match = Forest().match([SYSTEM, ASK])
    assert match.node is None
    assert match.depth == 0
    assert match.fork is None


def test_a_request_continues_the_deepest_turn():
    forest = Forest()
    first = node("1", [SYSTEM, ASK, REPLY])
    second = node("2", [MORE, REPLY_2], first)
    forest.add(first)
    forest.add(second)
    match = forest.match([SYSTEM, ASK, REPLY, MORE, REPLY_2, MORE])
    assert match.node == second
    assert match.depth == 5
    assert match.fork is None
    assert second.ids() == [1, 2, 3, 1, 2, 3]
    branch = forest.match([SYSTEM, ASK, REPLY, Message("user", "something else")])
    assert branch.node == first
    assert branch.depth == 3
    assert branch.fork is None


def test_a_replaced_reply_is_an_edited_history():
    forest = Forest()
    first = node("1", [ASK, REPLY])
    forest.add(first)
    forest.add(node("2", [MORE, REPLY_2], first))
    root = forest.match([ASK, Message("assistant", "edited"), MORE])
    assert root.node is None
    assert root.fork == ForkReason.HISTORY_EDITED
    branch = forest.match([ASK, REPLY, MORE, Message("assistant", "edited"), MORE])
    assert branch.node == first
    assert branch.depth == 2
    assert branch.fork == ForkReason.HISTORY_EDITED


def test_conversation_without_a_shared_reply_is_new():
    forest = Forest()
    forest.add(node("1", [SYSTEM, ASK, REPLY]))
    for messages in ([SYSTEM, MORE], [Message("user", "a title for this, please")]):
        assert forest.match(messages).fork is ForkReason.NEW_CONVERSATION


def test_shortened_history_before_a_reply_is_a_compaction():
    forest = Forest()
    forest.add(node("1", [SYSTEM, ASK, REPLY, MORE, REPLY_2]))
    summary = Message("user", "so far: the user asked q and got a")
    assert forest.match([SYSTEM, summary, REPLY_2, MORE]).fork is ForkReason.COMPACTED


def test_changed_tools_fork_with_their_own_reason():
    forest = Forest()
    calc = Tool(name="calc", parameters='{"a": 1, "b": 2}')
    shell = Tool(name="shell")
    first = node("1", [ASK, REPLY], tools=(calc,))
    forest.add(first)
    assert (
        forest.match(
            [ASK, REPLY, MORE], (Tool(name="calc", parameters='{"b":2,"a":1}'),)
        ).node
        is first
    )
    assert (
        forest.match([ASK, REPLY, MORE], (calc, shell)).fork is ForkReason.TOOLS_CHANGED
    )
    assert forest.match([ASK, REPLY, MORE]).fork is ForkReason.TOOLS_CHANGED


CALLS = Message(
    "assistant",
    " sure ",
    "hm",
    (ToolCall("c1", "calc", '{"a": 1, "b": 2}'), ToolCall("c2", "calc", "{}")),
)
RESULTS = [
    Message("tool", "3", tool_call_id="c1"),
    Message("tool", "0", tool_call_id="c2"),
]


@pytest.mark.parametrize(
    ("calls", "level"),
    [
        (CALLS, MatchLevel.EXACT),
        (replace(CALLS, content="sure"), MatchLevel.CANONICAL),
        (
            replace(
                CALLS,
                tool_calls=(
                    ToolCall("c1", "calc", '{"b":2,"a":1}'),
                    CALLS.tool_calls[1],
                ),
            ),
            MatchLevel.CANONICAL,
        ),
        (replace(CALLS, reasoning=""), MatchLevel.WITHOUT_REASONING),
        (replace(CALLS, reasoning="", content=""), MatchLevel.REWRITTEN),
        (replace(CALLS, reasoning="", content="other"), MatchLevel.REWRITTEN),
        (
            replace(
                CALLS,
                tool_calls=(ToolCall("c1", "calc", '{"a": 7}'), CALLS.tool_calls[1]),
            ),
            MatchLevel.REWRITTEN,
        ),
        (
            replace(
                CALLS,
                tool_calls=(
                    ToolCall("c1", "other", '{"a": 1, "b": 2}'),
                    CALLS.tool_calls[1],
                ),
            ),
            None,
        ),
        (
            replace(
                CALLS,
                content="",
                tool_calls=tuple(replace(c, id="x" + c.id) for c in CALLS.tool_calls),
            ),
            None,
        ),
        (replace(CALLS, tool_calls=CALLS.tool_calls[::-1]), None),
        (replace(CALLS, tool_calls=CALLS.tool_calls[:1]), None),
    ],
)
def test_altered_reply_matches_at_its_match_level(
    calls: Message, level: MatchLevel | None
):
    for most in MatchLevel:
        forest = Forest(most)
        first = node("1", [ASK, CALLS])
        forest.add(first)
        match = forest.match([ASK, calls, *RESULTS])
        if level is None or level > most:
            assert match.node is None
        else:
            assert match.node == first
            assert match.depth == 2
            assert match.fork is None
            assert match.level == level


def test_renamed_call_ids_match_if_the_results_answer_the_same_calls():
    forest = Forest()
    forest.add(node("1", [ASK, CALLS]))
    last = node("2", [*RESULTS, REPLY], forest.turn("1"))
    forest.add(last)
    renamed = replace(
        CALLS,
        tool_calls=tuple(replace(call, id="x" + call.id) for call in CALLS.tool_calls),
        reasoning="",
    )
    results = [
        replace(result, tool_call_id="x" + result.tool_call_id) for result in RESULTS
    ]
    assert forest.match([ASK, renamed, *results, REPLY, MORE]).node is last
    assert forest.match([ASK, renamed, *results[::-1], REPLY, MORE]).depth == 2


def test_roles_and_contents_cannot_be_confused():
    forest = Forest()
    forest.add(node("1", [Message("user", "ab"), REPLY]))
    assert forest.match([Message("usera", "b"), REPLY, MORE]).node is None
    assert (
        forest.match([Message("user", "a"), Message("user", "b"), REPLY, MORE]).node
        is None
    )


messages = st.builds(
    Message, st.sampled_from(["user", "assistant"]), st.sampled_from(["", "x", "y"])
)


@given(
    st.lists(st.lists(messages, min_size=1, max_size=3), min_size=1, max_size=6),
    st.data(),
)
def test_match_agrees_with_comparing_every_conversation(
    turns: list[list[Message]], data: st.DataObject
):
    forest = Forest()
    nodes = []
    for number, added in enumerate(turns):
        parent = data.draw(st.sampled_from([None, *nodes]))
        nodes.append(node(str(number), [*added, REPLY], parent))
        forest.add(nodes[-1])
    start = data.draw(st.sampled_from(nodes)).conversation()
    request = start[: data.draw(st.integers(0, len(start)))] + data.draw(
        st.lists(messages, max_size=4)
    )
    expected = max(
        (len(c) for n in nodes if (c := n.conversation()) == request[: len(c)]),
        default=0,
    )
    match = forest.match(request)
    assert match.depth == expected
    assert (match.node.conversation() if match.node else []) == request[:expected]


@pytest.mark.parametrize("level", list(MatchLevel))
@pytest.mark.parametrize("split", range(6))
def test_digests_continue_from_any_prefix(level: MatchLevel, split: int):
    talk = [ASK, CALLS, *RESULTS, REPLY, MORE]
    whole = digests(talk, level, b"tools")
    before = digests(talk[:split], level, b"tools")
    calls = {"c1": "1.0", "c2": "1.1"} if split > 1 else {}
    after = digests(talk[split:], level, before[-1], earlier=split, calls=calls)
    assert before + after[1:] == whole


@pytest.mark.parametrize("level", list(MatchLevel))
def test_long_conversation_matches_the_history_of_its_request(level: MatchLevel):
    """Also where a tool's result answers a call of turns ago, and ids of calls come
    again."""
    again = replace(CALLS, tool_calls=CALLS.tool_calls[:1])
    turns = [
        [ASK, CALLS],
        [RESULTS[0], again],
        [RESULTS[0], REPLY],
        [RESULTS[1], MORE, REPLY_2],
    ]
    forest = Forest(level)
    path = None
    said = []
    for at, added in enumerate(turns):
        path = node(str(at), added, path)
        forest.add(path)
        said += added
        match = forest.match([*said, MORE])
        assert match.node == path
        assert match.depth == len(said)
        assert match.fork is None
    renamed = [
        replace(
            message,
            tool_call_id="x" + message.tool_call_id if message.tool_call_id else "",
        )
        for message in said
    ]
    calls = [
        tuple(replace(call, id="x" + call.id) for call in message.tool_calls)
        for message in said
    ]
    renamed = [
        replace(message, tool_calls=own)
        for message, own in zip(renamed, calls, strict=True)
    ]
    assert (forest.match(renamed).node is path) == (level > MatchLevel.EXACT)


def test_results_of_renamed_calls_are_kept_under_our_ids():
    """A client gives calls ids of its own and sends them consistently: the conversation
    goes on for good."""
    forest = Forest(MatchLevel.CANONICAL)
    first = node("1", [ASK, CALLS])
    forest.add(first)
    renamed = replace(
        CALLS,
        tool_calls=tuple(replace(call, id="x" + call.id) for call in CALLS.tool_calls),
    )
    results = [
        replace(result, tool_call_id="x" + result.tool_call_id) for result in RESULTS
    ]
    match = forest.match([ASK, renamed, *results])
    assert match.node == first
    assert match.depth == 2
    assert match.new == tuple(RESULTS)
    second = node("2", [*match.new, REPLY], first)
    forest.add(second)
    again = forest.match([ASK, renamed, *results, REPLY, MORE])
    assert again.node == second
    assert again.depth == 5
    assert again.fork is None
    assert again.new == (MORE,)
    other = replace(CALLS, tool_calls=(ToolCall("xc1", "calc", "{}"),))
    assert forest.match([ASK, renamed, other, results[0]]).new == (other, results[0])


def test_trajectory_whose_call_ids_the_client_has_continues():
    """Two samples made the same calls behind other thinking, which the client leaves
    out."""
    forest = Forest()
    replies = []
    for branch in "ab":
        calls = tuple(replace(call, id=branch + call.id) for call in CALLS.tool_calls)
        replies.append(replace(CALLS, reasoning=branch, tool_calls=calls))
        forest.add(node(branch, [ASK, replies[-1]]))
    for branch, reply in zip("ab", replies, strict=True):
        results = [
            replace(result, tool_call_id=branch + result.tool_call_id)
            for result in RESULTS
        ]
        match = forest.match([ASK, replace(reply, reasoning=""), *results])
        assert match.node == forest.turn(branch)
        assert match.new == tuple(results)
    assert forest.match(
        [ASK, replace(CALLS, reasoning=""), *RESULTS]
    ).node is forest.turn("b")


SCHEMA = """{"type": "object", "properties": {
  "path": {"type": "string"},
  "replace_all": {"type": "boolean", "default": false},
  "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}}},
 "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"default": 2.0}}}}}"""
EDIT = Tool(name="edit", parameters=SCHEMA)


@pytest.mark.parametrize(
    ("sampled", "sent", "same"),
    [
        ('{"path": "a"}', '{"path": "a", "replace_all": false}', True),
        ('{"path": "a", "replace_all": false}', '{"path": "a"}', True),
        ('{"path": "a"}', '{"path": "a", "replace_all": true}', False),
        ('{"path": "a"}', '{"path": "a", "replace_all": null}', False),
        (
            '{"points": [{"x": 1}, {"x": 2, "y": 3}]}',
            '{"points": [{"x": 1, "y": 2}, {"x": 2, "y": 3}]}',
            True,
        ),
        ('{"points": [{"x": 1}]}', '{"points": [{"x": 1, "y": 3}]}', False),
        ('{"path": "a"', '{"path": "a", "replace_all": false}', False),
    ],
)
def test_a_missing_argument_is_the_default_of_its_schema(
    sampled: str, sent: str, same: bool
):
    forest = Forest(MatchLevel.CANONICAL)
    first = node(
        "1",
        [ASK, Message("assistant", tool_calls=(ToolCall("c1", "edit", sampled),))],
        tools=(EDIT,),
    )
    forest.add(first)
    reply = Message("assistant", tool_calls=(ToolCall("c1", "edit", sent),))
    match = forest.match([ASK, reply, RESULTS[0]], (EDIT,))
    assert (match.node is first) == same
    assert match.fork == (None if same else ForkReason.HISTORY_EDITED)


@pytest.mark.parametrize(
    "schema",
    [
        '{"properties": [], "default": 1}',
        '{"$ref": "#/$ref", "default": 1}',
        '"default"',
    ],
)
def test_unusable_schema_gives_no_defaults(schema: str):
    forest = Forest(MatchLevel.CANONICAL)
    tool = Tool(name="calc", parameters=schema)
    forest.add(node("1", [ASK, CALLS], tools=(tool,)))
    assert (
        forest.match([ASK, replace(CALLS, content="sure"), *RESULTS], (tool,)).depth
        == 2
    )


REACT = 'Thought: I need it.\nAction: calc\nAction Input: {"a": "it\'s", "b": [1, true, null]}'


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        (
            "Thought: I need it.\nAction: calc\nAction Input: {'a': \"it's\", 'b': [1, True, None]}",
            True,
        ),
        (
            'Thought: I need it. Action: calc\nAction Input: {\n "b": [1, true, null], "a": "it\'s"}\n',
            True,
        ),
        (
            "Thought: I need it.\nAction: calc\nAction Input: {'a': \"it's\", 'b': [2, True, None]}",
            False,
        ),
        (
            "Thought: I want it.\nAction: calc\nAction Input: {'a': \"it's\", 'b': [1, True, None]}",
            False,
        ),
    ],
)
def test_json_objects_in_rewritten_text_are_compared_by_value(sent: str, same: bool):
    forest = Forest(MatchLevel.REWRITTEN)
    first = node("1", [ASK, Message("assistant", REACT)])
    forest.add(first)
    match = forest.match([ASK, Message("assistant", sent), MORE])
    assert (match.node is first) is same
    braces = "{" * 100_000 + "{'a': " * 10_000
    assert forest.match([ASK, Message("assistant", braces), MORE]).node is None


def test_code_in_a_text_is_not_parsed_for_objects(monkeypatch: pytest.MonkeyPatch):
    """Each try takes up to 4 ms, and every request has the whole history read again."""
    monkeypatch.setattr(
        "ast.literal_eval", lambda line: pytest.fail(f"parsed {line!r}")
    )
    code = "def f(x):\n    d = {a: b for a in x}\n    return {\n        'k': d,\n    }"
    forest = Forest(MatchLevel.REWRITTEN)
    first = node("1", [ASK, Message("assistant", code)])
    forest.add(first)
    assert (
        forest.match([ASK, Message("assistant", code.replace("    ", " ")), MORE]).node
        is first
    )


def changed(match: Match) -> tuple[ForkReason | None, int, str, str, str]:
    assert match.change is not None
    change = match.change
    return match.fork, change.message, change.part, change.recorded, change.sent


def test_changed_time_in_the_system_prompt_is_named_and_not_called_compacted():
    def system(minute: int) -> Message:
        return Message(
            "system",
            f"You are a helpful agent. The time is 09:{minute}, and the day is long.",
        )

    forest = Forest()
    okay = Message("assistant", "okay")
    history: list[Message] = []
    for number in range(1, 4):  # the reply says the same in every turn
        messages = [system(40 + number), ASK, *history, okay]
        forest.add(node(str(number), messages))
        history += [okay, MORE]
    match = forest.match([system(44), ASK, okay, MORE, okay, MORE, okay, MORE])
    assert changed(match) == (
        ForkReason.CONTEXT_EDITED,
        0,
        "content",
        "… agent. The time is 09:43, and the day is long.",
        "… agent. The time is 09:44, and the day is long.",
    )
    assert "newest message" in advice(ForkReason.CONTEXT_EDITED, match.change)


def test_departing_request_is_compared_once_with_each_message(
    monkeypatch: pytest.MonkeyPatch,
):
    """An agent that polls has many equal replies, and with the time in its system
    prompt each request departs from all of them. What was recorded is not taken apart
    anew for each candidate."""
    forest = Forest()
    turns = 40
    history: list[Message] = []
    for number in range(turns):
        call = ToolCall(f"call-{number}", "poll", "{}")
        poll = Message("assistant", tool_calls=(call,))
        system = Message("system", f"time {number}")
        forest.add(node(str(number), [system, ASK, *history, poll]))
        result = Message("tool", "not yet", tool_call_id=call.id)
        history += [poll, result]
    sent = [Message("system", "time now"), ASK, *history]
    first = forest.match(sent)
    digested: list[int] = []

    def counted(messages: Sequence[Message], *args: Any, **options: Any) -> list[bytes]:
        digested.append(len(messages))
        return digests(messages, *args, **options)

    monkeypatch.setattr(forest_module, "digests", counted)
    again = forest.match(sent)
    assert changed(again) == changed(first)
    assert again.fork is ForkReason.CONTEXT_EDITED
    # whole conversations, of any tools, message by message; some to spare
    passes = len(MatchLevel) + 3
    assert sum(digested) <= passes * len(sent)


@given(
    st.text("ab", max_size=20), st.text("ab", max_size=20), st.text("ab", max_size=20)
)
def test_differing_texts_are_shown_from_their_first_difference(
    before: str, one: str, other: str
):
    recorded = before + one
    sent = before + other
    common = common_characters(recorded, sent)
    assert recorded[:common] == sent[:common]
    assert len(before) <= common <= min(len(recorded), len(sent))
    assert (
        recorded[common : common + 1] != sent[common : common + 1] or recorded == sent
    )


def test_an_edited_message_behind_a_matched_one_is_a_fork_with_a_reason():
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    forest.add(node("2", [*RESULTS, REPLY], first))
    cleared = replace(RESULTS[1], content="[cleared]")
    match = forest.match([ASK, CALLS, RESULTS[0], cleared, REPLY, MORE])
    assert match.node == first
    assert match.depth == 2
    assert changed(match) == (ForkReason.CONTEXT_EDITED, 3, "content", "0", "[cleared]")


def test_results_for_other_calls_are_named():
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    forest.add(node("2", [*RESULTS, REPLY], first))
    swapped = [
        replace(RESULTS[0], tool_call_id="c2"),
        replace(RESULTS[1], tool_call_id="c1"),
    ]
    match = forest.match([ASK, CALLS, *swapped, REPLY, MORE])
    assert match.node == first
    assert match.depth == 2
    assert changed(match) == (ForkReason.CONTEXT_EDITED, 2, "tool_call_id", "c1", "c2")


def test_advice_knows_the_defaults_of_schemas():
    forest = Forest(MatchLevel.EXACT)
    reply = Message("assistant", tool_calls=(ToolCall("c1", "edit", '{"path": "a"}'),))
    forest.add(node("1", [ASK, reply], tools=(EDIT,)))
    filled = replace(
        reply,
        tool_calls=(ToolCall("c1", "edit", '{"path": "a", "replace_all": false}'),),
    )
    match = forest.match([ASK, filled, RESULTS[0]], (EDIT,))
    assert match.fork is ForkReason.HISTORY_EDITED
    assert "--gateway.match-level canonical " in advice(match.fork, match.change)


def test_compacted_history_names_the_removed_messages():
    forest = Forest()
    first = node("1", [SYSTEM, ASK, REPLY])
    forest.add(first)
    forest.add(node("2", [MORE, REPLY_2], first))
    summary = Message("user", "so far: the user asked q and got a")
    assert changed(forest.match([SYSTEM, summary, REPLY_2, MORE])) == (
        ForkReason.COMPACTED,
        1,
        "messages",
        "3 messages, the first is user: q",
        f"1 messages, the first is user: {summary.content}",
    )
    inserted = forest.match([SYSTEM, summary, ASK, REPLY, MORE])
    assert changed(inserted)[:4] == (
        ForkReason.CONTEXT_EDITED,
        1,
        "messages",
        "0 messages",
    )


@pytest.mark.parametrize("level", list(MatchLevel))
def test_advice_names_a_higher_match_level_only_where_it_helps(level: MatchLevel):
    forest = Forest(level)
    forest.add(node("1", [ASK, CALLS]))
    for message, needed in (
        (replace(CALLS, content="sure"), MatchLevel.CANONICAL),
        (replace(CALLS, reasoning=""), MatchLevel.WITHOUT_REASONING),
        (replace(CALLS, content=""), MatchLevel.REWRITTEN),
        (replace(CALLS, tool_calls=()), None),
    ):
        match = forest.match([ASK, message, MORE])
        if needed is not None and needed <= level:
            assert match.fork is None
            continue
        assert match.fork is ForkReason.HISTORY_EDITED
        text = advice(match.fork, match.change)
        if needed is None:
            assert text == ADVICE[match.fork]
            assert "--gateway.match-level" not in text
        else:
            assert f"--gateway.match-level {needed.name.lower()} " in text


def test_changed_tools_are_shown():
    forest = Forest()
    calc = Tool(name="calc", description="Computes sums.")
    forest.add(node("1", [ASK, REPLY], tools=(calc,)))
    added = forest.match([ASK, REPLY, MORE], (calc, Tool(name="shell")))
    assert changed(added) == (
        ForkReason.TOOLS_CHANGED,
        0,
        "tools",
        "calc",
        "calc, shell",
    )
    described = forest.match(
        [ASK, REPLY, MORE], (replace(calc, description="Computes products."),)
    )
    assert changed(described)[3:] == (
        "calc: Computes sums. ",
        "calc: Computes products. ",
    )


def test_reply_matched_by_its_calls_reports_its_changed_text():
    forest = Forest(MatchLevel.REWRITTEN)
    first = node("1", [ASK, CALLS])
    forest.add(first)
    match = forest.match([ASK, replace(CALLS, content="", reasoning=""), *RESULTS])
    assert match.node == first
    assert match.level == MatchLevel.REWRITTEN
    assert changed(match) == (None, 1, "content", "sure", "")
    second = node("2", [*match.new, REPLY], first)
    forest.add(second)
    assert (
        forest.match(
            [ASK, replace(CALLS, content="", reasoning=""), *RESULTS, REPLY, MORE]
        ).node
        is second
    )


def test_a_reply_with_the_stop_string_behind_it_is_the_recorded_one():
    """Clients append it, because the API leaves it out. A reply that has other text
    behind it is edited."""
    stopped = replace(
        node("a", [SYSTEM, ASK, Message("assistant", "The answer")]), stop="</answer>"
    )
    forest = Forest()
    forest.add(stopped)
    for text in ("The answer</answer>", "The answer</answer>\n", "The answer"):
        match = forest.match([SYSTEM, ASK, Message("assistant", text), MORE])
        assert match.node == stopped
        assert match.depth == 3
        assert match.fork is None
    edited = forest.match(
        [SYSTEM, ASK, Message("assistant", "The answer</other>"), MORE]
    )
    assert edited.fork is ForkReason.HISTORY_EDITED
    strict = Forest(MatchLevel.CANONICAL)
    strict.add(stopped)
    assert (
        strict.match(
            [SYSTEM, ASK, Message("assistant", "The answer</answer>"), MORE]
        ).fork
        is not None
    )


SAID = replace(CALLS, content="")
"""The calls of a reply without the text beside them."""
RENAMED = Message(
    "assistant",
    tool_calls=tuple(
        replace(call, id=f"own-{place}") for place, call in enumerate(CALLS.tool_calls)
    ),
)
RENAMED_RESULTS = [
    replace(result, tool_call_id=f"own-{place}") for place, result in enumerate(RESULTS)
]


@pytest.mark.parametrize("text", ["sure", "sure\n\nb", " sure b"])
@pytest.mark.parametrize(
    ("calls", "results"), [(SAID, RESULTS), (RENAMED, RENAMED_RESULTS)]
)
def test_text_moved_from_a_call_into_a_later_reply_continues_the_recording(
    text: str, calls: Message, results: list[Message]
):
    """The text is not rendered a second time: the model's own tokens have it."""
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    match = forest.match([ASK, calls, *results, Message("assistant", "sure")])
    assert (match.node, match.fork, match.level) == (
        first,
        None,
        MatchLevel.REWRITTEN,
    )
    assert match.new == tuple(RESULTS)
    assert changed(match)[1:] == (1, "content", "sure", "")
    second = node("2", [*match.new, REPLY_2], first)
    forest.add(second)
    ending = [REPLY_2] if text == "sure" else []
    later = forest.match(
        [ASK, calls, *results, Message("assistant", text), *ending, MORE]
    )
    assert (later.node, later.fork, later.new) == (second, None, (MORE,))


def test_a_reply_that_repeats_the_text_beside_a_call_is_its_own():
    forest = Forest()
    first = node("1", [ASK, CALLS])
    second = node("2", [*RESULTS, Message("assistant", "sure, it is 4")], first)
    forest.add(first)
    forest.add(second)
    sent = [ASK, SAID, *RESULTS, Message("assistant", "sure, it is 4"), MORE]
    assert forest.match(sent).node is second


def test_text_sent_on_as_the_users_stays_the_users():
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    users = Message("user", "sure")
    match = forest.match([ASK, SAID, *RESULTS, users])
    assert (match.node, match.fork, match.new) == (first, None, (*RESULTS, users))


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_moved_text_that_forks_is_not_called_an_edit(role: str):
    strict = Forest(MatchLevel.WITHOUT_REASONING)
    strict.add(node("1", [ASK, CALLS]))
    match = strict.match([ASK, SAID, *RESULTS, Message(role, "sure")])
    assert match.fork is ForkReason.TEXT_MOVED
    assert "--gateway.match-level rewritten" in advice(match.fork, match.change)
    dropped = strict.match([ASK, SAID, *RESULTS, Message(role, "else")])
    assert dropped.fork is ForkReason.HISTORY_EDITED
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    forest.add(node("2", [*RESULTS, REPLY_2], first))
    altered = Message("assistant", "Thought: sure\nb")
    match = forest.match([ASK, SAID, *RESULTS, altered, MORE])
    assert (match.node, match.fork) == (first, ForkReason.TEXT_MOVED)
    assert advice(match.fork, match.change) == ADVICE[ForkReason.TEXT_MOVED]


FIRST_CALL = Message("assistant", " sure ", "hm", CALLS.tool_calls[:1])
SECOND_CALL = Message("assistant", tool_calls=CALLS.tool_calls[1:])
SPLIT = {
    "calls, then results": [FIRST_CALL, SECOND_CALL, *RESULTS],
    "each result behind its call": [FIRST_CALL, RESULTS[0], SECOND_CALL, RESULTS[1]],
    "the text again beside each call": [
        replace(FIRST_CALL, content="sure", reasoning=""),
        RESULTS[0],
        replace(SECOND_CALL, content="sure"),
        RESULTS[1],
    ],
    "without the text": [replace(FIRST_CALL, content=""), SECOND_CALL, *RESULTS],
    "the text before the calls": [
        Message("assistant", "sure"),
        replace(FIRST_CALL, content=""),
        RESULTS[0],
        SECOND_CALL,
        RESULTS[1],
    ],
    "the text before all calls": [Message("assistant", "sure"), SAID, *RESULTS],
    "the text behind the calls": [
        replace(FIRST_CALL, content=""),
        RESULTS[0],
        SECOND_CALL,
        RESULTS[1],
        Message("assistant", "sure"),
    ],
}
"""Ways in which one reply with two calls comes back in several messages."""


@pytest.mark.parametrize("sent", SPLIT.values(), ids=list(SPLIT))
def test_a_reply_that_comes_back_in_several_messages_continues_the_recording(
    sent: list[Message],
):
    """The model has made both calls before it is told the first result."""
    forest = Forest()
    first = node("1", [SYSTEM, ASK, CALLS])
    forest.add(first)
    match = forest.match([SYSTEM, ASK, *sent])
    assert (match.node, match.fork, match.level) == (first, None, MatchLevel.REWRITTEN)
    assert match.depth == 3
    assert match.new == tuple(RESULTS)
    assert match.change is not None
    assert match.change.message == (3 if sent[0] == Message("assistant", "sure") else 2)
    second = node("2", [*match.new, REPLY], first)
    forest.add(second)
    later = forest.match([SYSTEM, ASK, *sent, REPLY, MORE])
    assert (later.node, later.fork, later.new) == (second, None, (MORE,))
    strict = Forest(MatchLevel.WITHOUT_REASONING)
    strict.add(first)
    assert strict.match([SYSTEM, ASK, *sent]).fork is not None


def test_a_split_reply_of_which_the_text_was_moved_is_named_in_its_own_place():
    forest = Forest()
    first = node("1", [ASK, CALLS])
    forest.add(first)
    second_calls = replace(
        CALLS, tool_calls=tuple(replace(c, id="d" + c.id) for c in CALLS.tool_calls)
    )
    second = node("2", [*RESULTS, second_calls], first)
    forest.add(second)
    results = [replace(r, tool_call_id="d" + r.tool_call_id) for r in RESULTS]
    sent = [ASK, *SPLIT["each result behind its call"]]
    sent += [replace(second_calls, content=""), *results, Message("assistant", "sure")]
    match = forest.match(sent)
    assert (match.node, match.fork, match.new) == (second, None, tuple(results))
    assert changed(match)[1:] == (5, "content", "sure", "")


def altered(message: Message, **fields: str) -> Message:
    """With other fields in its call."""
    [call] = message.tool_calls
    return replace(message, tool_calls=(replace(call, **fields),))


@pytest.mark.parametrize(
    "sent",
    [
        [FIRST_CALL, RESULTS[0]],
        [FIRST_CALL, altered(SECOND_CALL, arguments='{"a": 1}'), *RESULTS],
        [FIRST_CALL, altered(SECOND_CALL, name="other"), *RESULTS],
        [FIRST_CALL, altered(SECOND_CALL, id="c3"), *RESULTS],
        [
            FIRST_CALL,
            replace(
                SECOND_CALL,
                tool_calls=(CALLS.tool_calls[1], ToolCall("c3", "calc", "{}")),
            ),
            *RESULTS,
        ],
        [SECOND_CALL, RESULTS[1], replace(FIRST_CALL, content=""), RESULTS[0]],
        [FIRST_CALL, RESULTS[0], MORE, SECOND_CALL, RESULTS[1]],
        [FIRST_CALL, RESULTS[1], SECOND_CALL, RESULTS[0]],
        [FIRST_CALL, RESULTS[0], replace(SECOND_CALL, content="b"), RESULTS[1]],
        [REPLY_2, FIRST_CALL, SECOND_CALL, *RESULTS],
    ],
)
def test_messages_that_are_not_exactly_the_parts_of_a_reply_fork(sent: list[Message]):
    forest = Forest()
    forest.add(node("1", [ASK, CALLS]))
    match = forest.match([ASK, *sent])
    assert (match.node, match.fork) == (None, ForkReason.HISTORY_EDITED)


def test_a_kept_interrupted_reply_is_named():
    """It was cancelled, was out of tokens, or reached the client in part."""
    whole = Message("assistant", "The answer is four")
    kept = [Message("assistant", "The answer is four"), Message("assistant", "The ans")]

    def ended(name: str, finish_reason: str) -> Node:
        of_turn = node(name, [ASK, whole])
        turn = replace(of_turn.turn, finish_reason=finish_reason)
        return replace(of_turn, turn=turn)

    cancelled = ended("a", "abort")
    forest = Forest(delivered=set())
    forest.add_cancelled(cancelled)
    assert forest.match([ASK]).fork is None
    for reply in kept:
        match = forest.match([ASK, reply, MORE])
        assert (match.node, match.fork, match.kept) == (
            None,
            ForkReason.INTERRUPTED_REPLY,
            cancelled,
        )
    cut = ended("b", "length")
    forest = Forest(delivered={"b"})
    forest.add(cut)
    assert forest.match([ASK, kept[0], MORE]).node is cut
    assert forest.match([ASK, kept[1], MORE]).kept is cut
    for delivered, reason in (
        (set[str](), ForkReason.INTERRUPTED_REPLY),
        ({"c"}, ForkReason.HISTORY_EDITED),
        (None, ForkReason.HISTORY_EDITED),
    ):
        forest = Forest(delivered=delivered)
        forest.add(ended("c", "stop"))
        assert forest.match([ASK, kept[1], MORE]).fork is reason


def test_another_agents_system_prompt_is_a_handoff():
    triage = Message("system", "You triage requests of customers.")
    expert = Message("system", "As an expert on refunds, decide whether one is due.")
    later = Message("system", "You triage requests of customers. It is noon.")
    forest = Forest()
    forest.add(node("a", [triage, ASK, REPLY]))
    assert forest.match([expert, ASK, REPLY, MORE]).fork is ForkReason.HANDOFF
    assert forest.match([ASK, REPLY, MORE]).fork is ForkReason.HANDOFF
    assert forest.match([later, ASK, REPLY, MORE]).fork is ForkReason.CONTEXT_EDITED
    assert (
        forest.match([expert, Message("user", "else"), REPLY, MORE]).fork
        is ForkReason.CONTEXT_EDITED
    )


def test_agents_that_share_a_preamble_are_told_apart_by_their_tools():
    preamble = "You are one of several agents, who hand over to each other."
    triage = Message("system", f"{preamble} You triage.")
    calculator = Message("system", f"{preamble} You calculate.")
    calc = Tool(name="calc", parameters="{}")
    forest = Forest()
    forest.add(node("1", [triage, ASK, REPLY]))
    messages = [calculator, ASK, REPLY, MORE]
    assert forest.match(messages).fork is ForkReason.CONTEXT_EDITED
    assert forest.match(messages, (calc,)).fork is ForkReason.HANDOFF
    edited = [triage, Message("user", "q?"), REPLY, MORE]
    assert forest.match(edited, (calc,)).fork is ForkReason.CONTEXT_EDITED


def test_steps_that_render_their_history_into_the_prompt_are_one_conversation():
    """DSPy's ReAct: every step is a root, and so is a title; only the title is beside
    the main loop."""

    def root(name: str, prompt: list[int]) -> Turn:
        return replace(
            node(name, [ASK, REPLY]).turn,
            context_ids_T=np.array(prompt, np.int32),
            fork_reason="" if name == "step-0" else "new_conversation",
        )

    fields = list(range(100, 180))
    question = list(range(200, 210))
    trailer = list(range(300, 310))
    turns = [
        root(
            f"step-{number}",
            [*fields, *question, *range(400, 400 + 20 * number), *trailer],
        )
        for number in range(5)
    ]
    title = root("title", [*range(500, 520), *question])
    names = {turn.id for turn in (*turns, title)}
    assert auxiliary_roots([turns[0], title, *turns[1:]], names) == ("title",)
