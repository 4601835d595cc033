"""A turn whose engine fails in the middle is continued by another engine, and its client
does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import openai
import pytest
from fakes import EngineDeaths, FakeEngine, chained_reply, fake_logprob
from running_gateway import ASK, Running, eventually, running
from tool_replies import CALC, PARSERS

from invrl.engines.inside_sglang.engine_instance import INSTANCE_HEADER
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.turns import reply_sampling
from invrl.gateway.turns.reply_sampling import WHOLE_REPLY_INTERVAL
from invrl.types.sessions import Session
from invrl.types.turns import Segment, Turn

NUM_KILLS = 100


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_sampling, "_RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(reply_sampling, "_ENGINE_POLL_S", 0.01)


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(tmp_path, model, renderer) as chained:
        chained.engine.script = chained_reply()
        yield chained


async def replied(
    gateway: Running, session: Session, content: str = "12*13?", **options
) -> str:
    answer = await gateway.client(session).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], **options
    )
    return answer.choices[0].message.content or ""


async def streamed(
    gateway: Running, session: Session, content: str = "12*13?", **options
) -> str:
    text = ""
    async for event in await gateway.client(session).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        stream=True,
        **options,
    ):
        if event.choices:
            text += event.choices[0].delta.content or ""
    return text


async def counts(gateway: Running) -> dict[str, int]:
    answer = await gateway.env("/metrics")
    return answer.json()["turns"]


def name_by_version(engine: FakeEngine) -> None:
    """Let the engine name itself by its version, of which each death makes a new one."""
    reply = engine.script

    def script(prompt: Sequence[int]) -> Sequence[int]:
        engine.headers = {INSTANCE_HEADER: f"engine-0.v{engine.version}"}
        return reply(prompt)

    engine.script = script


def assert_is_what_left_the_engines(turn: Turn, sent: Sequence[tuple[int, int]]):
    ids, versions = zip(*sent, strict=True)
    assert turn.sampled_ids_T.tolist() == list(ids)
    assert turn.versions_T.tolist() == list(versions)
    logprobs = [fake_logprob(token) for token in ids]
    assert np.array_equal(turn.logprobs_T, np.array(logprobs, np.float32))


@pytest.mark.parametrize(
    ("ask", "most_lost"),
    [(streamed, 0), (replied, WHOLE_REPLY_INTERVAL - 1)],
    ids=["streamed", "whole"],
)
async def test_a_hundred_engines_die_and_no_turn_and_no_token_that_came_is_lost(
    gateway: Running,
    renderer: Renderer,
    ask: Callable[[Running, Session, str], Awaitable[str]],
    most_lost: int,
):
    source = random.Random(3)
    engine = gateway.engine
    reply = chained_reply()
    deaths = 0
    death = 0
    lost: list[int] = []

    def script(prompt: Sequence[int]) -> Sequence[int]:
        nonlocal death
        ids = reply(prompt)
        if not engine.requests[-1]["rid"].startswith("again-"):
            last = min(len(ids), 64)
            death = source.randint(1, last)
            engine.holds = EngineDeaths(engine, death)
        else:
            lost.append(death - 1 - len(engine.sent))
        return ids

    engine.script = script
    [session] = await gateway.open()
    for number in range(NUM_KILLS):
        engine.sent.clear()
        version = engine.version
        text = await ask(gateway, session, f"{number}*13?")
        deaths += engine.version - version
        turn = gateway.turns(session)[-1]
        first_prompt = np.concatenate([turn.context_ids_T, []]).tolist()
        whole = list(reply(first_prompt))[:64]
        assert turn.sampled_ids_T.tolist() == whole
        assert turn.finish_reason == ("stop" if whole[-1] == 2 else "length")
        assert turn.prompt_tokens == len(first_prompt)
        assert turn.trainable
        assert_is_what_left_the_engines(turn, engine.sent)
        assert text == renderer.reply_text(whole)
    assert deaths == NUM_KILLS
    assert len(lost) == NUM_KILLS
    assert min(lost) == 0
    assert max(lost) <= most_lost
    turns = gateway.turns(session)
    assert len(turns) == NUM_KILLS
    assert all(turn.delivered for turn in turns)
    counted = await counts(gateway)
    assert "abort" not in counted
    assert counted["moved"] == sum(len(turn.spans) > 1 for turn in turns)
    assert counted["moved"] > NUM_KILLS * 0.9


async def test_a_turn_moves_twice_and_its_second_engine_dies_at_once(
    gateway: Running,
):
    engine = gateway.engine
    name_by_version(engine)
    engine.holds = EngineDeaths(engine, 5, 1, 4)
    [session] = await gateway.open()
    await streamed(gateway, session, top_logprobs=2, logprobs=True)
    [turn] = gateway.turns(session)
    assert_is_what_left_the_engines(turn, engine.sent)
    assert [span.version for span in turn.spans] == [0, 2, 3]
    assert [span.end for span in turn.spans][:2] == [4, 7]
    budgets = [body["sampling_params"]["max_new_tokens"] for body in engine.requests]
    assert budgets == [64, 60, 60, 57]
    prompts = [len(body["input_ids"]) - turn.prompt_tokens for body in engine.requests]
    assert prompts == [0, 4, 4, 7]
    assert (await counts(gateway))["moved"] == 1
    assert gateway.store.turn_segments(session.id)[turn.id] == (
        Segment(engine="engine-0.v0", start=0, end=4),
        Segment(engine="engine-0.v2", start=4, end=7),
        Segment(engine="engine-0.v3", start=7, end=len(turn.sampled_ids_T)),
    )


async def test_a_session_shows_the_engines_of_moved_turns_only(gateway: Running):
    engine = gateway.engine
    name_by_version(engine)
    engine.holds = EngineDeaths(engine, 5)
    [session] = await gateway.open()
    await streamed(gateway, session)
    await streamed(gateway, session, "1+1?")
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    moved, stayed = (line["segments"] for line in shown["turns"])
    assert [segment["engine"] for segment in moved] == ["engine-0.v0", "engine-0.v1"]
    assert [segment["start"] for segment in moved] == [0, 4]
    assert [segment["end"] for segment in moved][:1] == [4]
    assert stayed == []
    [moved_id] = gateway.store.turn_segments(session.id)
    assert moved_id == shown["turns"][0]["id"]


async def test_a_turn_that_the_engine_aborts_goes_on(gateway: Running):
    engine = gateway.engine
    engine.holds = EngineDeaths(engine, 5)
    engine.aborts = 1
    [session] = await gateway.open()
    await streamed(gateway, session)
    [turn] = gateway.turns(session)
    assert turn.finish_reason in ("stop", "length")
    assert len(engine.requests) == 3


async def test_a_whole_reply_that_cannot_move_is_sampled_anew(
    tmp_path: Path, model: Path, renderer: Renderer
):
    """Nobody has seen its tokens."""
    async with running(tmp_path, model, renderer, constrained="skip") as gateway:
        engine = gateway.engine
        engine.holds = EngineDeaths(engine, 5)
        [session] = await gateway.open()
        await replied(gateway, session, response_format={"type": "json_object"})
        [turn] = gateway.turns(session)
        assert turn.versions_T.tolist() == [1] * len(turn.sampled_ids_T)
        assert [len(body["input_ids"]) for body in engine.requests] == [
            turn.prompt_tokens,
            turn.prompt_tokens,
        ]
        counted = await counts(gateway)
        assert not any("moved" in name for name in counted)


@pytest.mark.parametrize(
    ("ask", "deaths", "options", "reason"),
    [
        (streamed, (5, 1, 1), {}, "no_engine"),
        (replied, (5, 1, 1), {}, "no_engine"),
        (streamed, (5,), {"response_format": {"type": "json_object"}}, "grammar"),
    ],
)
async def test_a_turn_that_cannot_move_is_aborted_with_its_reason(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    ask: Callable[..., Awaitable[str]],
    deaths: tuple[int, ...],
    options: dict,
    reason: str,
):
    async with running(tmp_path, model, renderer, constrained="skip") as gateway:
        engine = gateway.engine
        engine.holds = EngineDeaths(engine, *deaths)
        [session] = await gateway.open()
        with pytest.raises(openai.APIError, match="closed the connection"):
            await ask(gateway, session, **options)
        await eventually(lambda: len(gateway.turns(session)) == 1)
        [turn] = gateway.turns(session)
        assert turn.finish_reason == "abort"
        assert not turn.trainable
        assert_is_what_left_the_engines(turn, engine.sent)
        assert len(engine.requests) == len(deaths)
        counted = await counts(gateway)
        assert counted[f"not_moved/{reason}"] == 1
        assert counted["abort"] == 1


async def test_a_turn_in_the_middle_of_a_stop_string_is_not_moved(
    gateway: Running, renderer: Renderer
):
    engine = gateway.engine
    ids = renderer.encode("one two EN")
    engine.script = lambda _: [*ids, *renderer.encode("D three")]
    [session] = await gateway.open()
    engine.holds = EngineDeaths(engine, len(ids) + 1)
    with pytest.raises(openai.APIError, match="closed the connection"):
        await streamed(gateway, session, stop=["END"])
    await eventually(lambda: len(gateway.turns(session)) == 1)
    assert (await counts(gateway))["not_moved/stop_string"] == 1


async def test_a_client_that_leaves_while_its_turn_moves_ends_it(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reply_sampling, "_RETRY_PAUSES_S", (600.0,))
    engine = gateway.engine
    engine.holds = EngineDeaths(engine, 5)
    [session] = await gateway.open()
    call = asyncio.create_task(streamed(gateway, session))
    await eventually(lambda: engine.version == 1)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await eventually(lambda: len(gateway.turns(session)) == 1)
    [turn] = gateway.turns(session)
    assert turn.finish_reason == "abort"
    assert len(turn.sampled_ids_T) == 4
    assert len(engine.requests) == 1
    assert not any(name.startswith("not_moved") for name in await counts(gateway))


TEXT = "<think>12*13 is\nhard</think>\n\nSure.\n<tool_call>\n" + (
    '{"name": "calc", "arguments": {"a": 12, "b": "x"}}\n</tool_call>'
)


async def test_thinking_and_calls_are_the_same_wherever_the_engine_dies(
    tmp_path: Path, model: Path, renderer: Renderer
):
    ids = [*renderer.encode(TEXT), 2]
    async with running(
        tmp_path, model, renderer, PARSERS, max_new_tokens=256
    ) as gateway:
        engine = gateway.engine

        def rest_of_the_reply(prompt: Sequence[int]) -> list[int]:
            first_prompt = engine.requests[0]["input_ids"]
            return ids[len(prompt) - len(first_prompt) :]

        engine.script = rest_of_the_reply
        for death in range(2, len(ids) + 1, 7):
            engine.holds = EngineDeaths(engine, death)
            [session] = await gateway.open()
            shown = await streamed_call(gateway, session)
            assert shown == ("12*13 is\nhard", "Sure.", '{"a": 12, "b": "x"}')
            [turn] = gateway.turns(session)
            assert turn.sampled_ids_T.tolist() == ids
            assert len(turn.spans) == 2


async def streamed_call(gateway: Running, session: Session) -> tuple[str, str, str]:
    """Thinking, text and arguments of a reply."""
    thinking = ""
    text = ""
    arguments = ""
    async for event in await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK], tools=[CALC], stream=True
    ):
        delta = event.choices[0].delta
        thinking += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
        for call in delta.tool_calls or []:
            arguments += call.function.arguments or ""
    return thinking.strip(), text.strip(), arguments
