"""Google's generateContent over HTTP on a fake engine: bodies in, candidates and events
out, ids behind them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_gateway import Running, running
from tool_replies import PARSERS, say

from invrl.errors import SessionError
from invrl.gateway.dialects.google.generate_content import GenerateContentDialect
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import TurnRequest
from invrl.types.sessions import Session

ASK = {"role": "user", "parts": [{"text": "What is 12*13?"}]}
CALC = {
    "functionDeclarations": [
        {
            "name": "calc",
            "description": "Calculates",
            "parameters": {
                "type": "OBJECT",
                "properties": {"x": {"type": "STRING", "nullable": True}},
            },
        }
    ]
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "12*13"}}\n</tool_call>'
TWO = (
    CALL
    + '\n<tool_call>\n{"name": "calc", "arguments": {"x": "é", "deep": {"b": [1, 2.0]}}}\n</tool_call>'
)
THINK = {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": 1024}}


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = PARSERS
    async with running(
        tmp_path, model, renderer, parsers=parsers, max_new_tokens=200
    ) as gateway_with_parsers:
        yield gateway_with_parsers


def parsed(**body: Any) -> TurnRequest:
    dialect = GenerateContentDialect(model="tiny")
    raw = json.dumps({"contents": [ASK], **body}).encode()
    return dialect.parse(raw, retry=False).turn


async def post(
    gateway: Running,
    session: Session,
    method: str,
    *,
    model: str = "gemini-2.5-pro",
    **body: Any,
) -> httpx.Response:
    """Send a request as Google's clients do: the key in their header."""
    url = f"{gateway.url}/v1beta/models/{model}:{method}"
    headers = {"x-goog-api-key": session.key}
    return await gateway.http.post(url, json=body, headers=headers)


async def ask(
    gateway: Running,
    session: Session,
    contents: list[Any],
    *,
    stream: bool = False,
    **body: Any,
) -> dict[str, Any]:
    """Return the answer; a streamed one is put together from its events."""
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    answer = await post(gateway, session, method, contents=contents, **body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    assert answer.headers["content-type"].startswith("text/event-stream")
    return assembled(answer.text)


def assembled(text: str) -> dict[str, Any]:
    """Return the answer that a stream tells: the last event, with the parts of all
    events of a candidate."""
    events = [
        json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line
    ]
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for candidate in event["candidates"]:
            joined = parts.setdefault(candidate["index"], [])
            for part in candidate["content"]["parts"]:
                add_part(joined, part)
    answer = events[-1]
    for candidate in answer["candidates"]:
        candidate["content"]["parts"] = parts[candidate["index"]]
    return answer


def add_part(parts: list[dict[str, Any]], part: dict[str, Any]) -> None:
    is_more_text = (
        parts
        and "text" in part
        and "text" in parts[-1]
        and part.get("thought") == parts[-1].get("thought")
    )
    if is_more_text:
        parts[-1] = {**parts[-1], "text": parts[-1]["text"] + part["text"]}
    elif part != {"text": ""} or not parts:
        parts.append(part)


def content(answer: dict[str, Any]) -> dict[str, Any]:
    [candidate] = answer["candidates"]
    return candidate["content"]


def without_ids(sent: dict[str, Any]) -> dict[str, Any]:
    """Return a content as clients send it back that know no ids and no thoughts."""
    parts = []
    for part in sent["parts"]:
        if part.get("thought"):
            continue
        call = part.get("functionCall")
        if call is not None:
            part = {"functionCall": {"name": call["name"], "args": call["args"]}}
        parts.append(part)
    return {"role": "model", "parts": parts}


def result(value: object, **fields: object) -> dict[str, Any]:
    response = {"name": "calc", "response": {"output": value}, **fields}
    return {"functionResponse": response}


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_loop_continues_the_exact_ids(
    gateway: Running, renderer: Renderer, stream: bool
):
    [session] = await gateway.open()
    say(gateway, renderer, "<think>multiply</think>So." + CALL, TWO, "It is 156.")
    options = {
        "tools": [CALC],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": THINK,
    }
    first = await ask(gateway, session, [ASK], stream=stream, **options)
    thought, text, call = content(first)["parts"]
    assert thought == {"text": "multiply", "thought": True}
    assert text == {"text": "So."}
    assert call["functionCall"]["name"] == "calc"
    assert call["functionCall"]["args"] == {"x": "12*13"}
    assert first["candidates"][0]["finishReason"] == "STOP"
    assert first["modelVersion"] == "tiny"
    [turn] = gateway.turns(session)
    assert first["responseId"] == turn.id
    history = [ASK, content(first)]
    call_id = call["functionCall"]["id"]
    answered = [result("156", id=call_id), {"text": "And é?"}]
    history.append({"role": "user", "parts": answered})
    second = await ask(gateway, session, history, stream=stream, **options)
    calls = [part["functionCall"]["args"] for part in content(second)["parts"]]
    assert calls == [{"x": "12*13"}, {"x": "é", "deep": {"b": [1, 2.0]}}]
    # Python's client with automatic calls sends neither ids nor thoughts back.
    history[1] = without_ids(content(first))
    del history[2]["parts"][0]["functionResponse"]["id"]
    history += [
        without_ids(content(second)),
        {"role": "function", "parts": [result(156), result({"é": 1})]},
    ]
    last = await ask(gateway, session, history, stream=stream, **options)
    assert content(last)["parts"] == [{"text": "It is 156."}]
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", "", ""]
    sent = {request["rid"]: request["input_ids"] for request in gateway.engine.requests}
    path: list[int] = []
    for turn in turns:
        path += turn.context_ids_T.tolist()
        assert sent[turn.id] == path
        path += turn.sampled_ids_T.tolist()
    usage = last["usageMetadata"]
    assert usage["promptTokenCount"] == turns[2].prompt_tokens
    assert usage["cachedContentTokenCount"] == turns[2].cached_tokens
    assert usage["candidatesTokenCount"] == len(turns[2].sampled_ids_T)
    seen = renderer.reply_text(gateway.engine.requests[2]["input_ids"], special=True)
    assert '<|im_start|>tool\n156<|im_end|>\n<|im_start|>tool\n{"é": 1}<|im_end|>' in (
        seen.replace('{"\\u00e9": 1}', '{"é": 1}').replace('{"é":1}', '{"é": 1}')
    )


async def test_streamed_answer_equals_the_whole_answer(
    gateway: Running, renderer: Renderer
):
    replies = [
        "plain ünïcödé 🙂",
        "<think>hm\n</think>\n\nSo.",
        "<think>only",
        "So:" + TWO,
        '<tool_call>\n{"name": "calc", "arguments": {"x": "\\ud800!"}}\n</tool_call>',
        "",
    ]
    for reply in replies:
        for config in (THINK, {}):
            answers = []
            for stream in (False, True):
                [session] = await gateway.open()
                say(gateway, renderer, reply)
                answer = await ask(
                    gateway,
                    session,
                    [ASK],
                    stream=stream,
                    tools=[CALC],
                    generationConfig=config,
                )
                answers.append(without_ids_and_counts(answer))
            assert answers[0] == answers[1], (reply, config)
            shows = any("thought" in part for part in answers[0][0])
            assert shows == ("<think>" in reply and bool(config)), (reply, config)


async def test_retried_stream_has_the_text_beside_hidden_thoughts(
    gateway: Running, renderer: Renderer
):
    """A reply that is there already is one piece, with thoughts and text."""
    [session] = await gateway.open()
    say(gateway, renderer, "<think>hm</think>So.")
    whole = await ask(gateway, session, [ASK])
    url = f"{gateway.url}/v1beta/models/m:streamGenerateContent?alt=sse"
    headers = {"x-goog-api-key": session.key, "x-stainless-retry-count": "1"}
    retried = await gateway.http.post(url, json={"contents": [ASK]}, headers=headers)
    assert len(gateway.engine.requests) == 1
    assert content(assembled(retried.text))["parts"] == content(whole)["parts"]
    assert "So." in content(whole)["parts"][0]["text"]


async def test_tokens_are_counted_of_a_conversation_that_ends_with_a_reply(
    gateway: Running,
):
    [session] = await gateway.open()
    reply = {"role": "model", "parts": [{"text": "Yes."}]}
    counted = await post(gateway, session, "countTokens", contents=[ASK, reply])
    assert counted.json()["totalTokens"] > 0


async def test_model_with_a_colon_in_its_name_is_no_model_of_googles(gateway: Running):
    [session] = await gateway.open()
    shown = await gateway.http.get(f"{session.base_url}/models/llama3:8b")
    assert shown.json()["id"] == "llama3:8b"


def without_ids_and_counts(answer: dict[str, Any]) -> tuple[list[Any], str]:
    for part in content(answer)["parts"]:
        if "functionCall" in part:
            assert part["functionCall"].pop("id")
    return content(answer)["parts"], answer["candidates"][0]["finishReason"]


async def test_candidates_are_recorded_one_by_one(gateway: Running, renderer: Renderer):
    [session] = await gateway.open()
    say(gateway, renderer, "one", "two", "three")
    config = {"candidateCount": 2}
    for stream in (False, True):
        answer = await ask(
            gateway, session, [ASK], stream=stream, generationConfig=config
        )
        assert [candidate["index"] for candidate in answer["candidates"]] == [0, 1]
    assert len(gateway.turns(session)) == 4


async def test_reply_that_is_out_of_tokens_says_so(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    say(gateway, renderer, "a long reply that does not end")
    config = {"maxOutputTokens": 2}
    for stream in (False, True):
        answer = await ask(
            gateway, session, [ASK], stream=stream, generationConfig=config
        )
        assert answer["candidates"][0]["finishReason"] == "MAX_TOKENS"


async def test_tokens_are_counted_without_sampling(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    say(gateway, renderer, "Yes.")
    counted = await post(gateway, session, "countTokens", contents=[ASK])
    whole = {
        "generateContentRequest": {"contents": [ASK], "tools": [CALC], "model": "m"}
    }
    with_tools = await post(gateway, session, "countTokens", **whole)
    assert not gateway.engine.requests
    answer = await ask(gateway, session, [ASK])
    prompt_tokens = answer["usageMetadata"]["promptTokenCount"]
    assert counted.json() == {"totalTokens": prompt_tokens}
    assert with_tools.json()["totalTokens"] > prompt_tokens


async def test_models_are_listed_as_google_lists_them(gateway: Running):
    [session] = await gateway.open()
    headers = {"x-goog-api-key": session.key}
    listed = await gateway.http.get(f"{gateway.url}/v1beta/models", headers=headers)
    [card] = listed.json()["models"]
    assert card["name"] == "models/tiny"
    assert card["inputTokenLimit"] > 0
    url = f"{gateway.url}/s/{session.key}/v1beta/models/tiny"
    assert (await gateway.http.get(url)).json() == card


async def test_any_model_name_is_overridden_in_training_and_a_404_in_serving(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, "Yes.")
    [training] = await gateway.open()
    answer = await post(
        gateway, training, "generateContent", model="org/other", contents=[ASK]
    )
    assert answer.status_code == 200
    assert answer.headers["x-invrl-overridden"] == "model"
    [serving] = await gateway.open(purpose="serve")
    refused = await post(
        gateway, serving, "generateContent", model="other", contents=[ASK]
    )
    assert refused.status_code == 404
    assert refused.json()["error"]["status"] == "NOT_FOUND"


async def test_errors_have_googles_shape(gateway: Running):
    [session] = await gateway.open()
    url = f"{gateway.url}/v1beta/models/tiny:generateContent"
    keyless = await gateway.http.post(url, json={"contents": [ASK]})
    assert keyless.status_code == 401
    assert keyless.json()["error"]["status"] == "UNAUTHENTICATED"
    invalid = await post(gateway, session, "generateContent", contents=[])
    error = invalid.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    no_events = await post(gateway, session, "streamGenerateContent", contents=[ASK])
    assert no_events.status_code == 400
    assert "alt=sse" in no_events.json()["error"]["message"]
    under_v1 = f"{session.base_url}/v1beta/models/tiny:generateContent"
    misplaced = await gateway.http.post(under_v1, json={"contents": [ASK]})
    assert misplaced.status_code == 404
    assert "http://HOST:PORT/s/KEY" in misplaced.json()["error"]["message"]


async def test_keep_alives_of_a_stream_are_empty_events(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, keep_alive_s=0.02) as gateway:
        say(gateway, renderer, "It is 156.")
        gateway.engine.holds = lambda _: True
        [session] = await gateway.open()
        url = f"{gateway.url}/s/{session.key}/v1beta/models/tiny:streamGenerateContent"
        text = ""
        body = {"contents": [ASK]}
        async with gateway.http.stream("POST", url + "?alt=sse", json=body) as answer:
            async for piece in answer.aiter_text():
                text += piece
                if text.startswith("\n\n\n"):
                    gateway.engine.holds = lambda _: False
        assert text.startswith("\n\n\n")
        assert content(assembled(text))["parts"] == [{"text": "It is 156."}]


def test_fields_may_be_in_snake_case_and_clients_own_names_stay():
    call = {"function_call": {"name": "f", "args": {"stop_sequences": 1}}}
    contents = [ASK, {"role": "model", "parts": [call]}, ASK]
    declaration = {
        "name": "f",
        "parameters_json_schema": {"type": "object", "properties": {"a_b": {}}},
    }
    snake = parsed(
        contents=contents,
        system_instruction={"parts": [{"text": "s"}]},
        tools=[{"function_declarations": [declaration]}],
        tool_config={"function_calling_config": {"mode": "ANY"}},
        generation_config={"stop_sequences": ["x"], "top_k": 40.0},
        safety_settings=[{"category": "x"}],
    )
    assert snake.ignored == ()
    assert snake.messages[0].content == "s"
    assert json.loads(snake.messages[2].tool_calls[0].arguments) == {
        "stop_sequences": 1
    }
    assert json.loads(snake.tools[0].parameters) == {
        "type": "object",
        "properties": {"a_b": {}},
    }
    assert snake.tool_choice.mode == "required"
    assert snake.stop == ("x",)
    assert snake.sampling.top_k == 40


def test_schemas_of_google_become_json_schemas():
    schema = {
        "type": "OBJECT",
        "nullable": True,
        "propertyOrdering": ["type"],
        "properties": {
            "type": {"type": "STRING", "enum": ["A"], "maxLength": "5"},
            "list": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}]}},
        },
    }
    turn = parsed(
        generationConfig={
            "responseMimeType": "application/json",
            "responseSchema": schema,
        }
    )
    assert json.loads(turn.schema) == {
        "type": ["object", "null"],
        "properties": {
            "type": {"type": "string", "enum": ["A"], "maxLength": 5},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}]}},
        },
    }


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {"anyOf": [{"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        (
            {"type": "STRING", "enum": ["a"], "nullable": True},
            {"type": ["string", "null"], "enum": ["a", None]},
        ),
        (
            {"type": "OBJECT", "additionalProperties": {"type": "STRING"}},
            {"type": "object", "additionalProperties": {"type": "string"}},
        ),
        (
            {"ref": "#/$defs/a", "defs": {"a": {"type": "NUMBER"}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "number"}}},
        ),
    ],
)
def test_nested_and_nullable_schemas_are_json_schemas(
    schema: dict[str, Any], expected: dict[str, Any]
):
    tool = {"functionDeclarations": [{"name": "f", "parameters": schema}]}
    assert json.loads(parsed(tools=[tool]).tools[0].parameters) == expected


def test_schema_that_is_nested_too_deeply_is_refused():
    schema: dict[str, Any] = {"type": "STRING"}
    for _ in range(700):
        schema = {"type": "ARRAY", "items": schema}
    tool = {"functionDeclarations": [{"name": "f", "parameters": schema}]}
    with pytest.raises(SessionError, match="too deeply"):
        parsed(tools=[tool])


@pytest.mark.parametrize(
    ("config", "thinking"),
    [
        ({}, None),
        ({"includeThoughts": True}, True),
        ({"thinkingBudget": 0}, False),
        ({"thinkingBudget": -1}, True),
        ({"thinkingLevel": "HIGH"}, True),
        ({"thinkingLevel": "MINIMAL"}, False),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, None),
    ],
)
def test_thinking_is_requested_by_budget_level_or_wish_to_see_it(
    config: dict[str, Any], thinking: bool | None
):
    assert parsed(generationConfig={"thinkingConfig": config}).thinking is thinking


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png"}}]}]},
            "contents[0].parts[0].inlineData",
        ),
        (
            {"contents": [ASK, {"role": "model", "parts": [{"text": "I"}]}]},
            "contents",
        ),
        (
            {"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]},
            "contents[0].parts[0].functionCall",
        ),
        ({"contents": [{"parts": [{"txt": "hi"}]}]}, "contents[0].parts[0]"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "responseModalities"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        (
            {"generationConfig": {"responseSchema": {"type": "STRING"}}},
            "generationConfig.responseSchema",
        ),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    ],
)
def test_unsupported_fields_are_refused_by_name(body: dict[str, Any], param: str):
    with pytest.raises(SessionError) as refused:
        parsed(**body)
    assert refused.value.status == 400
    assert refused.value.param == param


def test_results_without_ids_answer_the_first_open_call_of_their_name():
    calls = [{"functionCall": {"name": name}} for name in ("f", "g", "f")]
    results = [
        {"functionResponse": {"name": name, "response": {"result": name}}}
        for name in ("g", "f", "f")
    ]
    turn = parsed(
        contents=[
            ASK,
            {"role": "model", "parts": calls},
            {"role": "tool", "parts": results},
        ]
    )
    called = [call.id for call in turn.messages[1].tool_calls]
    answered = [message.tool_call_id for message in turn.messages[2:]]
    assert answered == [called[1], called[0], called[2]]
    assert turn.messages[2].content == "g"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a"}, "a"),
        ({"result": {"b": 1}}, '{"b": 1}'),
        ({"output": "a", "error": "b"}, '{"output": "a", "error": "b"}'),
        ({"temperature": 3}, '{"temperature": 3}'),
        ({}, "{}"),
    ],
)
def test_result_of_a_call_is_its_value_or_the_whole_object(
    response: dict[str, Any], text: str
):
    answered = {"functionResponse": {"name": "f", "response": response}}
    turn = parsed(contents=[{"role": "user", "parts": [answered]}])
    assert turn.messages[0].content == text
