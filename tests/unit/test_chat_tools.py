"""Tools, reasoning, several choices and schemas in chat completions, through the
official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from running_gateway import Running, eventually, running
from tool_replies import CALC, PARSERS, SHELL, say

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import MatchLevel
from invrl.types.rollouts import FailedRollout, RolloutSummary

ASK = {"role": "user", "content": "What is 12*13?"}
ONE = 'Sure.\n<tool_call>\n{"name": "calc", "arguments": {"a": 12, "b": "x"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>'


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    settings = {"max_new_tokens": 256, "constrained": "skip"}
    async with running(
        tmp_path, model, renderer, PARSERS, **settings
    ) as gateway_with_parsers:
        yield gateway_with_parsers


async def ask(client: openai.AsyncOpenAI, messages: list, *, stream: bool, **options):
    """(choice, usage) whole or put together from a stream."""
    if not stream:
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, **options
        )
        return answer.choices[0].message.model_dump(exclude_none=True), answer.choices[
            0
        ].finish_reason
    message: dict = {"role": "assistant", "content": ""}
    finish = None
    async for chunk in await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, **options
    ):
        delta = chunk.choices[0].delta
        finish = chunk.choices[0].finish_reason or finish
        message["content"] += delta.content or ""
        for name in ("reasoning_content", "reasoning"):
            if reasoning := getattr(delta, name, None):
                message[name] = message.get(name, "") + reasoning
        for call in delta.tool_calls or []:
            calls = message.setdefault("tool_calls", [])
            if call.index == len(calls):
                calls.append(
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": ""},
                    }
                )
            calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return message, finish


def path_is_whole(gateway: Running, session) -> None:
    """Each prompt is the ids of the turn's path, then its context."""
    turns = {turn.id: turn for turn in gateway.turns(session)}
    for request in gateway.engine.requests:
        turn = turns[request["rid"]]
        ids = []
        parent = turn.parent_id
        while parent:
            ids = [
                *turns[parent].context_ids_T.tolist(),
                *turns[parent].sampled_ids_T.tolist(),
                *ids,
            ]
            parent = turns[parent].parent_id
        assert request["input_ids"] == [*ids, *turn.context_ids_T.tolist()]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_tool_loop_continues_the_exact_ids(
    gateway: Running, renderer: Renderer, stream: bool
):
    say(gateway, renderer, "<think>12*13 is\nhard</think>\n\n" + TWO, "It is 156.")
    [session] = await gateway.open()
    client = gateway.client(session)
    options = {"stream": stream, "tools": [CALC, SHELL]}
    message, finish = await ask(client, [ASK], **options)
    assert finish == "tool_calls"
    assert message["content"].strip() == "Sure."
    assert message["reasoning_content"].strip() == "12*13 is\nhard"
    assert message["reasoning"] == message["reasoning_content"]
    assert [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message["tool_calls"]
    ] == [
        ("calc", {"a": 12, "b": "x"}),
        ("shell", {"cmd": "ls"}),
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message["tool_calls"], ("156", "a b"), strict=True)
    ]
    last, finish = await ask(client, [ASK, message, *results], **options)
    assert last["content"] == "It is 156."
    assert finish == "stop"
    first, second = gateway.turns(session)
    assert second.parent_id == first.id
    assert second.fork_reason == ""
    path_is_whole(gateway, session)
    assert not first.constrained
    tail = renderer._tokenizer.decode(second.context_ids_T.tolist(), special=True)
    assert tail.startswith("\n<|im_start|>tool\n156<|im_end|>")
    assert tail.endswith("<|im_start|>assistant\n")


async def test_hundreds_of_tools_are_taken(gateway: Running, renderer: Renderer):
    """Hosts of MCP servers offer more than OpenAI's 128."""
    say(gateway, renderer, ONE)
    [session] = await gateway.open()
    tools = [CALC]
    tools += [
        {"type": "function", "function": {"name": f"f{number}"}}
        for number in range(300)
    ]
    counted = await gateway.http.post(
        session.base_url + "/messages/count_tokens",
        json={
            "messages": [ASK],
            "tools": [
                {"name": tool["function"]["name"], "input_schema": {}} for tool in tools
            ],
        },
    )
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 1000


async def test_reply_sent_back_without_its_reasoning_still_matches(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, "<think>hm</think>" + ONE, "156.")
    [session] = await gateway.open()
    client = gateway.client(session)
    message, _ = await ask(client, [ASK], stream=False, tools=[CALC])
    del message["reasoning_content"], message["reasoning"]
    message["content"] = message["content"].strip() + "\n"
    message["tool_calls"][0] |= {"id": "mine"}
    message["tool_calls"][0]["function"]["arguments"] = '{"b":"x","a":12}'
    result = {"role": "tool", "tool_call_id": "mine", "content": "156"}
    await ask(client, [ASK, message, result], stream=False, tools=[CALC])
    first, second = gateway.turns(session)
    assert second.parent_id == first.id
    assert second.fork_reason == ""
    metrics = (await gateway.env("/metrics")).json()
    assert metrics["matches"] == {MatchLevel.WITHOUT_REASONING.name.lower(): 1}


async def test_forced_calls_and_schemas_are_grammars_whose_tokens_never_train(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, ONE)
    named = {"type": "function", "function": {"name": "calc"}}
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
    }
    asked = [
        {"tools": [CALC], "tool_choice": "required"},
        {"tools": [CALC], "tool_choice": named},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        {"response_format": {"type": "json_object"}},
    ]
    [session, mixed] = await gateway.open(2)
    for options in asked:
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], **options
        )
    sent = [request["sampling_params"] for request in gateway.engine.requests]
    assert all(
        '"calc' in sampling_params["ebnf"] or "calc" in sampling_params["ebnf"]
        for sampling_params in sent[:2]
    )
    assert json.loads(sent[2]["json_schema"]) == schema
    assert json.loads(sent[3]["json_schema"]) == {"type": "object"}
    assert all(turn.constrained for turn in gateway.turns(session))
    failed = await gateway.finish(session)
    assert isinstance(failed, FailedRollout)
    assert failed.reason == "constrained"
    assert (
        "the client sends response_format and tool_choice=named and tool_choice=required"
        in failed.detail
    )
    client = gateway.client(mixed)
    message, _ = await ask(client, [ASK], stream=False, **asked[0])
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": "156",
    }
    await ask(client, [ASK, message, result], stream=False, tools=[CALC])
    forced, free = gateway.turns(mixed)
    summary = await gateway.finish(mixed)
    assert isinstance(summary, RolloutSummary)
    assert forced.constrained is True
    assert free.constrained is False
    assert free.parent_id == forced.id
    assert summary.trained_tokens == len(free.sampled_ids_T) < summary.sampled_tokens


@pytest.mark.parametrize(
    "text",
    [TWO, f"{TWO}\n<tool_call>\njunk\n</tool_call>", f"Hm {TWO[:-40]}", TWO + " So."],
)
async def test_retried_stream_repeats_the_first_stream(
    gateway: Running, renderer: Renderer, text: str
):
    say(gateway, renderer, text)
    [session] = await gateway.open()
    client = gateway.client(session)
    options = {"stream": True, "tools": [CALC, SHELL]}
    streams = [
        await ask(
            client, [ASK], extra_headers={"x-stainless-retry-count": retry}, **options
        )
        for retry in ("0", "1")
    ]
    assert streams[0] == streams[1]
    assert len(gateway.turns(session)) == 1


async def test_only_one_call_is_returned_if_parallel_calls_are_off(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, TWO)
    [session] = await gateway.open()
    for stream in (False, True):
        message, _ = await ask(
            gateway.client(session),
            [ASK],
            stream=stream,
            tools=[CALC, SHELL],
            parallel_tool_calls=False,
        )
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 12, "b": "x"}


async def test_tool_choice_none_returns_the_reply_as_text(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, ONE)
    [session] = await gateway.open()
    message, finish = await ask(
        gateway.client(session), [ASK], stream=False, tools=[CALC], tool_choice="none"
    )
    assert message["content"] == ONE
    assert finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_recorded_as_n_sibling_turns(
    gateway: Running, stream: bool
):
    [session] = await gateway.open()
    client = gateway.client(session)
    options = {"model": "tiny", "messages": [ASK], "n": 3}
    if stream:
        texts = ["", "", ""]
        usage = None
        completion = await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in completion:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = await client.chat.completions.create(**options)
        texts = [choice.message.content for choice in answer.choices]
        usage = answer.usage
    turns = gateway.turns(session)
    assert len({turn.sampled_ids_T.tobytes() for turn in turns}) == 3 == len(set(texts))
    assert [turn.parent_id for turn in turns] == [None] * 3
    assert usage.completion_tokens == sum(len(turn.sampled_ids_T) for turn in turns)
    await gateway.finish(session)
    assert all(turn.delivered for turn in gateway.turns(session)), (
        "each choice reached the client"
    )


PATCH = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "lark", "definition": "start: begin_patch"},
        },
    },
}
PATCH_TEXT = '*** Begin Patch\n+x = "1"'


def patch_format(text_format: dict) -> dict:
    custom = {"name": "patch", "format": text_format}
    return {"tools": [{"type": "custom", "custom": custom}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_chat_are_shown_as_functions(
    gateway: Running, renderer: Renderer, stream: bool
):
    called = json.dumps({"name": "patch", "arguments": {"input": PATCH_TEXT}})
    other = json.dumps({"name": "calc", "arguments": {"a": 1}})
    calls = f"<tool_call>\n{called}\n</tool_call>\n<tool_call>\n{other}\n</tool_call>"
    say(gateway, renderer, calls, "Done.")
    [session] = await gateway.open()
    body = {"model": "tiny", "tools": [PATCH, CALC], "stream": stream}

    async def ask_raw(messages: list) -> list[dict]:
        answer = await gateway.env(
            "/v1/chat/completions", {**body, "messages": messages}, key=session.key
        )
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]["message"].get("tool_calls", [])
        calls: list[dict] = []
        for line in answer.text.splitlines():
            if not line.startswith("data: {"):
                continue
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({"custom": {"input": ""}, "function": {}, **part})
                elif "custom" in part:
                    calls[part["index"]]["custom"]["input"] += part["custom"]["input"]
        return calls

    question = {"role": "user", "content": "Add x"}
    patch, calc = await ask_raw([question])
    assert (patch["type"], patch["custom"]) == (
        "custom",
        {"name": "patch", "input": PATCH_TEXT},
    )
    assert (calc["type"], calc["function"]["name"]) == ("function", "calc")
    prompt = renderer.decode(gateway.engine.requests[0]["input_ids"])
    assert "start: begin_patch" in prompt
    sent = [
        {"id": patch["id"], "type": "custom", "custom": patch["custom"]},
        {
            "id": calc["id"],
            "type": "function",
            "function": {"name": "calc", "arguments": '{"a": 1}'},
        },
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in sent
    ]
    await ask_raw([question, {"role": "assistant", "tool_calls": sent}, *results])
    path_is_whole(gateway, session)
    first, second = gateway.turns(session)
    assert (second.parent_id, second.fork_reason) == (first.id, "")
    matches = (await gateway.env("/metrics")).json()["matches"]
    assert set(matches) <= {"exact", "canonical"}


async def test_a_custom_tool_of_chat_can_be_required(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, "x")
    [session] = await gateway.open(purpose="serve")
    create = gateway.client(session).chat.completions.create
    named = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    for choice in (named, allowed):
        await create(
            model="tiny", messages=[ASK], tools=[CALC, PATCH], tool_choice=choice
        )
    assert [turn.constrained for turn in gateway.turns(session)] == [True, True]


@pytest.mark.parametrize("place", ["same message", "behind the result"])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_beside_a_call_may_come_back_as_a_message_of_its_own(
    gateway: Running, renderer: Renderer, stream: bool, place: str
):
    """The model's own tokens are kept, and the text is not rendered again."""
    say(gateway, renderer, ONE, "It is 156.", "Bye.")
    [session] = await gateway.open()
    client = gateway.client(session)
    first, _ = await ask(client, [ASK], stream=stream, tools=[CALC])
    calls = {"role": "assistant", "tool_calls": first["tool_calls"]}
    text = {"role": "assistant", "content": first["content"]}
    assert text["content"].strip() == "Sure."
    [call] = first["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "156"}
    history = [ASK, calls, text, result]
    if place == "behind the result":
        history = [ASK, calls, result, text]
    second, _ = await ask(client, history, stream=stream, tools=[CALC])
    more = {"role": "user", "content": "Thanks"}
    history = [*history, {"role": "assistant", "content": second["content"]}, more]
    await ask(client, history, stream=stream, tools=[CALC])
    path_is_whole(gateway, session)
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", "", ""]
    assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id]
    prompt = renderer.decode(gateway.engine.requests[-1]["input_ids"])
    assert prompt.count("Sure.") == 1


@pytest.mark.parametrize("order", ["calls first", "each result behind its call"])
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_one_reply_may_come_back_in_messages_of_their_own(
    gateway: Running, renderer: Renderer, stream: bool, order: str
):
    """The prompt is that of an agent which sends the reply back whole."""
    say(gateway, renderer, TWO, "It is 156.", "Bye.", TWO, "It is 156.", "Bye.")
    prompts = []
    for is_split in (False, True):
        [session] = await gateway.open()
        client = gateway.client(session)
        options = {"stream": stream, "tools": [CALC, SHELL]}
        first, _ = await ask(client, [ASK], **options)
        calls = [
            {"role": "assistant", "content": text, "tool_calls": [call]}
            for text, call in zip(
                (first["content"], None), first["tool_calls"], strict=True
            )
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(first["tool_calls"], ("156", "a b"), strict=True)
        ]
        history = [ASK, first, *results]
        if is_split and order == "calls first":
            history = [ASK, *calls, *results]
        elif is_split:
            history = [ASK, calls[0], results[0], calls[1], results[1]]
        second, _ = await ask(client, history, **options)
        more = {"role": "user", "content": "Thanks"}
        history = [*history, {"role": "assistant", "content": second["content"]}, more]
        await ask(client, history, **options)
        turns = gateway.turns(session)
        assert [turn.fork_reason for turn in turns] == ["", "", ""]
        assert [turn.parent_id for turn in turns] == [None, turns[0].id, turns[1].id]
        prompts.append(gateway.engine.requests[-1]["input_ids"])
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (patch_format({"type": "json"}), "tools[0].custom.format.type"),
        (
            patch_format(
                {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}}
            ),
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            patch_format({"type": "grammar", "grammar": {"syntax": "lark"}}),
            "tools[0].custom.format.grammar.definition",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [CALC, CALC]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [CALC],
                "tool_choice": {"type": "function", "function": {"name": "no"}},
            },
            "tool_choice",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": []}}
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "nonsense"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_bad_tools_are_refused(gateway: Running, options: dict, param: str):
    [session] = await gateway.open()
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], **options
        )
    assert caught.value.param == param


async def test_choices_over_the_turn_limit_leave_no_generation_running(
    gateway: Running,
):
    gateway.engine.holds = lambda _: True
    [session] = await gateway.open(limits={"max_turns": 2})
    with pytest.raises(openai.PermissionDeniedError, match="turns"):
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], n=3
        )
    await eventually(lambda: not gateway.engine.running)
    assert len(gateway.engine.cancelled) == len(gateway.engine.requests)
