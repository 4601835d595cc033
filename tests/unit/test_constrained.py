"""Replies that a client wants forced into a form: what the engine is asked for, and
what is trained."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from running_gateway import ASK, Running, running
from tool_replies import PARSERS, say

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.types import Tool, ToolChoice
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary

END = 2
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
CALC = {
    "type": "function",
    "function": {"name": "calc", "parameters": PARAMETERS},
}
SHELL = {
    "type": "function",
    "function": {"name": "shell", "parameters": PARAMETERS},
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "schema": SCHEMA},
}
CALL = '<tool_call>\n{"name":"%s", "arguments":{"a": 12}}\n</tool_call>'
FORCED: dict[str, dict[str, Any]] = {
    "tool_choice=required": {"tools": [CALC, SHELL], "tool_choice": "required"},
    "tool_choice=named": {
        "tools": [CALC, SHELL],
        "tool_choice": {"type": "function", "function": {"name": "calc"}},
    },
    "response_format": {"response_format": FORMAT},
}
every_way = pytest.mark.parametrize("way", list(FORCED))


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer, request: pytest.FixtureRequest
) -> AsyncIterator[Running]:
    """`request.param`: --gateway.constrained."""
    settings = {"max_new_tokens": 256, "constrained": request.param}
    async with running(
        tmp_path, model, renderer, PARSERS, **settings
    ) as gateway_with_parsers:
        yield gateway_with_parsers


def grammar_of(gateway: Running) -> set[str]:
    """Names of the grammars that the engine was given with the last request."""
    params = gateway.engine.requests[-1]["sampling_params"]
    return {name for name in ("ebnf", "json_schema") if params[name] is not None}


async def shown(gateway: Running, session_id: str) -> dict[str, Any]:
    return (await gateway.env(f"/sessions/{session_id}")).json()


@every_way
@pytest.mark.parametrize("gateway", ["free"], indirect=True)
async def test_constrained_free_samples_without_a_grammar_and_trains_the_turn(
    gateway: Running, renderer: Renderer, way: str
):
    say(gateway, renderer, "I would rather not.")
    [session] = await gateway.open()
    [evaluated] = await gateway.open(purpose="eval")
    for asking_session in (session, evaluated):
        answer = await gateway.client(asking_session).chat.completions.create(
            model="tiny", messages=[ASK], **FORCED[way]
        )
        assert answer.choices[0].message.content == "I would rather not."
        assert grammar_of(gateway) == set()
    seen = await shown(gateway, session.id)
    assert seen["overridden"] == [way]
    assert [turn["constrained"] for turn in seen["turns"]] == [False]
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.trained_tokens == summary.sampled_tokens > 0


@pytest.mark.parametrize("gateway", ["free"], indirect=True)
async def test_constrained_free_parses_the_calls_that_the_model_makes(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, CALL % "shell")
    [session] = await gateway.open()
    for way in ("tool_choice=required", "tool_choice=named"):
        answer = await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], **FORCED[way]
        )
        [call] = answer.choices[0].message.tool_calls or []
        # another than the named one: the client judges it
        assert call.function.name == "shell"


@every_way
@pytest.mark.parametrize("gateway", ["free", "skip"], indirect=True)
async def test_serving_forces_the_reply(gateway: Running, renderer: Renderer, way: str):
    say(gateway, renderer, CALL % "calc")
    [session] = await gateway.open(purpose="serve")
    await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK], **FORCED[way]
    )
    assert grammar_of(gateway) == {
        "json_schema" if way == "response_format" else "ebnf"
    }
    seen = await shown(gateway, session.id)
    assert seen["overridden"] == []
    assert [turn["constrained"] for turn in seen["turns"]] == [True]
    ended = await gateway.finish(session)
    assert isinstance(ended, FailedRollout)
    assert (
        ended.reason is FailureReason.EMPTY
    )  # advice on --gateway.constrained would not help
    assert "--gateway.constrained" not in ended.detail


@every_way
@pytest.mark.parametrize("gateway", ["skip"], indirect=True)
async def test_constrained_skip_reports_why_a_rollout_is_not_trained(
    gateway: Running, renderer: Renderer, way: str
):
    say(gateway, renderer, CALL % "calc")
    [session] = await gateway.open()
    for _ in range(2):
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], **FORCED[way]
        )
    assert [
        turn["constrained"] for turn in (await shown(gateway, session.id))["turns"]
    ] == [True] * 2
    failed = await gateway.finish(session)
    assert isinstance(failed, FailedRollout)
    assert failed.reason is FailureReason.CONSTRAINED
    assert f"all turns constrained: the client sends {way}," in failed.detail
    assert "--gateway.constrained free" in failed.detail


@every_way
@pytest.mark.parametrize("gateway", ["masked"], indirect=True)
async def test_constrained_masked_forces_the_reply_and_records_its_grammar(
    gateway: Running, renderer: Renderer, way: str
):
    say(gateway, renderer, CALL % "calc")
    [session] = await gateway.open()
    [evaluated] = await gateway.open(purpose="eval")
    for asking_session in (session, evaluated):
        await gateway.client(asking_session).chat.completions.create(
            model="tiny", messages=[ASK], **FORCED[way]
        )
    params = gateway.engine.requests[0]["sampling_params"]
    [turn] = gateway.turns(session)
    [name] = grammar_of(gateway)
    assert json.loads(turn.grammar) == {name: params[name]}
    assert turn.constrained
    assert turn.trainable
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.trained_tokens == len(turn.sampled_ids_T)


@pytest.mark.parametrize("gateway", ["skip"], indirect=True)
async def test_constrained_skip_trains_the_free_turns(
    gateway: Running, renderer: Renderer
):
    say(gateway, renderer, CALL % "calc")
    [session] = await gateway.open()
    create = gateway.client(session).chat.completions.create
    await create(model="tiny", messages=[ASK], **FORCED["tool_choice=required"])
    await create(model="tiny", messages=[ASK], tools=[CALC])
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.trained_tokens == len(gateway.turns(session)[1].sampled_ids_T)


@pytest.mark.parametrize("gateway", ["skip"], indirect=True)
async def test_rollout_whose_replies_never_arrived_is_empty(gateway: Running):
    [session] = await gateway.open()
    failed = await gateway.finish(session)
    assert isinstance(failed, FailedRollout)
    assert failed.reason is FailureReason.EMPTY


def accepts(model: Path, ebnf: str, text: str) -> bool:
    """The grammar takes the whole text as a reply."""
    vocabulary = [bytes([code]) for code in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(ebnf)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(256)


def tools(*shown: dict[str, Any]) -> tuple[Tool, ...]:
    functions = [tool["function"] for tool in shown]
    return tuple(
        Tool(name=function["name"], parameters=json.dumps(function["parameters"]))
        for function in functions
    )


@pytest.mark.parametrize("parser", ["qwen25", "hermes", "llama3", "mistral"])
def test_response_format_applies_to_the_final_message_only(model: Path, parser: str):
    parsers = Parsers(tool_calls=parser)
    constraint = parsers.constraint(
        tools(CALC), ToolChoice(), parallel=True, schema=json.dumps(SCHEMA)
    )
    calls = {
        "qwen25": CALL % "calc",
        "hermes": (CALL % "calc").replace("\n", ""),
        "llama3": '<|python_tag|>{"name":"calc", "arguments":{"a": 12}}',
        "mistral": '[TOOL_CALLS] [{"name":"calc", "arguments":{"a": 12}}]',
    }
    ebnf = str(constraint["ebnf"])
    assert accepts(model, ebnf, '{"sum": 156}')
    assert accepts(model, ebnf, calls[parser])
    assert not accepts(model, ebnf, "It is 156.")
    assert not accepts(model, ebnf, '{"sum": "many"}')
    assert not accepts(model, ebnf, CALL % "shell")


def test_response_format_without_calls_is_the_schema():
    schema = json.dumps(SCHEMA)
    for offered, choice in (((), ToolChoice()), (tools(CALC), ToolChoice(mode="none"))):
        assert PARSERS.constraint(offered, choice, parallel=True, schema=schema) == {
            "json_schema": schema
        }
    assert PARSERS.constraint(tools(CALC), ToolChoice(), parallel=True) == {}


def test_required_call_precedes_the_response_format(model: Path):
    choice = ToolChoice(mode="required")
    constraint = PARSERS.constraint(
        tools(CALC), choice, parallel=True, schema=json.dumps(SCHEMA)
    )
    assert accepts(model, str(constraint["ebnf"]), CALL % "calc")
    assert not accepts(model, str(constraint["ebnf"]), '{"sum": 156}')


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("gateway", ["skip"], indirect=True)
async def test_only_allowed_tools_may_be_called(
    gateway: Running, renderer: Renderer, model: Path, dialect: str
):
    [session] = await gateway.open()
    client = gateway.client(session)

    async def names(mode: str, *allowed: str) -> list[str]:
        if dialect == "chat":
            listed = [
                {"type": "function", "function": {"name": tool}} for tool in allowed
            ]
            choice: Any = {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": listed},
            }
            answer = await client.chat.completions.create(
                model="tiny", messages=[ASK], tools=[CALC, SHELL], tool_choice=choice
            )
            return [
                call.function.name
                for call in answer.choices[0].message.tool_calls or []
            ]
        listed = [{"type": "function", "name": tool} for tool in allowed]
        choice = {"type": "allowed_tools", "mode": mode, "tools": listed}
        flat: list[Any] = [
            {"type": "function", "strict": False, **tool["function"]}
            for tool in (CALC, SHELL)
        ]
        answer = await client.responses.create(
            model="tiny", input=[ASK], tools=flat, tool_choice=choice
        )
        return [item.name for item in answer.output if item.type == "function_call"]

    say(gateway, renderer, CALL % "shell")
    assert await names("auto", "shell") == ["shell"]
    assert await names("auto", "calc", "shell") == ["shell"]
    # not offered: what looks like a call of it is text
    assert await names("auto", "calc") == []
    prompts = [request["input_ids"] for request in gateway.engine.requests]
    assert prompts[0] == prompts[1] == prompts[2]  # which shows both tools
    assert "shell" in renderer.decode(prompts[0])
    assert grammar_of(gateway) == set()
    assert await names("required", "shell") == ["shell"]
    ebnf = gateway.engine.requests[-1]["sampling_params"]["ebnf"]
    assert accepts(model, ebnf, CALL % "shell")
    assert not accepts(model, ebnf, CALL % "calc")
