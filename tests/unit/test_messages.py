"""Anthropic's messages over HTTP on a fake engine: bodies in, blocks and events out,
ids behind them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes import EngineDeaths
from pydantic_core import from_json
from running_gateway import Running, running
from tool_replies import PARSERS, say

from invrl.gateway.dialects.wire import arguments_object
from invrl.gateway.rendering.renderer import Renderer
from invrl.rollout.workers.endpoint import ConnectionPool, SessionEndpoint
from invrl.types.sessions import Session

ASK = {"role": "user", "content": "What is 12*13?"}
CALC = {
    "name": "calc",
    "description": "Calculates",
    "input_schema": {
        "type": "object",
        "properties": {"x": {"type": "string"}},
    },
}
THINK = {"type": "enabled", "budget_tokens": 1024}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "12*13"}}\n</tool_call>'
TWO = (
    CALL
    + '\n<tool_call>\n{"name": "calc", "arguments": {"x": "é", "deep": {"b": [1, 2.0]}}}\n</tool_call>'
)


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = PARSERS
    async with running(
        tmp_path, model, renderer, parsers=parsers, max_new_tokens=200
    ) as gateway_with_parsers:
        yield gateway_with_parsers


async def post(
    gateway: Running, session: Session, path: str = "", *, retries: int = 0, **body: Any
) -> httpx.Response:
    """`retries`: how often the client says that it has tried before."""
    url = session.base_url.removesuffix("/v1") + "/v1/messages" + path
    headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
    headers["x-stainless-retry-count"] = str(retries)
    body = {
        "model": "tiny",
        **({} if path else {"max_tokens": 200}),
        **body,
    }
    return await gateway.http.post(url, json=body, headers=headers)


async def ask(
    gateway: Running, session: Session, messages: list[Any], **body: Any
) -> dict[str, Any]:
    """The answer's message; streamed and put together by its events if `stream` is
    set."""
    answer = await post(gateway, session, messages=messages, **body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    assert answer.headers["content-type"].startswith("text/event-stream")
    return assembled(answer.text)


def assembled(text: str) -> dict[str, Any]:
    """The message that a stream tells, as clients put it together. Blocks come one
    after another."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    open_block = None
    ended = False
    for event in text.strip().split("\n\n"):
        name, _, data = event.partition("\n")
        event_data = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event_data['type']}"
        assert not ended
        match event_data["type"]:
            case "message_start":
                message = event_data["message"]
                assert message["content"] == []
                assert message["stop_reason"] is None
            case "content_block_start":
                assert open_block is None
                assert event_data["index"] == len(message["content"])
                open_block = event_data["index"]
                message["content"].append(event_data["content_block"])
                texts.append("")
            case "content_block_delta":
                block = message["content"][event_data["index"]]
                delta = event_data["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        texts[event_data["index"]] += delta["partial_json"]
            case "content_block_stop":
                assert open_block == event_data["index"]
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event_data["delta"]
                begun = {
                    **message["usage"],
                    "output_tokens": event_data["usage"]["output_tokens"],
                }
                # the prompt is counted alike before and after
                assert begun == event_data["usage"]
                message["usage"] |= event_data["usage"]
            case "message_stop":
                ended = True
            case other:
                assert other == "ping"
    assert ended
    for block, arguments in zip(message["content"], texts, strict=True):
        if arguments:
            # as the clients do
            block["input"] = from_json(arguments, allow_partial=True)
    return message


def results(answer: Mapping[str, Any], **more: object) -> list[dict[str, Any]]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "156", **more}
        for call in calls
    ]


def assert_exact(gateway: Running, session: Session) -> None:
    """Every prompt after the first is the ids before it and a tail; nothing forked."""
    turns = gateway.turns(session)
    sent = {request["rid"]: request["input_ids"] for request in gateway.engine.requests}
    assert [turn.fork_reason for turn in turns] == [""] * len(turns)
    path: list[int] = []
    for turn in turns:
        path += turn.context_ids_T.tolist()
        assert sent[turn.id] == path
        path += turn.sampled_ids_T.tolist()


async def test_message_start_reports_the_cached_tokens(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Nobody knows that before the first token: while it is long in coming there are
    pings alone."""
    async with running(tmp_path, model, renderer, keep_alive_s=0.02) as gateway:
        say(gateway, renderer, "It is 156.", "Yes.")
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK])
        gateway.engine.holds = lambda _: True
        history = [ASK, {"role": "assistant", "content": first["content"]}, ASK]
        url = session.base_url + "/messages"
        body = {
            "model": "tiny",
            "max_tokens": 9,
            "messages": history,
            "stream": True,
        }
        history_text = ""
        async with gateway.http.stream("POST", url, json=body) as answer:
            async for text in answer.aiter_text():
                history_text += text
                if history_text.count("event: ping") > 2:
                    gateway.engine.holds = lambda _: False
        before, _, after = history_text.partition("event: message_start")
        assert before.count("event: ping") > 2
        assert set(before.split("\n\n")) == {'event: ping\ndata: {"type":"ping"}', ""}
        usage = assembled("event: message_start" + after)["usage"]
        turns = gateway.turns(session)
        assert usage["cache_read_input_tokens"] == turns[1].cached_tokens > 0
        assert usage["input_tokens"] == turns[1].prompt_tokens - turns[1].cached_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_tool_loop_continues_the_exact_ids(
    gateway: Running, renderer: Renderer, stream: bool
):
    [session] = await gateway.open()
    say(
        gateway,
        renderer,
        "<think>multiply</think>Let me see." + CALL,
        TWO,
        "It is 156.",
    )
    options = {
        "tools": [CALC],
        "thinking": THINK,
        "stream": stream,
        "system": "Be brief.",
    }
    first = await ask(gateway, session, [ASK], **options)
    thought, text, call = first["content"]
    assert first["type"] == "message"
    assert first["role"] == "assistant"
    assert first["model"] == "tiny"
    assert first["stop_reason"] == "tool_use"
    assert thought["thinking"] == "multiply"
    assert text["text"] == "Let me see."
    assert thought["signature"]
    assert call["name"] == "calc"
    assert call["input"] == {"x": "12*13"}
    [turn] = gateway.turns(session)
    assert first["id"] == f"msg_{turn.id}"
    history = [ASK, {"role": "assistant", "content": first["content"]}]
    history.append(
        {
            "role": "user",
            "content": [*results(first), {"type": "text", "text": "And é?"}],
        }
    )
    second = await ask(gateway, session, history, **options)
    assert [block["input"] for block in second["content"]] == [
        {"x": "12*13"},
        {"x": "é", "deep": {"b": [1, 2.0]}},
    ]
    dropped = [block for block in first["content"] if block["type"] != "thinking"]
    history[1] = {"role": "assistant", "content": dropped}
    # as JavaScript may hand it back
    second["content"][1]["input"] = {"deep": {"b": [1, 2]}, "x": "é"}
    history += [
        {"role": "assistant", "content": [block]} for block in second["content"]
    ]
    texts = [{"type": "text", "text": "156", "cache_control": {"type": "ephemeral"}}]
    history.append({"role": "user", "content": results(second, is_error=True)})
    history[-1]["content"][0]["content"] = texts
    last = await ask(gateway, session, history, **options)
    assert last["content"] == [{"type": "text", "text": "It is 156."}]
    assert last["stop_reason"] == "end_turn"
    assert_exact(gateway, session)
    assert len(gateway.turns(session)) == 3
    seen = renderer.reply_text(gateway.engine.requests[1]["input_ids"], special=True)
    assert "<|im_start|>tool\n156<|im_end|>\n<|im_start|>user\nAnd é?<|im_end|>" in seen


@pytest.mark.parametrize("stream", [False, True])
async def test_text_after_a_call_is_returned_and_can_be_sent_back(
    gateway: Running,
    renderer: Renderer,
    stream: bool,
):
    [session] = await gateway.open()
    say(gateway, renderer, f"One.{CALL} Two.{CALL} Three.", "156.")
    options = {"tools": [CALC], "stream": stream}
    first = await ask(gateway, session, [ASK], **options)
    texts = [block["text"] for block in first["content"] if block["type"] == "text"]
    assert texts == (["One.", " Two.", " Three."] if stream else ["One. Two. Three."])
    kinds = (
        ["text", "tool_use", "text", "tool_use", "text"]
        if stream
        else ["text", "tool_use", "tool_use"]
    )
    assert [block["type"] for block in first["content"]] == kinds
    history = [ASK, {"role": "assistant", "content": first["content"]}]
    await ask(
        gateway,
        session,
        [*history, {"role": "user", "content": results(first)}],
        **options,
    )
    assert [turn.fork_reason for turn in gateway.turns(session)] == ["", ""]
    assert_exact(gateway, session)


async def test_streamed_message_equals_the_whole_message(
    gateway: Running, renderer: Renderer
):
    replies = [
        "plain ünïcödé 🙂",
        "<think>hm\n</think>\n\nSo.",
        "<think>only",
        "A <tool_call> that is none",
        "So:" + TWO,
        '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "calc", "arguments": {"x": "\\ud800!"}}\n</tool_call>',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        "",
    ]
    for reply in replies:
        variants = (
            THINK,
            {"type": "adaptive", "display": "omitted"},
            {"type": "disabled"},
            None,
        )
        for thinking in variants if "<think>" in reply else variants[:1]:
            answers = []
            for stream in (False, True):
                [session] = await gateway.open()
                say(gateway, renderer, reply)
                thinks = {"thinking": thinking} if thinking else {}
                answer = await ask(
                    gateway, session, [ASK], tools=[CALC], stream=stream, **thinks
                )
                for block in answer["content"]:
                    block.pop("id", None)
                    assert block.pop("signature", True)
                answers.append(
                    answer
                    | {
                        "id": "",
                        "usage": {**answer["usage"], "cache_read_input_tokens": 0},
                    }
                )
                answers[-1]["usage"].pop("input_tokens")
            assert answers[0] == answers[1], (reply, thinking)
            kinds = [block["type"] for block in answers[0]["content"]]
            assert ("thinking" in kinds) == (
                "<think>" in reply and bool(answer_shows(thinking))
            )
            if (
                thinking
                and thinking.get("display") == "omitted"
                and "thinking" in kinds
            ):
                assert answers[0]["content"][0]["thinking"] == ""


def answer_shows(thinking: Mapping[str, object] | None) -> bool:
    return thinking is not None and thinking["type"] != "disabled"


async def test_usage_and_count_tokens_equal_the_recorded_tokens(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    say(gateway, renderer, "<think>hm</think>Yes.")
    history: list[Any] = [ASK]
    for turn in range(3):
        asked = {
            "messages": history,
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": [CALC],
        }
        counted = await post(gateway, session, "/count_tokens", **asked)
        assert counted.status_code == 200, counted.text
        assert len(gateway.engine.requests) == turn
        answer = await ask(gateway, session, **asked, stream=turn == 1)
        used = answer["usage"]
        assert used["cache_creation_input_tokens"] == 0
        prompt = len(gateway.engine.requests[-1]["input_ids"])
        assert used["input_tokens"] + used["cache_read_input_tokens"] == prompt
        assert counted.json() == {"input_tokens": prompt}
        recorded = gateway.turns(session)[-1]
        assert used["cache_read_input_tokens"] == recorded.cached_tokens
        assert used["output_tokens"] == len(recorded.sampled_ids_T)
        history = [*history, {"role": "assistant", "content": answer["content"]}, ASK]
    assert gateway.turns(session)[-1].cached_tokens
    assert_exact(gateway, session)


async def test_stop_reasons_and_stop_sequences_of_messages(
    gateway: Running,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
):
    [session] = await gateway.open()
    say(gateway, renderer, "one two three STOP four")
    cut = await ask(gateway, session, [ASK], max_tokens=3)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["stop_sequence"] is None
    assert cut["usage"]["output_tokens"] == 3
    ids = renderer.encode("one two three STOP")
    monkeypatch.setattr(
        gateway.engine, "_reply", lambda *_: (ids, {"type": "stop", "matched": "STOP"})
    )
    for stream in (False, True):
        stopped = await ask(
            gateway, session, [ASK], stop_sequences=["X", "STOP"], stream=stream
        )
        assert gateway.engine.requests[-1]["sampling_params"]["stop"] == ["X", "STOP"]
        assert stopped["stop_reason"] == "stop_sequence"
        assert stopped["stop_sequence"] == "STOP"
        assert stopped["content"] == [{"type": "text", "text": "one two three "}]
        asked = len(gateway.engine.requests)
        again = await ask(
            gateway,
            session,
            [ASK],
            stop_sequences=["X", "STOP"],
            stream=stream,
            retries=1,
        )
        assert again == stopped
        # told again from the recorded turn
        assert len(gateway.engine.requests) == asked


@pytest.mark.parametrize("stream", [False, True])
async def test_text_beside_a_tool_use_may_come_back_behind_its_result(
    gateway: Running, renderer: Renderer, stream: bool
):
    say(
        gateway,
        renderer,
        'Sure.\n<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>',
        "It is 4.",
    )
    [session] = await gateway.open()
    tools = [{"name": "calc", "input_schema": {"type": "object"}}]
    first = await ask(gateway, session, [ASK], tools=tools, stream=stream)
    text, call = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "4"}
    history = [
        ASK,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [text]},
        {"role": "user", "content": "And?"},
    ]
    second = await ask(gateway, session, history, tools=tools, stream=stream)
    history += [{"role": "assistant", "content": second["content"]}, ASK]
    await ask(gateway, session, history, tools=tools, stream=stream)
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", "", ""]
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id]
    prompt = renderer.decode(gateway.engine.requests[-1]["input_ids"])
    assert prompt.count("Sure.") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_uses_of_one_reply_may_each_come_back_before_their_result(
    gateway: Running, renderer: Renderer, stream: bool
):
    [session] = await gateway.open()
    say(gateway, renderer, f"One.{CALL} Two.{CALL}", "It is 156.", "Bye.")
    options = {"tools": [CALC], "stream": stream}
    first = await ask(gateway, session, [ASK], **options)
    history: list[dict[str, Any]] = [ASK]
    blocks = []
    answered = iter(results(first))
    for block in first["content"]:
        blocks.append(block)
        if block["type"] == "tool_use":
            history.append({"role": "assistant", "content": blocks})
            history.append({"role": "user", "content": [next(answered)]})
            blocks = []
    assert len(history) == 5
    second = await ask(gateway, session, history, **options)
    history += [{"role": "assistant", "content": second["content"]}, ASK]
    await ask(gateway, session, history, **options)
    assert_exact(gateway, session)
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", "", ""]
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id]


async def test_message_parameters_reach_the_engine(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open(purpose="serve")
    say(gateway, renderer, '{"x": 1}')
    await ask(
        gateway,
        session,
        [ASK],
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        metadata={"user_id": "u"},
    )
    params = gateway.engine.requests[-1]["sampling_params"]
    assert params["temperature"] == 0.25
    assert params["top_p"] == 0.5
    assert params["top_k"] == 7
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
    }
    form = {"type": "json_schema", "schema": schema}
    for body in (
        {"output_format": form},
        {"output_config": {"format": form, "effort": "low"}},
    ):
        await ask(gateway, session, [ASK], **body)
        assert (
            json.loads(gateway.engine.requests[-1]["sampling_params"]["json_schema"])
            == schema
        )
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "calc", "disable_parallel_tool_use": True},
    ):
        await ask(gateway, session, [ASK], tools=[CALC], tool_choice=choice)
        params = gateway.engine.requests[-1]["sampling_params"]
        assert params.keys() & {"json_schema", "structural_tag", "ebnf"}
    say(gateway, renderer, TWO)
    single_call = {"type": "auto", "disable_parallel_tool_use": True}
    for stream in (False, True):
        answer = await ask(
            gateway,
            session,
            [ASK],
            tools=[CALC],
            tool_choice=single_call,
            stream=stream,
        )
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        answer = await ask(
            gateway,
            session,
            [ASK],
            tools=[CALC],
            tool_choice={"type": "none"},
            stream=stream,
        )
        assert [block["type"] for block in answer["content"]] == ["text"]


async def test_message_blocks_reach_the_chat_template_as_text(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    billing = {
        "type": "text",
        "text": "x-anthropic-billing-header: cc_version=1; cch=abc;",
    }
    parts = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        for text in ("a", "b")
    ]
    said = [
        {"type": "redacted_thinking", "data": "?"},
        {"type": "text", "text": "c"},
    ]
    messages = [
        {"role": "user", "content": parts},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": "now"},
        ASK,
    ]
    await ask(
        gateway,
        session,
        messages,
        system=[billing, *parts],
        context_management={"edits": []},
    )
    shown = renderer.reply_text(gateway.engine.requests[-1]["input_ids"], special=True)
    turns = [
        "system\na\nb",
        "user\na\nb\nmore",
        "assistant\ncd",
        "system\nnow",
        "user\nWhat is 12*13?",
    ]
    whole = (
        "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
        + "<|im_start|>assistant\n"
    )
    assert shown == whole


async def test_truncated_call_shows_its_readable_arguments(
    gateway: Running, renderer: Renderer
):
    assert arguments_object('{"x": [1, 2], "y": "cu') == {"x": [1, 2]}
    assert [
        arguments_object(text)
        for text in ("", "{", "[1", "5", "no", '{"x": NaN}', "[" * 100_000)
    ] == [{}] * 7
    assert bytes(arguments_object('{"x":  1.0}')) == b'{"x":  1.0}'  # pyright: ignore[reportArgumentType]
    [session] = await gateway.open()
    say(gateway, renderer, CALL[: CALL.index("13") + 1])
    message = await ask(
        gateway, session, [ASK], tools=[CALC], stream=True, max_tokens=40
    )
    assert message["stop_reason"] in ("end_turn", "tool_use")


async def test_broken_stream_ends_with_an_error_event(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    say(gateway, renderer, "Hello")
    gateway.engine.holds = EngineDeaths(gateway.engine, 2, 1, 1)
    answer = await post(gateway, session, messages=[ASK], stream=True)
    *_, last = answer.text.strip().split("\n\n")
    name, _, data = last.partition("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert error["error"]["type"] == "overloaded_error"
    assert "closed the connection" in error["error"]["message"]


_CONTENT: dict[str, list[Any]] = {
    "image": [{"type": "image", "source": {"type": "url", "url": "http://x"}}],
    "document": [{"type": "document", "source": {}}],
    "thinking of a user": [{"type": "thinking", "thinking": "x", "signature": ""}],
    "call of a user": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
    "no text": [{"type": "text"}],
    "no tool_use_id": [{"type": "tool_result", "content": "x"}],
    "image result": [
        {
            "type": "tool_result",
            "tool_use_id": "x",
            "content": [{"type": "image", "source": {}}],
        }
    ],
    "untyped": [{"text": "x"}],
}
_BAD: dict[str, dict[str, Any]] = {
    **{
        name: {"messages": [{"role": "user", "content": content}]}
        for name, content in _CONTENT.items()
    },
    "no max_tokens": {"max_tokens": None},
    "max_tokens": {"max_tokens": 0},
    "empty messages": {"messages": []},
    "wrong type": {"messages": "hi"},
    "prefill": {"messages": [ASK, {"role": "assistant", "content": "It"}]},
    "arguments": {
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "b", "input": [1]}],
            },
            ASK,
        ]
    },
    "role": {"messages": [{"role": "robot", "content": "x"}]},
    "unknown field": {"temprature": 1},
    "another API's sampling": {"min_p": 0.1},
    "grammar": {"regex": "[0-9]"},
    "temperature": {"temperature": 1.5},
    "top_p": {"top_p": 0},
    "top_k": {"top_k": -1},
    "stop": {"stop_sequences": [""]},
    "server tool": {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    },
    "screenshots": {"tools": [{"type": "computer_20250124", "name": "computer"}]},
    "run elsewhere": {
        "tools": [{"type": "code_execution_20250825", "name": "code_execution"}]
    },
    "no schema": {"tools": [{"name": "x"}]},
    "schema": {"tools": [{"name": "x", "input_schema": []}]},
    "same tools": {"tools": [CALC, CALC]},
    "choice": {
        "tools": [CALC],
        "tool_choice": {"type": "x"},
    },
    "text choice": {"tools": [CALC], "tool_choice": "auto"},
    "unnamed choice": {
        "tools": [CALC],
        "tool_choice": {"type": "tool"},
    },
    "unknown choice": {
        "tools": [CALC],
        "tool_choice": {"type": "tool", "name": "x"},
    },
    "choice without tools": {"tool_choice": {"type": "any"}},
    "thinking": {"thinking": {"type": "deep"}},
    "budget": {"thinking": {"type": "enabled", "budget_tokens": "many"}},
    "mcp": {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]},
    "container": {"container": "c"},
    "format": {"output_format": {"type": "xml"}},
    "too long": {"messages": [{"role": "user", "content": "x " * 3000}]},
}
_RAW = {
    "not json": b"{",
    "list": b"[]",
    "not utf-8": b'{"model": "\xff"}',
    "bomb": b'{"metadata": ' + b"[" * 100_000,
}


async def test_bad_messages_body_is_a_400_in_anthropics_shape(gateway: Running):
    [session] = await gateway.open()
    good = {"model": "tiny", "max_tokens": 8, "messages": [ASK]}
    bodies = _RAW | {
        name: json.dumps(good | change).encode() for name, change in _BAD.items()
    }
    for name, body in bodies.items():
        answer = await gateway.http.post(session.base_url + "/messages", content=body)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json().keys() == {"type", "error", "request_id"}
        error = answer.json()["error"]
        assert answer.json()["type"] == "error", name
        assert error["type"] == "invalid_request_error", name
        assert error["message"]
        assert name != "too long" or error["message"].startswith("prompt is too long")
    assert gateway.engine.requests == []


async def test_errors_and_models_have_the_shapes_of_anthropic_clients(gateway: Running):
    [session] = await gateway.open(purpose="serve")
    base = gateway.url + f"/s/{session.key}/v1"
    version = {"anthropic-version": "2023-06-01"}
    models = await gateway.http.get(base + "/models", headers=version)
    assert [(card["type"], card["id"]) for card in models.json()["data"]] == [
        ("model", "tiny")
    ]
    assert models.json()["has_more"] is False
    assert models.json()["first_id"] == "tiny"
    assert (await gateway.http.get(base + "/models")).json()["object"] == "list"
    single_model = await gateway.http.get(base + "/models/tiny", headers=version)
    assert single_model.json() == models.json()["data"][0]
    body = {"model": "tiny", "max_tokens": 8, "messages": [ASK]}
    http = gateway.http
    open_url = gateway.url + "/v1/messages"
    bearer = {"authorization": f"Bearer {session.key}"}
    for headers in ({"x-api-key": session.key}, bearer):
        assert (
            await http.post(open_url, json=body, headers=headers)
        ).status_code == 200
    refused = {
        (401, "authentication_error"): await http.post(
            open_url, json=body, headers={"x-api-key": "isk-x"}
        ),
        (404, "not_found_error"): await http.post(
            base + "/messages", json=body | {"model": "claude"}
        ),
        (404, "not_found_error", ""): await http.post(
            base + "/messages/batches", json=body
        ),
        (404, "not_found_error", "model"): await http.get(
            base + "/models/claude", headers=version
        ),
        (405, "invalid_request_error"): await http.get(base + "/messages/count_tokens"),
        (401, "authentication_error", ""): await http.get(
            gateway.url + "/v1/models", headers=version
        ),
    }
    for (status, kind, *_), answer in refused.items():
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == kind, answer.text
    gateway.engine.drop_connections = 3
    lost = await http.post(base + "/messages", json=body | {"max_tokens": 7})
    assert lost.status_code == 503
    assert lost.json()["error"]["type"] == "overloaded_error"
    await gateway.finish(session)
    closed = await http.post(base + "/messages/count_tokens", json=body)
    assert closed.status_code == 401
    assert closed.json()["error"]["type"] == "authentication_error"


async def test_an_endpoint_has_an_anthropic_client(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    [session] = await gateway.open()
    endpoint = SessionEndpoint(
        session, model="tiny", timeout_s=9.0, pool=ConnectionPool()
    )
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(ImportError, match="pip install anthropic"):
        endpoint.anthropic()
    anthropic_module = SimpleNamespace(
        AsyncAnthropic=dict, DefaultAsyncHttpxClient=httpx.AsyncClient
    )
    monkeypatch.setitem(sys.modules, "anthropic", anthropic_module)
    client = endpoint.anthropic()
    assert client["base_url"] == f"{gateway.url}/s/{session.key}"
    assert client["api_key"] == session.key
    assert client["timeout"] == 9.0


CLIENT_TOOLS = [
    ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}, '"restart"'),
    (
        {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            "max_characters": 9,
        },
        {"command": "view", "path": "/a"},
        '"insert_text"',
    ),
    (
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
        {"command": "undo_edit", "path": "/a"},
        '"undo_edit"',
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        {"command": "view", "path": "/memories"},
        '"rename"',
    ),
]


@pytest.mark.parametrize(("tool", "arguments", "shown"), CLIENT_TOOLS)
async def test_tools_that_the_client_runs_are_shown_as_functions(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    tool: dict[str, Any],
    arguments: dict[str, str],
    shown: str,
):
    call = {"name": tool["name"], "arguments": arguments}
    parsers = PARSERS
    async with running(
        tmp_path,
        model,
        renderer,
        parsers=parsers,
        context_length=4096,
        max_new_tokens=200,
    ) as gateway:
        say(
            gateway, renderer, f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "Done."
        )
        [session] = await gateway.open()
        first = await ask(gateway, session, [ASK], tools=[tool])
        prompt = renderer._tokenizer.decode(
            gateway.engine.requests[0]["input_ids"], special=True
        )
        assert shown in prompt
        [block] = first["content"]
        assert block["type"] == "tool_use"
        assert block["name"] == tool["name"]
        assert block["input"] == arguments
        result = {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": "a b",
        }
        reply = {"role": "assistant", "content": first["content"]}
        await ask(
            gateway,
            session,
            [ASK, reply, {"role": "user", "content": [result]}],
            tools=[tool],
        )
        assert [turn.fork_reason for turn in gateway.turns(session)] == ["", ""]
