"""SGLang's parsers as we use them: whole and in pieces of any size, the same calls and the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.gateway.message import Message, Tool, ToolChoice
from invrl.gateway.parsing import Parsers, detect_parsers

TOOLS = (Tool(name="get_weather", parameters='{"type": "object"}'), Tool(name="halt"))
Call = tuple[str, dict[str, Any]]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(call: Call, arguments: str = "arguments") -> str:
    return as_json({"name": call[0], arguments: call[1]})


def deepseek(between: str, call: Callable[[Call], str]) -> Callable[[Sequence[Call]], str]:
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def spelled(calls: Sequence[Call]) -> str:
        inner = between.join(begin + call(each) + end for each in calls)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"

    return spelled


SPELLED: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "qwen25": ("qwen25", lambda calls: "\n".join(f"<tool_call>\n{named(c)}\n</tool_call>" for c in calls)),
    "hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>{named(c)}</tool_call>" for c in calls)),
    "mistral": ("mistral", lambda calls: f"[TOOL_CALLS] [{', '.join(map(named, calls))}]"),
    "mistral, compact": (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls),
    ),
    "llama3": ("llama3", lambda calls: "<|python_tag|>" + ";".join(named(c, "parameters") for c in calls)),
    "llama3, bare": ("llama3", lambda calls: ";".join(named(c, "parameters") for c in calls)),
    "deepseekv3": (
        "deepseekv3",
        deepseek("\n", lambda c: f"function<｜tool▁sep｜>{c[0]}\n```json\n{as_json(c[1])}\n```"),
    ),
    "deepseekv31": ("deepseekv31", deepseek("", lambda c: f"{c[0]}<｜tool▁sep｜>{as_json(c[1])}")),
}
"""How models of a family write calls, by SGLang's name of the parser."""

# A hermes call may not hold its own end mark: there SGLang's parsers of whole texts and of streams differ.
words = st.sampled_from(
    [
        "Paris",
        "Ürümqi 漢字",
        'a "b"',
        "it's: 'x'",
        "{",
        "}",
        "[1]",
        "a;b",
        '{"name": "halt"}',
        "\n",
        "",
        "```",
    ]
)
values = st.one_of(words, st.integers(), st.booleans(), st.none(), st.lists(words, max_size=2))
calls = st.lists(
    st.tuples(
        st.sampled_from(["get_weather", "halt"]),
        st.dictionaries(st.sampled_from(["city", "n", "days"]), values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
before = st.sampled_from(["", "Let me look.", "a < b <tool", "Hm\n", "[x] {y}"])
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def parsed(
    parsers: Parsers | str, text: str, pieces: Sequence[int] = (), *, parallel: bool = True, prompt: str = ""
) -> Message:
    """In pieces of these sizes, over and over; whole without any."""
    parsers = Parsers(tool_calls=parsers) if isinstance(parsers, str) else parsers
    stream = bool(pieces)
    parser = parsers.reply(TOOLS, ToolChoice(), parallel=parallel, prompt_text=prompt, stream=stream)
    at, turn = 0, 0
    while at < len(text):
        size = pieces[turn % len(pieces)] if pieces else len(text)
        parser.push(text[at : at + size])
        at, turn = at + size, turn + 1
    parser.finish()
    return parser.message


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=30, deadline=None)
@given(made=calls, text=before, pieces=sizes)
def test_streamed_calls_are_the_whole_ones_and_those_that_were_made(
    spelling: str, made: list[Call], text: str, pieces: list[int]
):
    name, spelled = SPELLED[spelling]
    text = "" if spelling == "llama3, bare" else text  # a bare call is all of its reply
    whole, streamed = (parsed(name, text + spelled(made), sizes) for sizes in ((), pieces))
    for message in (whole, streamed):
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == made
        assert message.content.strip() == text.strip()
    assert [c.arguments for c in whole.tool_calls] == [c.arguments for c in streamed.tool_calls]


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=30, deadline=None)
@given(made=calls, text=before, pieces=sizes, at=st.floats(0, 1))
def test_a_reply_that_ends_inside_of_a_call_keeps_its_text_or_the_begun_call(
    spelling: str, made: list[Call], text: str, pieces: list[int], at: float
):
    name, spelled = SPELLED[spelling]
    reply = ("" if spelling == "llama3, bare" else text) + spelled(made)
    reply = reply[: int(at * len(reply))]
    whole, streamed = (parsed(name, reply, sizes) for sizes in ((), pieces))
    for message in (whole, streamed):
        names = [call.name for call in message.tool_calls]
        assert names == [call[0] for call in made][: len(names)]
        assert names or message.content.strip() == reply.strip()
    assert len(streamed.tool_calls) >= len(whole.tool_calls)


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=20, deadline=None)
@given(text=st.text(max_size=40), pieces=sizes)
def test_text_without_calls_is_content_as_it_is(spelling: str, text: str, pieces: list[int]):
    for sizes_ in ((), pieces):
        message = parsed(SPELLED[spelling][0], text, sizes_)
        assert (message.content, message.tool_calls) == (text, ())


@settings(max_examples=60, deadline=None)
@given(thought=before, text=before, made=calls | st.just([]), pieces=sizes)
@pytest.mark.parametrize(("parser", "opened"), [("qwen3", "<think>\n"), ("deepseek-v3", "")])
def test_thinking_is_told_apart_whole_and_streamed(
    parser: str, opened: str, thought: str, text: str, made: list[Call], pieces: list[int]
):
    shown = f"{opened}{thought}\n</think>\n\n{text}{SPELLED['qwen25'][1](made)}"
    prompt = "assistant\n" if opened else "<｜Assistant｜><think>\n"
    for sizes_ in ((), pieces):
        parsers = Parsers(tool_calls="qwen25", reasoning=parser)
        message = parsed(parsers, shown, sizes_, prompt=prompt)
        assert message.reasoning.strip() == thought.strip()
        assert message.content.strip() == text.strip()
        assert not (thought.strip() and message.content.startswith("\n"))
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == made
    refused = parsed(Parsers(tool_calls="qwen25", reasoning=parser), text, pieces, prompt="</think>\n\n")
    assert (refused.content, refused.reasoning) == (text, "")


@pytest.mark.parametrize("pieces", [(), (3,)])
def test_one_call_at_most_where_parallel_calls_are_off(pieces: tuple[int, ...]):
    name, spelled = SPELLED["qwen25"]
    text = spelled([("halt", {}), ("get_weather", {"city": "x"})])
    [call] = parsed(name, text, pieces, parallel=False).tool_calls
    assert call.name == "halt"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ messages[0].content }}", ("", "")),
        ("{% if tools %}<|python_tag|>{% endif %}", ("llama3", "")),
        ("{% if tools %}Environment: ipython{% endif %}", ("llama3", "")),
        ("{{ tools }}'<｜tool▁calls▁begin｜>' + '\n```json\n'", ("deepseekv3", "")),
        (
            "{{ tools }}'<｜tool▁calls▁begin｜>' thinking is defined '</think>'",
            ("deepseekv31", "deepseek-v3"),
        ),
        ("{{ content.split('</think>')[-1] }}", ("", "deepseek-r1")),
        ("{{ tools }}[TOOL_CALLS]", ("mistral", "")),
        ("{{ tools }}<tool_call> enable_thinking </think>", ("qwen25", "qwen3")),
    ],
)
def test_parsers_are_found_by_the_template(template: str, found: tuple[str, str]):
    assert detect_parsers(template) == found
