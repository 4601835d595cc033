"""`/v1/responses` as its clients see it, over HTTP, on a fake engine that says what it
is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai
import pytest
from fakes import EngineDeaths
from openai.types.responses import Response
from running_gateway import Running, eventually, running
from tool_replies import PARSERS, say

from invrl.gateway.rendering.renderer import Renderer
from invrl.types.rollouts import RolloutSummary

END = 2
TOOL = {
    "type": "function",
    "name": "calc",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
    },
    "strict": False,
}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": %d}}\n</tool_call>'
THOUGHT = "<think>12 plus 13</think>"


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    parsers = PARSERS
    async with running(
        tmp_path,
        model,
        renderer,
        parsers=parsers,
        context_length=4096,
        max_new_tokens=512,
    ) as gateway_with_parsers:
        yield gateway_with_parsers


def check_exact(
    gateway: Running, turns: Sequence, *, parents: Sequence[int | None]
) -> None:
    """Every prompt that the engine got is the ids of the turn's path and what the turn
    adds, no others."""
    by_id = {turn.id: turn for turn in turns}
    assert [turn.parent_id for turn in turns] == [
        None if at is None else turns[at].id for at in parents
    ]
    for turn, request in zip(turns, gateway.engine.requests, strict=True):
        path = turn.context_ids_T.tolist()
        at = turn.parent_id
        while at is not None:
            before = by_id[at]
            path = [
                *before.context_ids_T.tolist(),
                *before.sampled_ids_T.tolist(),
                *path,
            ]
            at = before.parent_id
        assert request["input_ids"] == path


async def test_a_chain_of_previous_responses_is_one_trajectory(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, "156.", "Yes.", "Bye.")
    [session] = await gateway.open()
    create = gateway.client(session).responses.create
    first = await create(
        model="tiny", input="12*13?", instructions="Be brief.", metadata={"a": "b"}
    )
    assert first.status == "completed"
    assert first.output_text == "156."
    assert first.error is None
    assert first.metadata == {"a": "b"}
    assert first.instructions == "Be brief."
    assert first.tools == []
    assert first.output[0].type == "message"
    assert first.usage is not None
    turns = gateway.turns(session)
    assert first.id == f"resp_{turns[0].id}"
    assert first.usage.output_tokens == len(turns[0].sampled_ids_T)
    assert first.usage.input_tokens == turns[0].prompt_tokens
    second = await create(
        model="tiny",
        input="Sure?",
        instructions="Be brief.",
        previous_response_id=first.id,
        store=False,
    )
    third = await create(
        model="tiny",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Bye"}]}],
        instructions="Be brief.",
        previous_response_id=second.id,
    )
    assert third.output_text == "Bye."
    assert third.previous_response_id == second.id
    assert third.usage is not None
    assert third.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
    other = await create(model="tiny", input="Sure?", previous_response_id=first.id)
    check_exact(gateway, gateway.turns(session), parents=[None, 0, 1, None])
    prompt = renderer._tokenizer.decode(
        gateway.engine.requests[-1]["input_ids"], special=True
    )
    assert "Be brief." not in prompt  # instructions are for one request alone
    assert "156.<|im_end|>\n<|im_start|>user\nSure?" in prompt
    assert other.output_text == "Bye."
    assert isinstance(await gateway.finish(session), RolloutSummary)
    assert all(turn.delivered for turn in gateway.turns(session))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tools_loop_sent_back_as_items_is_one_trajectory(
    gateway: Running, renderer: Renderer, stream: bool
):
    calls = "Let me see." + CALL % 12 + "\n" + CALL % 13
    say(
        gateway,
        renderer,
        THOUGHT + calls,
        THOUGHT + "25.",
        CALL % 1 + "A second." + CALL % 2,
        "3.",
    )
    [session] = await gateway.open()
    client = gateway.client(session)
    items: list = [{"role": "user", "content": "12+13?"}]

    async def ask() -> Response:
        settings = {
            "model": "tiny",
            "input": items,
            "tools": [TOOL],
            "store": False,
        }
        if not stream:
            return await client.responses.create(**settings)
        async with client.responses.stream(**settings) as events:
            async for event in events:
                assert event.type
            return await events.get_final_response()

    first = await ask()
    assert [item.type for item in first.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    reasoning, message, *called = [item.model_dump() for item in first.output]
    assert reasoning["content"][0]["text"] == "12 plus 13"
    assert message["content"][0]["text"] == "Let me see."
    assert [json.loads(call["arguments"]) for call in called] == [{"x": 12}, {"x": 13}]
    assert first.usage is not None
    thought = len(renderer.encode(THOUGHT))
    assert first.usage.output_tokens_details.reasoning_tokens == thought
    items += [item.model_dump(exclude_unset=True) for item in first.output]
    items += [
        {
            "type": "function_call_output",
            "call_id": called[0]["call_id"],
            "output": "12",
        },
        {
            "type": "function_call_output",
            "call_id": called[1]["call_id"],
            "output": [{"type": "input_text", "text": "13"}],
        },
    ]
    second = await ask()
    assert second.output_text == "25."
    items += [item.model_dump(exclude_unset=True) for item in second.output]
    items.append({"role": "user", "content": "Thanks. 1+2?"})
    third = await ask()
    assert third.output_text == "A second."
    # a stream tells them as they come
    kinds = ["function_call", "message", "function_call"]
    assert [item.type for item in third.output] == (
        kinds if stream else sorted(kinds, reverse=True)
    )
    items += [item.model_dump(exclude_unset=True) for item in third.output]
    called = [item.call_id for item in third.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": call, "output": "1"}
        for call in called
    ]
    await ask()
    turns = gateway.turns(session)
    check_exact(gateway, turns, parents=[None, 0, 1, 2])
    assert [turn.fork_reason for turn in turns] == ["", "", "", ""]
    sent = renderer._tokenizer.decode(turns[1].context_ids_T.tolist(), special=True)
    assert (
        sent
        == "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>tool\n13<|im_end|>\n<|im_start|>assistant\n"
    )


def references(response: Response) -> list:
    """What Vercel's `ai` sends in place of a stored response's output."""
    return [{"type": "item_reference", "id": item.id} for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_referred_to_by_id_are_one_trajectory(
    gateway: Running, renderer: Renderer, stream: bool
):
    in_between = CALL % 1 + "A second." + CALL % 2 + "And done."
    say(
        gateway,
        renderer,
        THOUGHT + "I see." + CALL % 12 + "\n" + CALL % 13,
        in_between,
        "4.",
        "Bye.",
    )
    [session] = await gateway.open()
    client = gateway.client(session)
    items: list = [{"role": "user", "content": "12+13?"}]

    async def ask() -> Response:
        settings = {
            "model": "tiny",
            "input": items,
            "tools": [TOOL],
            "store": True,
        }
        if not stream:
            return await client.responses.create(**settings)
        async with client.responses.stream(**settings) as events:
            return await events.get_final_response()

    for _ in range(2):
        answer = await ask()
        called = [
            item.call_id for item in answer.output if item.type == "function_call"
        ]
        assert len(called) == 2
        items += references(answer)
        items += [
            {"type": "function_call_output", "call_id": call, "output": "1"}
            for call in called
        ]
    items += references(await ask())
    items.append({"role": "user", "content": "Thanks."})
    await ask()
    turns = gateway.turns(session)
    check_exact(gateway, turns, parents=[None, 0, 1, 2])
    assert [turn.fork_reason for turn in turns] == ["", "", "", ""]
    shown = (await gateway.env("/metrics")).json()
    assert shown["matches"] == {"exact": 3}


async def test_an_item_of_another_session_cannot_be_referred_to(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, "A secret." + CALL % 1)
    [session] = await gateway.open()
    [other] = await gateway.open()
    answer = await gateway.client(session).responses.create(
        model="tiny", input="Hi", tools=[TOOL]
    )
    *_, call = answer.output
    assert call.id is not None
    for asker, item_id in (
        (other, answer.output[0].id),
        (other, call.id),
        (session, call.id[:-1] + "7"),
        (session, "msg_0123"),
    ):
        reference = {"type": "item_reference", "id": item_id}
        with pytest.raises(openai.BadRequestError, match="not found") as refused:
            await gateway.client(asker).responses.create(
                model="tiny", input=[USER, reference]
            )
        assert refused.value.code == "item_not_found"
        assert refused.value.param == "input[1].id"
    mixed = [
        USER,
        {"id": answer.output[0].id},
        {"type": "item_reference", "id": call.id},
        USER,
    ]
    await gateway.client(session).responses.create(
        model="tiny", input=mixed, tools=[TOOL]
    )


async def test_response_can_be_read_again_by_its_id(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, THOUGHT + "Let me see." + CALL % 12, "156. 🙂")
    [session] = await gateway.open()
    [other] = await gateway.open()
    client = gateway.client(session)
    settings = {"model": "tiny", "instructions": "Be brief.", "tools": [TOOL]}
    settings["include"] = ["message.output_text.logprobs"]
    first = await client.responses.create(input="12*13?", **settings)
    result = {
        "type": "function_call_output",
        "call_id": first.output[2].call_id,
        "output": "156",
    }
    second = await client.responses.create(
        input=[result], previous_response_id=first.id, **settings
    )
    cut = await client.responses.create(input="More?", max_output_tokens=1, **settings)
    bearer = gateway.client(session, base_url=f"{gateway.url}/v1", api_key=session.key)
    for response, asker in ((first, client), (second, bearer), (cut, client)):
        again = await asker.responses.retrieve(
            response.id, include=["message.output_text.logprobs"]
        )
        unrecorded = {"max_output_tokens", "tools"}
        assert again.model_dump(exclude=unrecorded) == response.model_dump(
            exclude=unrecorded
        )
        assert [(tool.name, tool.parameters) for tool in again.tools] == [
            (TOOL["name"], TOOL["parameters"])
        ]
    plain = await client.responses.retrieve(second.id)
    assert plain.output_text == "156. 🙂"
    assert plain.output[0].content[0].logprobs == []
    for asker, name in (
        (client, "resp_turn-0"),
        (client, first.id.removeprefix("resp_")),
        (gateway.client(other), first.id),
    ):
        with pytest.raises(openai.NotFoundError, match="not found") as unknown:
            await asker.responses.retrieve(name)
        assert unknown.value.code == "response_not_found"
        assert unknown.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="stream"):
        await client.responses.retrieve(first.id, stream=True)
    with pytest.raises(openai.AuthenticationError):
        await gateway.client(session, base_url=f"{gateway.url}/v1").responses.retrieve(
            first.id
        )
    assert len(gateway.turns(session)) == 3
    await gateway.finish(session)
    with pytest.raises(openai.AuthenticationError):
        await client.responses.retrieve(first.id)


async def test_response_stream_equals_the_whole_response_in_order(
    gateway: Running, renderer: Renderer
):
    gateway.engine.token_delay_s = 0.002
    say(gateway, renderer, THOUGHT + "Hello 漢字🙂" + CALL % 1 + CALL % 2)
    [session] = await gateway.open()
    stream = await gateway.client(session).responses.create(
        model="tiny",
        input="Hi",
        tools=[TOOL],
        stream=True,
        include=["message.output_text.logprobs"],
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    assert order[:2] == ["created", "in_progress"]
    text_part = [
        "output_item.added",
        "content_part.added",
        "{0}.delta",
        "{0}.done",
        "content_part.done",
    ]
    assert order[2:14] == [
        kind.format(name)
        for name in ("reasoning_text", "output_text")
        for kind in [*text_part, "output_item.done"]
    ]
    call = ["output_item.added", "function_call_arguments.delta"]
    done = ["function_call_arguments.done", "output_item.done"]
    assert order[14:] == [*call, *call, *done, *done, "completed"]
    final = events[-1].response
    for at, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        streamed_text = "".join(
            event.delta for event in own if event.type.endswith(".delta")
        )
        assert streamed_text == (
            item.arguments if item.type == "function_call" else item.content[0].text
        )
        assert own[-1].item == item
    [turn] = gateway.turns(session)
    shown = final.output[1].content[0].logprobs
    assert [token.logprob for token in shown] == pytest.approx(
        turn.logprobs_T.tolist()[: len(shown)], abs=1e-6
    )
    assert "".join(token.token for token in shown).startswith(THOUGHT + "Hello ")
    await eventually(lambda: gateway.turns(session)[0].delivered)


async def test_namespaced_functions_are_known_by_both_names(
    gateway: Running, renderer: Renderer
):
    """Codex CLI offers some so, and `web_search`, which is left out."""
    say(
        gateway,
        renderer,
        '<tool_call>\n{"name": "agents.calc", "arguments": {}}\n</tool_call>',
        "Done.",
    )
    [session] = await gateway.open()
    tools = [
        {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL]}
    ]
    settings = {
        "model": "tiny",
        "tools": [*tools, {"type": "web_search", "external_web_access": False}],
    }
    create = gateway.client(session).responses.create
    extra = {"client_metadata": {"thread": "x"}}
    first = await create(input="Hi", extra_body=extra, **settings)
    [call] = [item.model_dump(exclude_unset=True) for item in first.output]
    assert call["name"] == "calc"
    assert call["namespace"] == "agents"
    output = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": "1",
    }
    await create(
        input=[{"role": "user", "content": "Hi"}, call, output],
        extra_body=extra,
        **settings,
    )
    check_exact(gateway, gateway.turns(session), parents=[None, 0])


APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
}
PATCH = '*** Begin Patch\n+x = "1"\n*** End Patch'
SHELL_ARGUMENTS = {"command": ["bash", "-lc", "ls"], "timeout_ms": 1000}


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_and_the_local_shell_are_shown_as_functions(
    gateway: Running, renderer: Renderer, stream: bool
):
    called = [
        {"name": "apply_patch", "arguments": {"input": PATCH}},
        {"name": "local_shell", "arguments": SHELL_ARGUMENTS},
    ]
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in called
    )
    say(gateway, renderer, calls, "Done.")
    [session] = await gateway.open()
    client = gateway.client(session)
    settings = {
        "model": "tiny",
        "tools": [APPLY, {"type": "local_shell"}],
        "store": False,
    }

    async def ask(items: list) -> Response:
        if not stream:
            return await client.responses.create(input=items, **settings)
        response = None
        inputs = {"delta": "", "done": ""}
        async for event in await client.responses.create(
            input=items, stream=True, **settings
        ):
            if event.type == "response.custom_tool_call_input.delta":
                inputs["delta"] += event.delta
            if event.type == "response.custom_tool_call_input.done":
                inputs["done"] = event.input
            if event.type == "response.completed":
                response = event.response
        assert inputs["delta"] == inputs["done"]
        assert response is not None
        return response

    question = {"role": "user", "content": "Add x"}
    first = await ask([question])
    prompt = renderer._tokenizer.decode(
        gateway.engine.requests[0]["input_ids"], special=True
    )
    assert "start: begin_patch" in prompt
    assert "local_shell" in prompt
    patch, shell = first.output
    assert patch.type == "custom_tool_call"
    assert patch.name == "apply_patch"
    assert patch.input == PATCH
    assert shell.type == "local_shell_call"
    assert shell.action.command == ["bash", "-lc", "ls"]
    assert shell.action.timeout_ms == 1000
    assert shell.action.env == {}
    assert shell.status == "completed"
    sent_back = [
        item.model_dump(mode="json", exclude_none=True) for item in first.output
    ]
    results = [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Done"},
        {"type": "local_shell_call_output", "id": shell.id, "output": "x.py"},
    ]
    last = await ask([question, *sent_back, *results])
    assert last.output_text == "Done."
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", ""]
    check_exact(gateway, turns, parents=[None, 0])
    matches = (await gateway.env("/metrics")).json()["matches"]
    assert matches == {"exact": 1} or matches == {"canonical": 1}
    tail = renderer._tokenizer.decode(turns[1].context_ids_T.tolist(), special=True)
    assert tail.index("Done") < tail.index("x.py")


async def test_a_call_of_another_form_than_its_tool_is_shown_as_it_is(
    gateway: Running, renderer: Renderer
):
    called = [
        {"name": "apply_patch", "arguments": {"patch": "x"}},
        {"name": "local_shell", "arguments": {}},
    ]
    say(
        gateway,
        renderer,
        "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in called),
        "Done.",
    )
    [session] = await gateway.open()
    create = gateway.client(session).responses.create
    settings = {
        "model": "tiny",
        "tools": [APPLY, {"type": "local_shell"}],
    }
    first = await create(input="Add x", **settings)
    patch, shell = first.output
    assert patch.type == "custom_tool_call"
    assert json.loads(patch.input) == {"patch": "x"}
    assert shell.type == "local_shell_call"
    assert shell.action.command == []
    items = [item.model_dump(mode="json", exclude_none=True) for item in first.output]
    results = [
        {
            "type": "custom_tool_call_output",
            "call_id": patch.call_id,
            "output": "no patch",
        },
        {
            "type": "local_shell_call_output",
            "call_id": shell.call_id,
            "output": "no command",
        },
    ]
    await create(
        input=[{"role": "user", "content": "Add x"}, *items, *results], **settings
    )
    check_exact(gateway, gateway.turns(session), parents=[None, 0])


OPERATION = {"type": "update_file", "path": "a.py", "diff": "@@\n-x\n+y\n"}


@pytest.mark.parametrize("stream", [False, True])
async def test_shell_and_patch_tools_have_items_of_their_own(
    gateway: Running, renderer: Renderer, stream: bool
):
    called = [
        {"name": "shell", "arguments": {"commands": ["ls", "pwd"]}},
        {"name": "apply_patch", "arguments": OPERATION},
    ]
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in called
    )
    say(gateway, renderer, calls, "Done.")
    [session] = await gateway.open()
    tools = [
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "apply_patch"},
    ]
    body = {"model": "tiny", "tools": tools, "store": False, "stream": stream}

    async def ask(items: list) -> tuple[list[dict], list[dict]]:
        answer = await gateway.env(
            "/v1/responses", {**body, "input": items}, key=session.key
        )
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["output"], []
        events = [
            json.loads(line.removeprefix("data: "))
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        return events[-1]["response"]["output"], events

    question = {"role": "user", "content": "Replace x"}
    output, events = await ask([question])
    shell, patch = output
    assert (shell["type"], shell["status"]) == ("shell_call", "completed")
    assert shell["action"] == {
        "commands": ["ls", "pwd"],
        "timeout_ms": None,
        "max_output_length": None,
    }
    assert (patch["type"], patch["status"]) == ("apply_patch_call", "completed")
    assert patch["operation"] == OPERATION
    assert "name" not in {**shell, **patch}
    if stream:
        done = [event for event in events if event["type"].endswith("command.done")]
        assert [event["command"] for event in done] == ["ls", "pwd"]
        assert [event["command_index"] for event in done] == [0, 1]
        [diff] = [event for event in events if event["type"].endswith("diff.done")]
        assert (diff["diff"], diff["output_index"]) == (OPERATION["diff"], 1)
    results = [
        {
            "type": "shell_call_output",
            "call_id": shell["call_id"],
            "output": [
                {
                    "stdout": "a.py\n",
                    "stderr": "",
                    "outcome": {"type": "exit", "exit_code": 0},
                },
                {"stdout": "", "stderr": "slow", "outcome": {"type": "timeout"}},
            ],
        },
        {
            "type": "apply_patch_call_output",
            "call_id": patch["call_id"],
            "status": "failed",
            "output": "no x",
        },
    ]
    await ask([question, *output, *results])
    turns = gateway.turns(session)
    assert [turn.fork_reason for turn in turns] == ["", ""]
    check_exact(gateway, turns, parents=[None, 0])
    tail = renderer.decode(turns[1].context_ids_T.tolist())
    assert "a.py\nexit code 0\nstderr: slow\ntimed out" in tail
    assert "failed\nno x" in tail


async def test_calls_of_shell_and_patch_that_cannot_be_read_are_empty(
    gateway: Running, renderer: Renderer
):
    called = [
        {"name": "shell", "arguments": {"commands": "ls"}},
        {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}},
        {"name": "apply_patch", "arguments": {"patch": "x"}},
    ]
    say(
        gateway,
        renderer,
        "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in called),
    )
    [session] = await gateway.open()
    body = {
        "model": "tiny",
        "tools": [{"type": "shell"}, {"type": "apply_patch"}],
        "input": "Delete a",
    }
    answer = await gateway.env("/v1/responses", body, key=session.key)
    shell, delete, unread = answer.json()["output"]
    assert shell["action"]["commands"] == []
    assert delete["operation"] == {"type": "delete_file", "path": "a"}
    assert unread["operation"] == {"type": "update_file", "path": "", "diff": ""}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
            "tools[0].environment.type",
        ),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax",
        ),
        (
            {
                "input": [
                    {"type": "shell_call", "call_id": "c", "action": {"command": "ls"}}
                ]
            },
            "input[0].action",
        ),
        (
            {
                "input": [
                    {
                        "type": "apply_patch_call",
                        "call_id": "c",
                        "operation": {"type": "move_file", "path": "x"},
                    }
                ]
            },
            "input[0].operation",
        ),
    ],
)
async def test_tools_that_cannot_be_shown_are_refused_by_their_field(
    gateway: Running, body: dict, param: str
):
    [session] = await gateway.open()
    answer = await gateway.env(
        "/v1/responses", {"model": "tiny", "input": "x", **body}, key=session.key
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_text_item_behind_the_result_of_a_call_is_no_edit(
    gateway: Running, renderer: Renderer, stream: bool
):
    say(gateway, renderer, "Sure.\n" + CALL % 1, "It is 1.", "Bye.")
    [session] = await gateway.open()
    create = gateway.client(session).responses.create
    question = {"role": "user", "content": "1?"}

    async def ask(items: list) -> list[dict]:
        answer = await create(model="tiny", input=items, tools=[TOOL], stream=stream)
        if stream:
            events = [event async for event in answer]
            answer = events[-1].response
        return [item.model_dump(mode="json") for item in answer.output]

    text, call = await ask([question])
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": "1",
    }
    items = [question, call, result, text]
    output = await ask(items)
    await ask([*items, *output, {"role": "user", "content": "Thanks"}])
    check_exact(gateway, gateway.turns(session), parents=[None, 0, 1])


@pytest.mark.parametrize("stream", [False, True])
async def test_call_items_of_one_reply_may_each_stand_before_their_output(
    gateway: Running, renderer: Renderer, stream: bool
):
    calls_text = "Sure.\n" + CALL % 1 + "\n" + CALL % 2
    say(gateway, renderer, calls_text, "It is 3.", "Bye.")
    [session] = await gateway.open()
    create = gateway.client(session).responses.create
    question = {"role": "user", "content": "1 and 2?"}

    async def ask(items: list) -> list[dict]:
        answer = await create(model="tiny", input=items, tools=[TOOL], stream=stream)
        if stream:
            events = [event async for event in answer]
            answer = events[-1].response
        return [item.model_dump(mode="json") for item in answer.output]

    items: list[dict] = [question]
    for item in await ask(items):
        items.append(item)
        if item["type"] == "function_call":
            output = {"call_id": item["call_id"], "output": item["arguments"]}
            items.append({"type": "function_call_output", **output})
    assert len(items) == 6
    items += await ask(items)
    await ask([*items, {"role": "user", "content": "Thanks"}])
    check_exact(gateway, gateway.turns(session), parents=[None, 0, 1])
    assert [turn.fork_reason for turn in gateway.turns(session)] == ["", "", ""]


async def test_a_custom_tool_can_be_required(gateway: Running, renderer: Renderer):
    say(gateway, renderer, "x")
    [session] = await gateway.open(purpose="serve")
    create = gateway.client(session).responses.create
    tools = [TOOL, APPLY, {"type": "local_shell"}]
    for choice in ({"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}):
        await create(model="tiny", input="Add x", tools=tools, tool_choice=choice)
    assert [turn.constrained for turn in gateway.turns(session)] == [True, True]


async def test_response_settings_reach_the_turn(gateway: Running, renderer: Renderer):
    say(gateway, renderer, "one two three four five", "{}")
    [session] = await gateway.open(purpose="serve")
    create = gateway.client(session).responses.create
    cut = await create(
        model="tiny", input="Count", max_output_tokens=3, temperature=0.5, top_p=0.9
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"
    params = gateway.engine.requests[-1]["sampling_params"]
    assert params["temperature"] == 0.5
    assert params["top_p"] == 0.9
    assert params["max_new_tokens"] == 3
    assert cut.temperature == 0.5
    assert cut.top_p == 0.9
    assert cut.max_output_tokens == 3
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {
        "format": {
            "type": "json_schema",
            "name": "x",
            "schema": schema,
            "strict": True,
        }
    }
    shaped = await create(
        model="tiny", input="Count", text=form, reasoning={"effort": "none"}
    )
    assert (
        json.loads(gateway.engine.requests[-1]["sampling_params"]["json_schema"])
        == schema
    )
    assert shaped.text is not None
    assert shaped.text.format is not None
    assert shaped.text.format.type == "json_schema"
    await create(
        model="tiny",
        input="Count",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "calc"},
    )
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "calc"}],
    }
    await create(model="tiny", input="Count", tools=[TOOL], tool_choice=allowed)
    assert [turn.constrained for turn in gateway.turns(session)[-2:]] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_generation_is_a_response_error(gateway: Running, stream: bool):
    [session] = await gateway.open()
    if stream:
        gateway.engine.holds = EngineDeaths(gateway.engine, 2, 1, 1)
    else:
        gateway.engine.aborts = 3
    raw = await gateway.http.post(
        session.base_url + "/responses",
        json={"model": "tiny", "input": "Hi", "stream": stream},
    )
    if not stream:
        assert raw.status_code == 503
        assert raw.json()["error"]["code"] == "engine_unavailable"
        return
    events = [
        json.loads(line[6:])
        for line in raw.text.splitlines()
        if line.startswith("data: ")
    ]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    gateway.engine.holds = EngineDeaths(gateway.engine, 2, 1, 1)
    with pytest.raises(openai.APIError, match="closed the connection"):
        async for _ in await gateway.client(session).responses.create(
            model="tiny", input="Yo", stream=True
        ):
            pass


USER = {"role": "user", "content": "x"}
BAD_FIELDS = {
    "no input": {"input": None},
    "empty input": {"input": []},
    "unknown field": {"temprature": 1},
    "unknown role": {"input": [{"role": "robot", "content": "x"}]},
    "image": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
        ]
    },
    "item_reference": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "bare reference": {"input": [{"id": "msg_1"}]},
    "reference to no turn": {
        "input": [USER, {"type": "item_reference", "id": "msg_turn-0123456789abcdef"}]
    },
    "reference without id": {"input": [USER, {"type": "item_reference"}]},
    "other item": {"input": [USER, {"type": "local_shell_call", "call_id": "c"}]},
    "call without id": {
        "input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]
    },
    "output without id": {
        "input": [USER, {"type": "function_call_output", "output": "1"}]
    },
    "file output": {
        "input": [
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_file"}],
            }
        ]
    },
    "screenshots": {"tools": [{"type": "computer_use_preview"}]},
    "custom tool without name": {"tools": [{"type": "custom"}]},
    "tool name": {"tools": [{"type": "function", "name": "a b"}]},
    "tools twice": {"tools": [TOOL, TOOL]},
    "schema": {"tools": [{"type": "function", "name": "f", "parameters": 3}]},
    "half a surrogate": {
        "tools": [{"type": "function", "name": "f", "parameters": {"a": "\ud800"}}]
    },
    "tool choice": {"tool_choice": "sometimes"},
    "unknown function": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "other"},
    },
    "built-in choice": {"tool_choice": {"type": "web_search"}},
    "unknown allowed tool": {
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "b"}],
        },
    },
    "no allowed tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
    },
    "foreign response": {"previous_response_id": "resp_turn-0"},
    "not a response": {"previous_response_id": "chatcmpl-1"},
    "max_output_tokens": {"max_output_tokens": 0},
    "temperature": {"temperature": 3},
    "include": {"include": ["everything"]},
    "format": {"text": {"format": {"type": "xml"}}},
    "schema format": {"text": {"format": {"type": "json_schema", "name": "x"}}},
    "top_logprobs": {"top_logprobs": 21},
    "background": {"background": True},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "conv_1"},
}


async def test_bad_responses_body_is_a_400_in_openais_shape(gateway: Running):
    [session] = await gateway.open()
    bodies = {
        name: json.dumps({"model": "tiny", "input": "x"} | fields)
        for name, fields in BAD_FIELDS.items()
    }
    for name, body in {
        **bodies,
        "not json": "{",
        "list": "[]",
        "bomb": '{"input": ' + "[" * 100_000,
    }.items():
        answer = await gateway.http.post(session.base_url + "/responses", content=body)
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    skipped = b'{"model": "tiny", "input": "x", "metadata": {"a": "\xff"}}'
    assert (
        await gateway.http.post(session.base_url + "/responses", content=skipped)
    ).status_code == 400
    assert gateway.engine.requests == []
    [serving] = await gateway.open(purpose="serve")
    with pytest.raises(openai.NotFoundError):
        await gateway.client(serving).responses.create(model="gpt-9", input="x")


async def test_empty_and_truncated_replies_can_be_sent_back(
    gateway: Running, renderer: Renderer
):
    """Nothing at all; thinking that was cut off; and a call of no text, which the
    client made up."""
    say(gateway, renderer, "", THOUGHT[:-3], ".")
    [session] = await gateway.open()
    create = gateway.client(session).responses.create
    items: list = [USER]
    for kind in ("message", "reasoning", "message"):
        answer = await create(model="tiny", input=items, tools=[TOOL])
        assert [item.type for item in answer.output] == [kind]
        items += [
            *(item.model_dump(exclude_unset=True) for item in answer.output),
            USER,
        ]
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "calc",
        "arguments": '{"x": "\\ud800"}',
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "1"}
    await create(model="tiny", input=[*items, call, result], tools=[TOOL])
    check_exact(gateway, gateway.turns(session), parents=[None, 0, 1, 2])


async def test_a_response_of_another_session_is_not_found(gateway: Running):
    own, other = await gateway.open(2)
    first = await gateway.client(own).responses.create(model="tiny", input="secret")
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client(other).responses.create(
            model="tiny", input="x", previous_response_id=first.id
        )
    assert refused.value.code == "previous_response_not_found"
