"""SGLang's parsers as we use them: whole and in pieces of any size, the same calls and
the same text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.rendering.replies.reply_parser import join_deltas, reply_message
from invrl.gateway.types import Message, Tool, ToolChoice

TOOLS = (Tool(name="get_weather", parameters='{"type": "object"}'), Tool(name="halt"))
Call = tuple[str, dict[str, Any]]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def named(call: Call, arguments: str = "arguments") -> str:
    return as_json({"name": call[0], arguments: call[1]})


def deepseek(
    between: str, call: Callable[[Call], str]
) -> Callable[[Sequence[Call]], str]:
    begin = "<｜tool▁call▁begin｜>"
    end = "<｜tool▁call▁end｜>"

    def spelled(calls: Sequence[Call]) -> str:
        inner = between.join(begin + call(each) + end for each in calls)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"

    return spelled


def tagged(given: dict[str, Any]) -> str:
    return "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items()
    )


def dsml(kind: str, inner: str, name: str = "") -> str:
    shown = f' name="{name}"' if name else ""
    return f"<｜DSML｜{kind}{shown}>\n{inner}\n</｜DSML｜{kind}>"


SPELLED: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "qwen25": (
        "qwen25",
        lambda calls: "\n".join(
            f"<tool_call>\n{named(c)}\n</tool_call>" for c in calls
        ),
    ),
    "hermes": (
        "hermes",
        lambda calls: "\n".join(f"<tool_call>{named(c)}</tool_call>" for c in calls),
    ),
    "mistral": (
        "mistral",
        lambda calls: f"[TOOL_CALLS] [{', '.join(map(named, calls))}]",
    ),
    "mistral, compact": (
        "mistral",
        lambda calls: "".join(
            f"[TOOL_CALLS]{name}[ARGS]{as_json(given)}" for name, given in calls
        ),
    ),
    "llama3": (
        "llama3",
        lambda calls: (
            "<|python_tag|>" + ";".join(named(c, "parameters") for c in calls)
        ),
    ),
    "llama3, bare": (
        "llama3",
        lambda calls: ";".join(named(c, "parameters") for c in calls),
    ),
    "deepseekv3": (
        "deepseekv3",
        deepseek(
            "\n",
            lambda c: f"function<｜tool▁sep｜>{c[0]}\n```json\n{as_json(c[1])}\n```",
        ),
    ),
    "deepseekv31": (
        "deepseekv31",
        deepseek("", lambda c: f"{c[0]}<｜tool▁sep｜>{as_json(c[1])}"),
    ),
    "deepseekv32": (
        "deepseekv32",
        lambda calls: dsml(
            "function_calls",
            "".join(dsml("invoke", as_json(c[1]), c[0]) for c in calls),
        ),
    ),
}
"""How models of a family write calls, by SGLang's name of the parser."""
ENDED = {
    name: SPELLED[name][1]
    for name in ("qwen25", "hermes", "deepseekv3", "deepseekv31", "deepseekv32")
}
ENDED["qwen3_coder"] = lambda calls: "".join(
    f"<tool_call>\n<function={name}>\n{tagged(given)}</function>\n</tool_call>"
    for name, given in calls
)
"""Families that mark where calls end, so that text may stand behind them."""

# A hermes call may not hold its own end mark: there SGLang's parsers of whole texts and
# of streams differ.
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
values = st.one_of(
    words, st.integers(), st.booleans(), st.none(), st.lists(words, max_size=2)
)
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
    parsers: Parsers | str,
    text: str,
    pieces: Sequence[int] = (),
    *,
    parallel: bool = True,
    prompt: str = "",
) -> Message:
    """In pieces of these sizes, over and over; whole without any."""
    parsers = Parsers(tool_calls=parsers) if isinstance(parsers, str) else parsers
    stream = bool(pieces)
    parser = parsers.reply(
        TOOLS, ToolChoice(), parallel=parallel, prompt_text=prompt, stream=stream
    )
    at = 0
    turn = 0
    pieces_of_stream = []
    while at < len(text):
        size = pieces[turn % len(pieces)] if pieces else len(text)
        pieces_of_stream.append(parser.push(text[at : at + size]))
        at, turn = at + size, turn + 1
    pieces_of_stream += parser.finish()
    middle = len(pieces_of_stream) // 2  # who comes late is told the first ones as one
    assert join_deltas(
        [join_deltas(pieces_of_stream[:middle]), *pieces_of_stream[middle:]]
    ) == join_deltas(pieces_of_stream)
    return reply_message(join_deltas(pieces_of_stream))


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=30, deadline=None)
@given(made=calls, text=before, pieces=sizes)
def test_streamed_calls_equal_whole_and_generated_calls(
    spelling: str, made: list[Call], text: str, pieces: list[int]
):
    name, spelled = SPELLED[spelling]
    text = "" if spelling == "llama3, bare" else text  # a bare call is all of its reply
    whole, streamed = (
        parsed(name, text + spelled(made), sizes) for sizes in ((), pieces)
    )
    for message in (whole, streamed):
        assert [
            (call.name, json.loads(call.arguments)) for call in message.tool_calls
        ] == made
        assert message.content.strip() == text.strip()
    assert [c.arguments for c in whole.tool_calls] == [
        c.arguments for c in streamed.tool_calls
    ]


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=30, deadline=None)
@given(
    made=calls,
    text=before,
    pieces=sizes,
    at=st.floats(0, 1),
)
def test_reply_that_ends_inside_a_call_keeps_its_text_or_the_begun_call(
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


part = st.one_of(
    st.sampled_from(
        [" and ", "\n", "Then: {x}", "a < b <tool", "\n\nbye", "</tool_call>"]
    ),
    st.sampled_from(
        [("halt", {}), ("get_weather", {"city": "Paris"}), ("nobody", {"city": "Rome"})]
    ),
)


@pytest.mark.parametrize("parser", ENDED)
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(part, min_size=1, max_size=6),
    cut=st.none() | st.floats(0.1, 0.6),
    pieces=sizes,
)
def test_text_that_calls_no_known_tool_is_content(
    parser: str, parts: list[str | Call], cut: float | None, pieces: list[int]
):
    reply = ""
    content = ""
    made = []
    for each in parts:
        spelled = each if isinstance(each, str) else ENDED[parser]([each])
        if isinstance(each, tuple) and each[0] != "nobody":
            made.append(each)
        else:
            content += spelled
        reply += spelled
    rest = (
        ""
        if cut is None
        else (last := ENDED[parser]([("get_weather", {"city": "Oslo"})]))[
            : int(cut * len(last))
        ]
    )
    whole, streamed = (parsed(parser, reply + rest, sizes_) for sizes_ in ((), pieces))
    for message in (whole, streamed):
        # only a stream tells a call before it is whole
        begun = len(message.tool_calls) > len(made)
        assert not (begun and message is whole)
        assert [
            (c.name, json.loads(c.arguments)) for c in message.tool_calls[: len(made)]
        ] == made
        assert [call.name for call in message.tool_calls[len(made) :]] == [
            "get_weather"
        ] * begun
        assert message.content.strip() == (content + rest * (not begun)).strip()


ODD = {
    "qwen25": [
        "42",
        '{"name": ["halt"]}',
        '{"name": "halt", "arguments": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
    "hermes": ["42", "[1]", "[" * 100_000],
}
ODD = {
    name: [
        SPELLED[name][1]([("halt", {})]).replace(named(("halt", {})), each)
        for each in odd
    ]
    for name, odd in ODD.items()
}
ODD |= {
    "mistral": ["[TOOL_CALLS] [1]", "[TOOL_CALLS] " + "[" * 100_000],
    "llama3": [
        "<|python_tag|>2+2",
        '<|python_tag|>{"name": ["halt"]}',
        '{"a": ' + "[" * 100_000,
    ],
}


@pytest.mark.parametrize(
    ("parser", "reply"), [(name, each) for name, odd in ODD.items() for each in odd]
)
@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (50,),
        (100_000,),
    ],
)
def test_text_on_which_sglangs_parsers_fail_is_content(
    parser: str, reply: str, pieces: tuple[int, ...]
):
    message = parsed(
        parser, f"Look: {reply}" if "tool_call>" in reply else reply, pieces
    )
    calls = [call.name for call in message.tool_calls]
    # a whole number that Python does not read: a stream has begun to tell the call
    if "9999" in reply:
        assert calls == ["halt"] * bool(pieces and pieces[0] < len(reply))
    else:
        assert calls == []
        assert message.content.endswith(reply)


@pytest.mark.parametrize(
    ("parser", "reply"),
    [
        (
            "llama3",
            '<|python_tag|>{"name":"nobody","parameters":{"name":"halt","parameters":{}}}',
        ),
        (
            "llama3",
            '{"name":"halt","parameters":{}};{"name":"nobody","parameters":{"o":{"name":"halt"}}}',
        ),
        (
            "mistral",
            "[TOOL_CALLS]nobody[ARGS]{}[TOOL_CALLS]halt[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{}",
        ),
    ],
)
def test_stream_invents_no_call_after_an_unknown_tool(parser: str, reply: str):
    whole = parsed(parser, reply)
    for size in range(1, 12):
        streamed = parsed(parser, reply, [size])
        assert streamed.tool_calls == whole.tool_calls
        assert streamed.content == whole.content


@pytest.mark.parametrize("name", FunctionCallParser.ToolCallParserEnum)
@pytest.mark.parametrize(
    "text",
    [
        "Hello [x] {y} <a> 漢字\n\nmore",
        "call: [get_weather(",
        "<function=x> hm",
        "a]b}c",
    ],
)
def test_every_sglang_parser_leaves_plain_text_unchanged(name: str, text: str):
    for size in (1, 4, 30):
        assert parsed(name, text, [size]).content == text
    assert parsed(name, text).content == text


def test_parser_without_marks_does_not_repeat_text():
    assert parsed("pythonic", "[nobody(a=1)] and", [4]).content == " and"


def test_parsing_time_of_long_arguments_is_linear(monkeypatch: pytest.MonkeyPatch):
    """SGLang reads a block from its beginning for every piece."""
    read: list[int] = []
    chunk = FunctionCallParser.parse_stream_chunk

    def counted(self: FunctionCallParser, text: str) -> Any:
        read.append(len(text) + len(self.detector._buffer))
        return chunk(self, text)

    monkeypatch.setattr(FunctionCallParser, "parse_stream_chunk", counted)
    call = ("get_weather", {"city": "x" * 20_000})
    [parsed_call] = parsed("qwen25", SPELLED["qwen25"][1]([call]), [4]).tool_calls
    assert json.loads(parsed_call.arguments) == call[1]
    assert sum(read) < 30 * 20_000  # and not 20,000 / 4 times half of it


def test_stream_emits_calls_and_text_in_order():
    call = SPELLED["qwen25"][1]([("get_weather", {"city": "x"})])
    parser = Parsers(tool_calls="qwen25").reply(
        TOOLS, ToolChoice(), parallel=True, prompt_text="", stream=True
    )
    deltas = [parser.push(f"One{call}two{call}three"), *parser.finish()]
    events = [
        [delta.content, *(call.name for call in delta.calls if call.name)]
        for delta in deltas
    ]
    assert events == [["One", "get_weather"], ["two", "get_weather"], ["three"]]


@pytest.mark.parametrize("spelling", SPELLED)
@settings(max_examples=20, deadline=None)
@given(text=st.text(max_size=40), pieces=sizes)
def test_text_without_calls_is_content(spelling: str, text: str, pieces: list[int]):
    for sizes_ in ((), pieces):
        message = parsed(SPELLED[spelling][0], text, sizes_)
        assert message.content == text
        assert message.tool_calls == ()


@settings(max_examples=60, deadline=None)
@given(
    thought=before,
    text=before,
    made=calls | st.just([]),
    pieces=sizes,
)
@pytest.mark.parametrize(
    ("parser", "opened"),
    [
        ("qwen3", "<think>\n"),
        ("deepseek-v3", ""),
    ],
)
def test_thinking_is_separated_whole_and_streamed(
    parser: str,
    opened: str,
    thought: str,
    text: str,
    made: list[Call],
    pieces: list[int],
):
    shown = f"{opened}{thought}\n</think>\n\n{text}{SPELLED['qwen25'][1](made)}"
    prompt = "assistant\n" if opened else "<｜Assistant｜><think>\n"
    for sizes_ in ((), pieces):
        parsers = Parsers(tool_calls="qwen25", reasoning=parser)
        message = parsed(parsers, shown, sizes_, prompt=prompt)
        assert message.reasoning.strip() == thought.strip()
        assert message.content.strip() == text.strip()
        # also behind thinking that is empty
        assert not message.content.startswith("\n")
        assert [
            (call.name, json.loads(call.arguments)) for call in message.tool_calls
        ] == made
    refused = parsed(
        Parsers(tool_calls="qwen25", reasoning=parser),
        text,
        pieces,
        prompt="</think>\n\n",
    )
    assert refused.content == text
    assert refused.reasoning == ""


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (1,),
        (3,),
        (100,),
    ],
)
@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [
        ("\n<think>hm</think>\nYes", "hm", "Yes"),
        (" \n\n<think>\nhm\n</think>\n\nYes", "hm\n", "Yes"),
        ("\nYes", "", "\nYes"),
        ("Yes <think>hm</think> no", "", "Yes <think>hm</think> no"),
        ("<thin", "", "<thin"),
        ("\n", "", "\n"),
    ],
)
def test_thinking_stands_at_the_beginning_of_a_reply_whole_and_streamed(
    said: str, reasoning: str, content: str, pieces: tuple[int, ...]
):
    message = parsed(Parsers(tool_calls="qwen25", reasoning="qwen3"), said, pieces)
    assert message.reasoning == reasoning
    assert message.content == content


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (3,),
    ],
)
def test_only_one_call_is_parsed_if_parallel_calls_are_off(pieces: tuple[int, ...]):
    name, spelled = SPELLED["qwen25"]
    text = spelled([("halt", {}), ("get_weather", {"city": "x"})])
    [call] = parsed(name, text, pieces, parallel=False).tool_calls
    assert call.name == "halt"
