"""The gateway as an agent sees it, over HTTP, on a fake engine: turns, streams, errors,
delivery."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from fakes import fake_logprob, random_reply, reply_by_prompt
from running_gateway import ASK, ENV_KEY, MORE, Running, eventually, running

from invrl.engines.client.sglang_client import SglangClient
from invrl.gateway.rendering.renderer import Renderer
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Session


async def test_conversation_extends_the_exact_ids_of_its_earlier_turns(
    gateway: Running, renderer: Renderer
):
    [session] = await gateway.open()
    client = gateway.client(session)
    messages: list = [ASK]
    for _ in range(4):
        answer = await client.chat.completions.create(model="tiny", messages=messages)
        messages += [answer.choices[0].message.model_dump(), MORE]
    turns = gateway.turns(session)
    path: list[int] = []
    parent = None
    for turn, request in zip(turns, gateway.engine.requests, strict=True):
        path += turn.context_ids_T.tolist()
        assert request["input_ids"] == path
        assert request["rid"] == turn.id
        path += turn.sampled_ids_T.tolist()
        assert turn.parent_id == parent
        assert turn.fork_reason == ""
        assert turn.logprobs_T == pytest.approx(
            [fake_logprob(t) for t in turn.sampled_ids_T], abs=1e-6
        )
        parent = turn.id
    tail = renderer._tokenizer.encode(
        f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert turns[1].context_ids_T.tolist() == tail
    summary = await gateway.finish(session, reward=0.5)
    assert [turn.delivered for turn in gateway.turns(session)] == [True] * 4
    assert isinstance(summary, RolloutSummary)
    assert summary.reward == 0.5
    assert summary.num_turns == 4
    assert summary.forks == 0
    assert summary.later_cached_tokens / summary.later_prompt_tokens > 0.5
    rollout = gateway.store.rollout(session.id)
    assert rollout.summary == summary
    assert [turn.id for turn in rollout.trajectories[0].turns] == [
        turn.id for turn in turns
    ]
    assert [outcome for _, outcome in gateway.store.outbox_after(0)] == [summary]


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_turn_is_continued_with_an_end_token_as_context(
    gateway: Running, stream: bool
):
    [session] = await gateway.open()
    client = gateway.client(session)
    first = await client.chat.completions.create(
        model="tiny", messages=[ASK], max_tokens=3
    )
    assert first.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert first.usage.completion_tokens == 3
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    second = await client.chat.completions.create(
        model="tiny", messages=[ASK, reply, MORE], stream=stream
    )
    if stream:
        assert [event async for event in second]
    turns = gateway.turns(session)
    assert turns[1].parent_id == turns[0].id
    assert turns[1].context_ids_T[0] == 2
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.truncated


async def test_streams_carry_tokens_as_they_are_sampled(
    gateway: Running, renderer: Renderer
):
    """None is sampled before what those before it say has been seen."""
    said = "Hello 漢字🙂 world, hello 漢字🙂 and all of you "
    text = ""
    ids = renderer._tokenizer.encode(said)
    assert len(ids) > 48, "what has been seen is joined by 16 chunks"
    gateway.engine.script = lambda _: [*ids, 2]
    whole = [
        renderer._tokenizer.decode(ids[:count], special=True).rstrip("\ufffd")
        for count in range(len(ids))
    ]
    gateway.engine.holds = lambda count: text != [*whole, said][count - 1]
    [session] = await gateway.open()
    stream = await gateway.client(session).chat.completions.create(
        model="tiny",
        messages=[ASK],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    events = []
    async with asyncio.timeout(60):
        async for event in stream:
            events.append(event)
            text += (event.choices and event.choices[0].delta.content) or ""
    assert text == said
    assert events[0].choices[0].delta.role == "assistant"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "stop"
    [turn] = gateway.turns(session)
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(turn.sampled_ids_T)
    shown = [
        c.logprob
        for e in events
        if e.choices and e.choices[0].logprobs
        for c in e.choices[0].logprobs.content
    ]
    assert turn.sampled_ids_T.tolist() == [*ids, 2]
    assert shown == pytest.approx(turn.logprobs_T.tolist(), abs=1e-6)
    await eventually(lambda: gateway.turns(session)[0].delivered)


async def test_whole_reply_equals_the_streamed_reply(gateway: Running):
    replies = random_reply(seed=5)
    fixed = replies([])
    gateway.engine.script = lambda _: fixed
    [session] = await gateway.open(purpose="serve")
    client = gateway.client(session)
    whole = await client.chat.completions.create(
        model="tiny", messages=[ASK], logprobs=True
    )
    stream = await client.chat.completions.create(
        model="tiny", messages=[ASK], stream=True
    )
    text = "".join([e.choices[0].delta.content or "" async for e in stream])
    assert text == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == len(fixed)


async def test_stop_strings_end_the_text_and_keep_the_ids(
    gateway: Running, renderer: Renderer
):
    ids = renderer._tokenizer.encode("abc STOP")
    gateway.engine.script = lambda _: ids
    [session] = await gateway.open()
    answer = await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK], stop="STOP", max_tokens=len(ids)
    )
    assert answer.choices[0].message.content == "abc "
    assert gateway.engine.requests[0]["sampling_params"]["stop"] == ["STOP"]
    assert gateway.turns(session)[0].sampled_ids_T.tolist() == ids


async def test_parallel_samples_of_one_prompt_are_siblings(gateway: Running):
    gateway.engine.holds = lambda _: len(gateway.engine.requests) < 6
    [session] = await gateway.open()
    client = gateway.client(session)
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(model="tiny", messages=[ASK])
            for _ in range(6)
        )
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 6
    chosen = answers[3].choices[0].message
    reply = {"role": "assistant", "content": chosen.content}
    await client.chat.completions.create(model="tiny", messages=[ASK, reply, MORE])
    turns = gateway.turns(session)
    assert turns[-1].parent_id == answers[3].id.removeprefix("chatcmpl-")
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.num_turns == 7


async def test_edited_history_and_side_requests_fork_with_a_reason(gateway: Running):
    [session] = await gateway.open()
    client = gateway.client(session)
    await client.chat.completions.create(model="tiny", messages=[ASK])
    edited = [ASK, {"role": "assistant", "content": "156, I swear"}, MORE]
    await client.chat.completions.create(model="tiny", messages=edited)
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "A title?"}]
    )
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    assert [t["fork_reason"] for t in shown["turns"]] == [
        "",
        "history_edited",
        "new_conversation",
    ]
    assert [t["parent_id"] for t in shown["turns"]] == [None] * 3
    metrics = (await gateway.env("/metrics")).json()
    assert metrics["forks"] == {"history_edited": 1, "new_conversation": 1}
    assert metrics["turns"]["stop"] == 3
    assert metrics["loop_lag_ms"].keys() == {"p50", "p99", "max"}
    # waits until the last answer is known to have arrived
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.forks == 2
    assert summary.trained_tokens == summary.sampled_tokens


async def test_sampling_of_the_run_overrides_the_clients_and_is_reported_once(
    gateway: Running,
):
    [session] = await gateway.open(sampling={"temperature": 0.7, "max_new_tokens": 20})
    client = gateway.client(session)
    asked = {
        "temperature": 0.1,
        "top_p": 0.5,
        "seed": 4,
        "max_tokens": 50,
        "frequency_penalty": 1.0,
    }
    create = client.chat.completions.with_raw_response.create
    first = await create(model="tiny", messages=[ASK], extra_body={"top_k": 5}, **asked)
    names = "temperature,top_p,top_k,frequency_penalty,sampling_seed,max_new_tokens"
    assert first.headers["x-invrl-overridden"] == names
    second = await create(model="tiny", messages=[MORE], **asked)
    assert "x-invrl-overridden" not in second.headers
    for request in gateway.engine.requests:
        params = request["sampling_params"]
        assert params["temperature"] == 0.7
        assert params["top_p"] == 1.0
        assert params["max_new_tokens"] == 20
        # as the model is, said so
        assert params["top_k"] == -1
        assert params["frequency_penalty"] == 0.0
        assert "sampling_seed" not in params
    assert gateway.turns(session)[0].temperature == pytest.approx(0.7)
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    assert shown["overridden"] == sorted(names.split(","))
    [served] = await gateway.open(purpose="serve")
    await gateway.client(served).chat.completions.create(
        model="tiny", messages=[ASK], temperature=0.1, top_p=0.5
    )
    params = gateway.engine.requests[-1]["sampling_params"]
    assert params["temperature"] == 0.1
    assert params["top_p"] == 0.5


async def test_a_retry_does_not_join_a_generation_that_is_being_cancelled(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    """Cancelling takes a while: the engine is told, and what was sampled is
    recorded."""
    stream = SglangClient.stream

    async def slow_to_end(self: SglangClient, request):
        try:
            async for item in stream(self, request):
                yield item
        finally:
            await asyncio.sleep(0.5)

    monkeypatch.setattr(SglangClient, "stream", slow_to_end)
    gateway.engine.token_delay_s = 0.05
    [session] = await gateway.open()
    client = gateway.client(session)
    first = await client.chat.completions.create(
        model="tiny", messages=[ASK], stream=True
    )
    await anext(aiter(first))
    await first.close()
    await eventually(lambda: bool(gateway.engine.cancelled))
    retry = {"x-stainless-retry-count": "1"}
    again = await client.chat.completions.create(
        model="tiny", messages=[ASK], stream=True, extra_headers=retry
    )
    assert [event async for event in again]
    await eventually(lambda: len(gateway.turns(session)) == 2)
    assert sorted(turn.finish_reason for turn in gateway.turns(session)) == [
        "abort",
        "stop",
    ]


async def test_a_disconnect_cancels_the_generation_and_leaves_the_turn_undelivered(
    gateway: Running,
):
    gateway.engine.holds = lambda count: count > 20
    gateway.engine.script = lambda _: list(range(10, 60))
    for stream in (True, False):
        [session] = await gateway.open()
        client = gateway.client(session)
        call = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=[ASK], stream=stream)
        )
        await eventually(lambda: bool(gateway.engine.running))
        if stream:
            async for event in await call:
                if event.choices[0].delta.content:
                    break
        cancelled = len(gateway.engine.cancelled)
        call.cancel()
        await client.close()
        await eventually(
            lambda before=cancelled: len(gateway.engine.cancelled) > before
        )
        if stream:
            await eventually(lambda here=session: len(gateway.turns(here)) == 1)
            [turn] = gateway.turns(session)
            assert turn.finish_reason == "abort"
            assert turn.delivered is False
            assert 0 < len(turn.sampled_ids_T) < 50
        outcome = await gateway.finish(session)
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason == "empty"


async def test_a_retry_gets_the_recorded_turn_or_joins_the_one_in_flight(
    gateway: Running,
):
    gateway.engine.token_delay_s = 0.02
    [session] = await gateway.open()
    body = {"model": "tiny", "messages": [ASK]}
    retry = {"x-stainless-retry-count": "1"}

    async def post(headers: dict[str, str]) -> httpx.Response:
        return await gateway.http.post(
            session.base_url + "/chat/completions", json=body, headers=headers
        )

    first = asyncio.create_task(post({"x-stainless-retry-count": "0"}))
    await eventually(lambda: bool(gateway.engine.running))
    joined = await post(retry)
    assert joined.content == (await first).content
    assert (await post(retry)).content == joined.content
    assert len(gateway.engine.requests) == 1
    fresh = [await post(headers) for headers in ({}, {"x-stainless-retry-count": "0"})]
    assert len({answer.json()["id"] for answer in (*fresh, joined)}) == 3
    assert len(gateway.engine.requests) == 3
    assert len(gateway.turns(session)) == 3


async def test_a_stream_asked_for_again_has_the_same_text_and_log_probs(
    gateway: Running,
):
    """Long enough for its first pieces to have been joined; once while it runs, once
    when it is over."""
    gateway.engine.token_delay_s = 0.005
    gateway.engine.script = reply_by_prompt(tokens=50)
    [session] = await gateway.open()

    async def ask(retry: str) -> tuple[str, list[float]]:
        stream = await gateway.client(session).chat.completions.create(
            model="tiny",
            messages=[ASK],
            stream=True,
            logprobs=True,
            extra_headers={"x-stainless-retry-count": retry},
        )
        choices = [event.choices[0] async for event in stream]
        shown = [
            place.logprob
            for choice in choices
            if choice.logprobs
            for place in choice.logprobs.content or ()
        ]
        return "".join(choice.delta.content or "" for choice in choices), shown

    first = asyncio.create_task(ask("0"))
    await eventually(lambda: bool(gateway.engine.running))
    await asyncio.sleep(0.005 * 30)
    again = await ask("1")
    [turn] = gateway.turns(session)
    assert turn.logprobs_T.tolist() == pytest.approx(
        [fake_logprob(id) for id in turn.sampled_ids_T], abs=1e-6
    )
    assert len(turn.sampled_ids_T) == 50
    for text, logprobs in (await first, again, await ask("1")):
        assert text == again[0]
        assert logprobs == pytest.approx(turn.logprobs_T.tolist(), abs=1e-6)


async def test_retry_of_the_openai_client_recovers_from_a_lost_engine(gateway: Running):
    [session] = await gateway.open()
    gateway.engine.drop_connections = 1
    answer = await gateway.client(session).chat.completions.create(
        model="tiny", messages=[ASK]
    )
    assert answer.choices[0].message.content is not None
    gateway.engine.drop_connections = 3  # the gateway tries three times
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[MORE]
        )
    assert caught.value.status_code == 503
    gateway.engine.drop_connections = 3
    healed = await gateway.client(session, max_retries=2).chat.completions.create(
        model="tiny", messages=[MORE]
    )
    assert healed.choices[0].finish_reason == "stop"
    assert [turn.finish_reason for turn in gateway.turns(session)] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_that_engines_abort_again_and_again_is_an_error_and_no_turn(
    gateway: Running, stream: bool
):
    [session] = await gateway.open()
    gateway.engine.aborts = 3  # the gateway tries three times
    create = gateway.client(session).chat.completions.create

    async def ask() -> None:
        answer = await create(model="tiny", messages=[ASK], stream=stream)
        if stream:
            assert [event async for event in answer]

    with pytest.raises(openai.APIError, match="abort"):
        await ask()
    assert gateway.turns(session) == []
    assert isinstance(await gateway.finish(session), FailedRollout)


async def test_turn_that_spans_an_update_records_both_versions(gateway: Running):
    gateway.engine.holds = lambda count: count > 6 and gateway.engine.version == 0
    [session] = await gateway.open()
    call = asyncio.create_task(
        gateway.client(session).chat.completions.create(model="tiny", messages=[ASK])
    )
    await eventually(lambda: bool(gateway.engine.running))
    gateway.engine.version = 1
    await call
    [turn] = gateway.turns(session)
    assert set(turn.versions_T.tolist()) <= {0, 1}
    assert turn.versions_T[-1] == 1
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.oldest_version == turn.versions_T.min()
    assert summary.newest_version == 1


async def test_stream_that_breaks_off_after_an_update_records_both_versions(
    gateway: Running,
):
    gateway.engine.holds = lambda count: (
        count > (6 if gateway.engine.version == 0 else 9)
    )
    [session] = await gateway.open()
    create = gateway.client(session).chat.completions.create
    seen = 0
    async with await create(
        model="tiny", messages=[ASK], stream=True, logprobs=True
    ) as answer:
        async for chunk in answer:
            shown = chunk.choices[0].logprobs
            seen += len(shown.content or ()) if shown else 0
            if seen == 6:
                gateway.engine.version = 1
            if seen == 9:
                break
    await eventually(lambda: bool(gateway.turns(session)))
    [turn] = gateway.turns(session)
    assert turn.finish_reason == "abort"
    assert turn.versions_T.tolist() == [*[0] * 6, 1, 1, 1]


BAD_BODIES = {
    "not json": b"{",
    "not utf-8": b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    "nesting bomb": b'{"model": "tiny", "metadata": ' + b"[" * 100_000,
    "no messages": b'{"model": "tiny"}',
    "empty messages": b'{"model": "tiny", "messages": []}',
    "wrong type": b'{"model": "tiny", "messages": "hi"}',
    "unknown field": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temprature": 1}',
    "unknown role": b'{"model": "tiny", "messages": [{"role": "robot", "content": "x"}]}',
    "tool message": b'{"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}',
    "image": b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "max_tokens": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    "n": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 17}',
    "negative n": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    "tool choice": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tool_choice": "x"}',
    "tools": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": [{}]}',
    "temperature": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    "nan": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "empty stop": b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    "list": b"[]",
}


async def test_bad_chat_body_is_a_400_in_openais_shape(gateway: Running):
    [session] = await gateway.open()
    for name, body in BAD_BODIES.items():
        answer = await gateway.http.post(
            session.base_url + "/chat/completions", content=body
        )
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    assert gateway.engine.requests == []


async def test_openai_client_raises_its_own_exceptions_for_gateway_errors(
    gateway: Running,
):
    [session] = await gateway.open(purpose="serve")
    client = gateway.client(session)
    with pytest.raises(openai.BadRequestError, match="tools"):
        await client.chat.completions.create(
            model="tiny",
            messages=[ASK],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x " * 3000}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-9", messages=[ASK])
    assert unknown.value.code == "model_not_found"
    assert [m.id for m in (await client.models.list()).data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).model_dump() == {
        "id": "tiny",
        "object": "model",
        "created": 0,
        "owned_by": "invrl",
        "max_model_len": 1024,
    }
    for name in ("gpt-9", "tiny/b"):
        with pytest.raises(openai.NotFoundError, match=name) as unknown:
            await client.models.retrieve(name)
        assert unknown.value.code == "model_not_found"
        assert unknown.value.type == "invalid_request_error"
    guessed = gateway.client(session, base_url=f"{gateway.url}/v1", api_key="isk-guess")
    with pytest.raises(openai.AuthenticationError):
        await guessed.chat.completions.create(model="tiny", messages=[ASK])
    with pytest.raises(openai.AuthenticationError):
        await guessed.models.list()
    with pytest.raises(openai.AuthenticationError):
        await guessed.models.retrieve("tiny")
    [other] = await gateway.open()
    with pytest.raises(openai.AuthenticationError, match="differ"):
        await gateway.client(session, api_key=other.key).models.list()
    bearer = gateway.client(session, base_url=f"{gateway.url}/v1", api_key=session.key)
    assert (
        await bearer.chat.completions.create(model="tiny", messages=[ASK])
    ).model == "tiny"
    await gateway.finish(session)
    with pytest.raises(openai.AuthenticationError) as closed:
        await client.chat.completions.create(model="tiny", messages=[ASK])
    assert closed.value.code == "session_closed"


async def test_admission_happens_only_when_a_session_opens(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, session={"max_open": 2}) as gateway:
        session, _ = await gateway.open(2)
        members = [{"index": 0, "attempt": 0}]
        refused = await gateway.env(
            "/sessions", {"task_id": "t", "group_id": "g", "members": members}
        )
        assert refused.status_code == 429
        assert float(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "too_many_sessions"
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK]
        )
        await gateway.finish(session)
        await gateway.open()


async def test_expired_sessions_are_aborted_as_timeouts(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, session={"ttl_s": 0.3}) as gateway:
        [session] = await gateway.open()
        await eventually(lambda: len(gateway.store.outbox_after(0)) == 1)
        [(_, outcome)] = gateway.store.outbox_after(0)
        assert isinstance(outcome, FailedRollout)
        assert outcome.session_id == session.id
        assert outcome.reason == "timeout"
        assert gateway.store.closed_session(session.id).state == "expired"


async def test_last_reward_wins_and_finishing_twice_changes_nothing(gateway: Running):
    [session] = await gateway.open()
    await gateway.client(session).chat.completions.create(model="tiny", messages=[ASK])
    path = f"/sessions/{session.id}"
    for reward in (0.1, 0.7):
        body = {"reward": reward, "components": {"format": 1}}
        assert (
            await gateway.env(path + "/reward", body, key=session.key)
        ).status_code == 200
    finished = await gateway.env(path + "/finish", {})
    assert finished.json()["reward"] == 0.7
    assert finished.json()["outcome"] == "finished"
    again = await gateway.env(path + "/finish", {"reward": 5.0})
    assert again.json() == finished.json()
    assert (
        await gateway.env(path + "/abort", {"reason": "exception"})
    ).json() == finished.json()
    assert (await gateway.env(path + "/reward", {"reward": 1})).status_code == 409
    assert len(gateway.store.outbox_after(0)) == 1


async def test_bad_session_requests_are_refused(gateway: Running):
    [session] = await gateway.open()
    path = f"/sessions/{session.id}"
    headers = {"authorization": f"Bearer {ENV_KEY}", "content-type": "application/json"}
    for raw in (
        '{"reward": NaN}',
        '{"reward": "1"}',
        '{"reward": 1e999}',
        '{"reward": true}',
        "{}",
        "[",
        "null",
    ):
        answer = await gateway.http.post(
            gateway.url + path + "/reward", content=raw, headers=headers
        )
        assert answer.status_code == 400, raw
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    members = [{"index": 0, "attempt": 0}]
    for body in (
        {"task_id": "t", "group_id": "g", "members": []},
        {"task_id": "t", "group_id": "g", "members": members, "extra": 1},
        {
            "task_id": "t",
            "group_id": "g",
            "members": members,
            "sampling": {"temperature": 0},
        },
        {
            "task_id": "t",
            "group_id": "g",
            "members": members,
            "sampling": {"top_p": 0.9},
        },
    ):
        assert (await gateway.env("/sessions", body)).status_code == 400
    good = {"task_id": "t", "group_id": "g", "members": members}
    assert (await gateway.env("/sessions", good, key=session.key)).status_code == 401
    [other] = await gateway.open()
    for key in (other.key, "x", "isk-x"):
        assert (
            await gateway.env(path + "/finish", {"reward": 1}, key=key)
        ).status_code == 401
    assert (await gateway.env("/sessions/nobody")).status_code == 404
    assert (await gateway.env("/metrics", key=session.key)).status_code == 401
    for admin in (
        "/abort_request",
        "/pause_generation",
        "/workers",
        "/generate",
        "/docs",
    ):
        assert (await gateway.env(admin, {})).status_code in (404, 405)
    assert gateway.store.closed_session(session.id) is None


async def test_finishing_a_session_ends_its_running_generation(gateway: Running):
    gateway.engine.holds = lambda count: count > 1
    [session] = await gateway.open()
    client = gateway.client(session)
    first = await client.chat.completions.create(
        model="tiny", messages=[ASK], max_tokens=1
    )
    assert first.choices
    late = asyncio.create_task(
        client.chat.completions.create(model="tiny", messages=[MORE])
    )
    await eventually(lambda: bool(gateway.engine.running))
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.trained_tokens == 1
    first_turn, *later_turns = gateway.turns(session)
    assert first_turn.finish_reason == "length"
    assert {turn.finish_reason for turn in later_turns} <= {"abort"}
    with pytest.raises(openai.AuthenticationError):
        await late
    await eventually(lambda: not gateway.engine.running)


async def test_oversized_body_is_refused_before_it_is_complete(
    tmp_path: Path, model: Path, renderer: Renderer
):
    async with running(tmp_path, model, renderer, max_body_bytes=10_000) as gateway:
        [session] = await gateway.open()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b" " * 5000

        with contextlib.suppress(httpx.TransportError):
            answer = await gateway.http.post(
                session.base_url + "/chat/completions", content=endless()
            )
            assert answer.status_code == 413


async def test_turns_of_concurrent_sessions_never_mix(gateway: Running):
    sessions = await gateway.open(24)

    async def agent(number: int, session: Session) -> None:
        client = gateway.client(session)
        messages: list = [{"role": "user", "content": f"canary {number}"}]
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="tiny", messages=messages
            )
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                MORE,
            ]

    await asyncio.gather(
        *(agent(number, session) for number, session in enumerate(sessions))
    )
    sent = {request["rid"]: request["input_ids"] for request in gateway.engine.requests}
    for session in sessions:
        turns = gateway.turns(session)
        path = np.concatenate(
            [a for t in turns for a in (t.context_ids_T, t.sampled_ids_T)]
        )
        whole = sent[turns[-1].id]
        assert path[: len(whole)].tolist() == whole
        assert [t.fork_reason for t in turns] == ["", "", ""]
    assert len(sent) == 72
