"""Fields that a dialect does not know: named where they cannot matter, refused where
they change sampling."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from running_gateway import ASK, MORE, Running, running
from tool_replies import PARSERS

from invrl.errors import SessionError
from invrl.gateway.dialects import joined_messages
from invrl.gateway.dialects.chat import ChatDialect
from invrl.gateway.dialects.completions import CompletionsDialect
from invrl.gateway.dialects.dialect import Dialect
from invrl.gateway.dialects.google.generate_content import GenerateContentDialect
from invrl.gateway.dialects.messages import MessagesDialect
from invrl.gateway.dialects.responses import ResponsesDialect
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Message, TurnRequest

END = 2
OPENAI: dict[str, Any] = {"model": "tiny", "vocab_size": 512, "token_text": str}
CHAT = ChatDialect(**OPENAI)
MESSAGES = MessagesDialect(model="tiny")
DIALECTS: dict[str, tuple[Dialect[Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [ASK]}),
    "completions": (CompletionsDialect(**OPENAI), {"prompt": "x"}),
    "responses": (ResponsesDialect(**OPENAI), {"input": [ASK]}),
    "messages": (MESSAGES, {"messages": [ASK], "max_tokens": 8}),
    "generate_content": (
        GenerateContentDialect(model="tiny"),
        {"contents": [{"parts": [{"text": "x"}]}]},
    ),
}
every_dialect = pytest.mark.parametrize("name", list(DIALECTS))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("calc", "shell")
]


def parsed(name: str, **fields: Any) -> TurnRequest:
    dialect, good = DIALECTS[name]
    raw = json.dumps({"model": "tiny", **good, **fields}).encode()
    return dialect.parse(raw, retry=False).turn


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = PARSERS
    async with running(
        tmp_path, model, renderer, parsers, max_new_tokens=256
    ) as gateway_with_parsers:
        yield gateway_with_parsers


@every_dialect
def test_unknown_harmless_fields_are_ignored_and_named(name: str):
    fields = {
        "provider": {"order": ["x"]},
        "usage": {"include": True},
        "trace": "x",
        "unset": None,
    }
    assert parsed(name, **fields).ignored == ("provider", "usage", "trace")
    assert parsed(name).ignored == ()


@every_dialect
@pytest.mark.parametrize(
    "field",
    [
        {"guided_json": {"type": "object"}},
        {"regex": "[0-9]+"},
        {"min_tokens": 3},
        {"stop_token_ids": [5]},
        {"typical_p": 0.5},
        {"ignore_eos": True},
        {"use_beam_search": True},
        {"temprature": 1},
        {"topP": 0.5},
    ],
    ids=lambda field: next(iter(field)),
)
def test_unknown_field_that_would_change_sampling_is_refused(
    name: str, field: dict[str, Any]
):
    with pytest.raises(SessionError) as refused:
        parsed(name, **field)
    [param] = field
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param in refused.value.message


@every_dialect
def test_sampling_fields_with_neutral_values_are_accepted(name: str):
    fields = {
        "min_tokens": 0,
        "ignore_eos": False,
        "guided_json": None,
        "typical_p": 1.0,
        "bad_words": [],
    }
    assert parsed(name, **fields).ignored == ()


@pytest.mark.parametrize("name", ["messages", "responses"])
@pytest.mark.parametrize(
    "field",
    [
        {"min_p": 0.5},
        {"seed": 3},
        {"stop": ["x"]},
        {"max_new_tokens": 3},
    ],
)
def test_sampling_parameters_of_other_apis_are_refused(
    name: str, field: dict[str, Any]
):
    if name == "responses" and field.keys() & {"min_p", "seed"}:
        assert parsed(name, **field).ignored == ()  # its own
        return
    with pytest.raises(SessionError, match="not supported"):
        parsed(name, **field)


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_field_of_another_api_does_not_count_as_misspelt(name: str):
    parsed(name, speed="fast")  # Anthropic's; `seed` is like it


def test_misspelt_parameter_is_answered_with_the_right_name():
    with pytest.raises(SessionError, match="`max_completion_tokens` is"):
        parsed("chat", max_completion_token=5)


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_unknown_fields_of_messages_are_ignored(name: str):
    entries = "input" if name == "responses" else "messages"
    extra = {
        "parsed": {"a": 1},
        "thinking_blocks": [],
        "reasoning_details": [{"x": 1}],
        "metadata": {},
    }
    sent = [
        ASK | {"cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "Hi"} | extra,
        MORE,
    ]
    turn = parsed(name, **{entries: sent})
    assert [message.content for message in turn.messages] == [
        ASK["content"],
        "Hi",
        MORE["content"],
    ]
    assert set(turn.ignored) == {
        f"{entries}[].{field}" for field in ("cache_control", *extra)
    }


def test_anthropic_reply_can_be_sent_back_whole():
    usage = {"input_tokens": 1, "output_tokens": 2}
    answer = {
        "id": "msg_1",
        "type": "message",
        "model": "tiny",
        "stop_reason": "end_turn",
        "usage": usage,
    }
    reply = answer | {
        "role": "assistant",
        "content": [{"type": "text", "text": "Hi", "parsed_output": 1}],
    }
    turn = parsed("messages", messages=[ASK, reply, MORE])
    assert [message.role for message in turn.messages] == ["user", "assistant", "user"]
    assert turn.ignored == ()


def test_litellm_message_can_be_sent_back_whole():
    extra = {
        "reasoning_content": "So",
        "thinking_blocks": [{"type": "thinking", "thinking": "So"}],
    }
    unset = {
        "function_call": None,
        "audio": None,
        "images": None,
        "annotations": [],
    }
    known = {"provider_specific_fields": {"refusal": None}, "tool_calls": None}
    reply = {
        "role": "assistant",
        "content": "Hi",
        **extra,
        **unset,
        **known,
    }
    turn = parsed("chat", messages=[ASK, reply, MORE])
    assert turn.messages[1].reasoning == "So"
    assert set(turn.ignored) == {
        "messages[].thinking_blocks",
        "messages[].provider_specific_fields",
    }


def test_prefilled_reply_is_refused():
    with pytest.raises(SessionError) as refused:
        parsed(
            "chat",
            messages=[ASK, {"role": "assistant", "content": "It", "prefix": True}],
        )
    assert refused.value.param == "messages[1].prefix"


@every_dialect
def test_body_with_thousands_of_unknown_names_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    compared: list[str] = []

    def counted(word: str, *_: Any, **__: Any) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr("difflib.get_close_matches", counted)
    with pytest.raises(SessionError) as refused:
        parsed(name, **{f"unknown-{nth}": 1 for nth in range(10_000)})
    assert refused.value.status == 400
    assert refused.value.code == "too_many_fields"
    assert parsed(name, **{"q" * 1_000_000: 1}).ignored == ("q" * 64,)
    # each comparison takes 50 us, and a long name's in proportion to its length
    assert not compared


def test_number_of_recorded_client_fields_is_bounded():
    fields = {f"field_{number}_" + "x" * 1000: 1 for number in range(200)}
    ignored = parsed("chat", **fields).ignored
    assert len(ignored) == 32
    assert max(map(len, ignored)) == 64


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": True}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"max_tokens": 100}}, None),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        (
            {
                "chat_template_kwargs": {"enable_thinking": False},
                "enable_thinking": True,
            },
            False,
        ),
        ({"reasoning_effort": "minimal"}, False),
    ],
)
def test_thinking_is_requested_with_the_fields_of_other_servers(
    fields: dict[str, Any], thinking: bool | None
):
    turn = parsed("chat", **fields)
    assert turn.thinking is thinking
    assert turn.ignored == ()


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_a_negative_seed_is_a_400(name: str):
    with pytest.raises(SessionError) as refused:
        parsed(name, seed=-1)
    assert refused.value.status == 400
    assert refused.value.param == "seed"
    assert parsed(name, seed=2**63 - 1).sampling.sampling_seed == 2**63 - 1


def test_text_and_calls_in_two_messages_are_one_reply():
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "calc", "arguments": "{}"},
    }
    said = {"role": "assistant", "content": "Let me see."}
    called = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    whole = parsed("chat", messages=[ASK, said | called, result], tools=TOOLS)
    apart = parsed("chat", messages=[ASK, said, called, result], tools=TOOLS)
    assert apart.messages == whole.messages
    two = parsed("chat", messages=[ASK, said, said])
    assert len(two.messages) == 3


class Sum(BaseModel):
    value: int


async def test_reply_of_the_openai_parse_method_can_be_sent_back(
    gateway: Running, renderer: Renderer
):
    gateway.engine.script = lambda _: [*renderer.encode('{"value": 156}'), END]
    [session] = await gateway.open(purpose="serve")
    chat = gateway.client(session).chat.completions
    first = await chat.parse(model="tiny", messages=[ASK], response_format=Sum)
    message = first.choices[0].message
    assert message.parsed == Sum(value=156)
    for sent in (message, message.model_dump(), message.to_dict()):
        await chat.parse(model="tiny", messages=[ASK, sent, MORE], response_format=Sum)
    responses = gateway.client(session).responses
    answer = await responses.parse(model="tiny", input="What?", text_format=Sum)
    assert answer.output_parsed == Sum(value=156)
    user = {"role": "user", "content": "What?"}
    await responses.parse(
        model="tiny", input=[user, *answer.output, MORE], text_format=Sum
    )
    turns = gateway.turns(session)
    assert [turn.parent_id for turn in turns] == [
        None,
        *[turns[0].id] * 3,
        None,
        turns[4].id,
    ]
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    assert shown["ignored"] == {"messages[].parsed": 3}
    measured = (await gateway.env("/metrics")).json()
    assert measured["ignored"] == shown["ignored"]


def assistant_parts(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """A conversation in which one reply, of as many calls as there are texts, comes in
    as many parts."""
    if name == "responses":
        calls: list[dict[str, Any]] = [
            {
                "type": "function_call",
                "call_id": f"c{at}",
                "name": "calc",
                "arguments": text,
            }
            for at, text in enumerate(texts)
        ]
        return {"input": [ASK, *calls]}
    if name == "messages":
        parts = [{"role": "assistant", "content": text} for text in texts]
        return {"messages": [ASK, *parts, ASK], "max_tokens": 8}
    calls = [
        {
            "id": f"c{at}",
            "type": "function",
            "function": {"name": "calc", "arguments": text},
        }
        for at, text in enumerate(texts)
    ]
    return {
        "messages": [
            ASK,
            *(
                {"role": "assistant", "content": "x", "tool_calls": [call]}
                for call in calls
            ),
        ]
    }


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_parts_of_a_reply_are_joined_once(name: str, monkeypatch: pytest.MonkeyPatch):
    """Two at a time, 8 MB of parts took seconds: each copied all that came before
    it."""
    sizes: list[int] = []

    def counted(*parts: Any, **named: Any) -> Message:
        message = Message(*parts, **named)
        sizes.append(message.characters)
        return message

    monkeypatch.setattr(joined_messages, "Message", counted)
    texts = [f"[{at}]" for at in range(500)]
    request = parsed(name, **assistant_parts(name, texts))
    reply = request.messages[1]
    joined = [call.arguments for call in reply.tool_calls] or [reply.content]
    assert "".join(joined) == "".join(texts)
    assert reply.content == (
        {"chat": "x" * 500, "responses": ""}.get(name, "".join(texts))
    )
    assert sum(sizes) <= reply.characters


@pytest.mark.parametrize(
    ("sent", "joined"),
    [
        (["", "a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        (["", "", "a", "b"], ["a", "b"]),
        (["a", "+b", "c", "d"], ["abcd"]),
        (["+", "a", "b"], ["ab"]),
        (["a", "b", "+"], ["a", "b"]),
    ],
)
def test_consecutive_chat_messages_are_joined_into_one_reply_by_their_calls(
    sent: list[str], joined: list[str]
):
    """Of chat; + is a call. Two texts in a row are two replies, unless a call has
    joined them."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "calc", "arguments": "{}"},
    }
    parts = []
    for sent_message in sent:
        text = sent_message.removeprefix("+")
        part: dict[str, Any] = {"role": "assistant", "content": text}
        if text != sent_message:
            part["tool_calls"] = [call]
        parts.append(part)
    request = parsed("chat", messages=[ASK, *parts, ASK])
    assert [message.content for message in request.messages[1:-1]] == joined
    assert sum(len(message.tool_calls) for message in request.messages) == sum(
        "+" in sent_text for sent_text in sent
    )
