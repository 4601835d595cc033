"""The gateway's own process in front of the real router and a real engine, used by the
unmodified `openai` client: sync and async, streaming and not, and each class of its
errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import openai
import pytest

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.fleet.fleet import Fleet
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.store.run_store import RunStore
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Session
from invrl.types.turns import Turn

ENV_KEY = "env-0123456789abcdef"
SYSTEM = {
    "role": "system",
    "content": "You have a tool: write calc(a*b) to get a result. Then answer.",
}
ASK = {"role": "user", "content": "What is 12*13?"}
MORE = {"role": "user", "content": "Result: 156 🙂"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


def settings_for(
    fleet: Fleet, model: Path, folder: Path, **changes: object
) -> GatewaySettings:
    values = {
        "run_id": "test",
        "tool_call_parser": "none",
        "reasoning_parser": "none",
        "port": free_port(),
        "router_url": fleet.router.url,
        "router_api_key": fleet.router.api_key,
        "env_key": ENV_KEY,
        "model_path": str(model),
        "model_name": "tiny",
        "store_path": str(folder / "run.db"),
        "max_new_tokens": 24,
        "context_length": fleet.limits.context_length,
        "vocab_size": fleet.limits.vocab_size,
        **changes,
    }
    return GatewaySettings.model_validate(values)


@pytest.fixture(scope="module")
def settings(tiny_fleet: Fleet, tiny_model: Path, folder: Path) -> GatewaySettings:
    return settings_for(tiny_fleet, tiny_model, folder)


@pytest.fixture(scope="module")
def gateway(
    tiny_fleet: Fleet, settings: GatewaySettings, folder: Path
) -> Iterator[GatewayServer]:
    server = GatewayServer(
        settings,
        folder=folder / "private",
        log=folder / "gateway.log",
        parent=tiny_fleet.fork_parent,
    )
    try:
        server.wait_ready(deadline_s=120)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def store(settings: GatewaySettings, gateway: GatewayServer) -> RunStore:
    return RunStore(Path(settings.store_path))


@pytest.fixture
async def http(gateway: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {ENV_KEY}"}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=headers, timeout=120
    ) as client:
        yield client


async def open_session(http: httpx.AsyncClient, **body: object) -> Session:
    payload = {
        "task_id": "t",
        "group_id": "g",
        "members": [{"index": 0, "attempt": 0}],
        **body,
    }
    answer = await http.post("/sessions", json=payload)
    assert answer.status_code == 201, answer.text
    [session] = msgspec.json.decode(answer.content, type=dict[str, list[Session]])[
        "sessions"
    ]
    return session


async def finish(
    http: httpx.AsyncClient, session: Session, reward: float = 1.0
) -> RolloutSummary:
    answer = await http.post(f"/sessions/{session.id}/finish", json={"reward": reward})
    return msgspec.json.decode(answer.content, type=RolloutSummary)


def exact(path: list[Turn]) -> list[int]:
    return np.concatenate(
        [ids for turn in path for ids in (turn.context_ids_T, turn.sampled_ids_T)]
    ).tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_second_turn_continues_the_exact_ids_of_the_first_turn(
    http: httpx.AsyncClient,
    store: RunStore,
    tiny_model: Path,
    router_client: SglangClient,
    stream: bool,
):
    session = await open_session(http)
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.key, max_retries=0
    )
    messages: list = [SYSTEM, ASK]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=stream
        )
        if stream:
            events = [event async for event in answer]
            text = "".join(event.choices[0].delta.content or "" for event in events)
            assert events[-1].choices[0].finish_reason in ("length", "stop")
        else:
            text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, MORE]
    summary = await finish(http, session)
    [trajectory] = store.rollout(session.id).trajectories
    first, second, third = trajectory.turns
    assert all(turn.delivered and not turn.fork_reason for turn in trajectory.turns)
    # the independent reference: the model folder's template and tokenizer, on the texts
    # that were seen
    renderer = load_renderer(str(tiny_model), 512)
    assert first.context_ids_T.tolist() == renderer._tokenizer.encode(
        f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n{ASK['content']}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tail = f"\n<|im_start|>user\n{MORE['content']}<|im_end|>\n<|im_start|>assistant\n"
    for before, turn in ((first, second), (second, third)):
        ended = before.sampled_ids_T[-1] == 2
        expected = renderer._tokenizer.encode(tail if ended else "<|im_end|>" + tail)
        assert turn.context_ids_T.tolist() == expected
    assert second.cached_tokens > 0
    assert summary.later_cached_tokens / summary.later_prompt_tokens > 0.5
    # the log-probs are those of exactly these ids: the engine's own, asked anew for the
    # whole path
    whole = exact([first, second, third])
    [logprobs] = await router_client.prompt_logprobs([whole])
    at = len(first.context_ids_T)
    for turn in (first, second, third):
        size = len(turn.sampled_ids_T)
        assert np.abs(logprobs[at - 1 : at - 1 + size] - turn.logprobs_T).max() < 1e-3
        at += size
        if turn is not third:
            at += len((second if turn is first else third).context_ids_T)


@pytest.mark.parametrize("stream", [False, True])
async def test_top_tokens_of_a_greedy_reply_begin_with_the_sampled_tokens(
    http: httpx.AsyncClient, store: RunStore, router_client: SglangClient, stream: bool
):
    session = await open_session(http, purpose="serve")
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.key, max_retries=0
    )
    asked = {
        "messages": [ASK],
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 20,
    }
    answer = await client.chat.completions.create(model="tiny", **asked, stream=stream)
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    shown = [
        place
        for choice in choices
        if choice.logprobs
        for place in choice.logprobs.content or ()
    ]
    [turn] = store.turns(session.id)
    assert [each.logprob for each in shown] == pytest.approx(turn.logprobs_T.tolist())
    for each in shown:
        top = each.top_logprobs
        assert top[0].token == each.token
        assert top[0].logprob == each.logprob
        assert top[0].bytes == each.bytes
        assert [one.logprob for one in top] == sorted(
            (one.logprob for one in top), reverse=True
        )
        assert len(top) == 20
        # 20 of 512 alike would have 0.04
        assert 0.03 < sum(math.exp(one.logprob) for one in top) <= 1


async def test_parameter_that_the_router_would_drop_is_refused(http: httpx.AsyncClient):
    session = await open_session(http, purpose="serve")
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.key, max_retries=0
    )
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        await client.chat.completions.create(
            model="tiny", messages=[ASK], logit_bias={"2": 100}
        )


async def test_stop_string_cuts_the_text_of_a_real_engine(
    http: httpx.AsyncClient, store: RunStore
):
    session = await open_session(http, purpose="serve")
    client = openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.key, max_retries=0
    )
    create = client.chat.completions.create
    free = await create(model="tiny", messages=[ASK], temperature=0, max_tokens=12)
    text = free.choices[0].message.content or ""
    stop = next((c for c in text if c.isascii() and c.isprintable()), None)
    if stop is None:
        pytest.skip("this random model says nothing printable")
    for stream in (False, True):
        answer = await create(
            model="tiny",
            messages=[ASK],
            temperature=0,
            max_tokens=12,
            stop=[stop],
            stream=stream,
        )
        if stream:
            events = [event async for event in answer]
            shown = "".join(event.choices[0].delta.content or "" for event in events)
            reason = events[-1].choices[0].finish_reason
        else:
            shown = answer.choices[0].message.content or ""
            reason = answer.choices[0].finish_reason
        assert (shown, reason) == (text[: text.index(stop)], "stop")


async def test_gateway_streams_tokens_as_they_are_sampled(
    http: httpx.AsyncClient, store: RunStore
):
    """The third event is there before the last token is: a turn is stored before its
    stream ends."""
    for _ in range(8):  # a random model may end its turn at once
        session = await open_session(
            http, purpose="serve", sampling={"max_new_tokens": 400}
        )
        client = openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key, max_retries=0
        )
        stream = aiter(
            await client.chat.completions.create(
                model="tiny", messages=[ASK], stream=True
            )
        )
        for _ in range(3):
            await anext(stream, None)
        stored = store.turns(session.id)
        rest = [event async for event in stream]
        assert len(store.turns(session.id)) == 1
        if not stored and len(rest) > 3:
            return
    raise AssertionError("no stream of eight began before its turn had ended")


def test_synchronous_openai_client_works_and_a_wrong_key_is_refused(
    gateway: GatewayServer, settings: GatewaySettings
):
    def post(path: str, body: dict) -> httpx.Response:
        headers = {"authorization": f"Bearer {ENV_KEY}"}
        return httpx.post(gateway.url + path, json=body, headers=headers, timeout=120)

    members = [{"index": 0}]
    terms = {"task_id": "t", "group_id": "g", "members": members, "purpose": "serve"}
    key = post("/sessions", terms).json()["sessions"][0]["key"]
    with openai.OpenAI(
        base_url=gateway.url + "/v1", api_key=key, max_retries=0
    ) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(
            model="tiny", messages=[ASK], max_tokens=4
        )
        assert answer.usage is not None
        assert (
            answer.usage.total_tokens
            == answer.usage.prompt_tokens + answer.usage.completion_tokens
        )
        with client.chat.completions.create(
            model="tiny",
            messages=[MORE],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            events = list(stream)
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens <= 4
        assert events[-2].choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="tiny", messages=[])
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=[ASK])
    with (
        openai.OpenAI(
            base_url=gateway.url + "/v1", api_key="wrong", max_retries=0
        ) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


async def test_full_gateway_answers_429_and_a_dead_fleet_503(
    tiny_fleet: Fleet, tiny_model: Path, tmp_path: Path
):
    settings = settings_for(
        tiny_fleet,
        tiny_model,
        tmp_path,
        router_url="http://127.0.0.1:9",
        session={"max_open": 1},
        engine_return_s=0.1,
    )
    server = GatewayServer(
        settings,
        folder=tmp_path,
        log=tmp_path / "gateway.log",
        parent=tiny_fleet.fork_parent,
    )
    try:
        await asyncio.to_thread(server.wait_ready, deadline_s=120)
        headers = {"authorization": f"Bearer {ENV_KEY}"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=120
        ) as http:
            session = await open_session(http)
            refused = openai.AsyncOpenAI(
                base_url=server.url, api_key=ENV_KEY, max_retries=0
            )
            body = {"task_id": "t", "group_id": "g", "members": [{"index": 0}]}
            with pytest.raises(openai.RateLimitError) as full:
                await refused.post("/sessions", body=body, cast_to=object)
            assert full.value.response.headers["retry-after"]
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.key, max_retries=0
            )
            with pytest.raises(openai.InternalServerError) as dead:
                await client.chat.completions.create(model="tiny", messages=[ASK])
            assert dead.value.status_code == 503
    finally:
        await asyncio.to_thread(server.stop)
    assert not server.process.alive()


async def test_waiting_lease_gets_no_task_when_the_gateway_ends(
    tiny_fleet: Fleet, tiny_model: Path, tmp_path: Path
):
    settings = settings_for(tiny_fleet, tiny_model, tmp_path, leases=True)
    server = GatewayServer(
        settings,
        folder=tmp_path,
        log=tmp_path / "gateway.log",
        parent=tiny_fleet.fork_parent,
    )
    ended: asyncio.Task[None] | None = None
    try:
        await asyncio.to_thread(server.wait_ready, deadline_s=120)
        headers = {"authorization": f"Bearer {ENV_KEY}"}
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=120
        ) as http:
            sent = asyncio.Event()

            async def trace(name: str, _: object) -> None:
                if name == "http11.send_request_body.complete":
                    sent.set()

            asking = http.post(
                "/tasks/lease", json={"wait_s": 60}, extensions={"trace": trace}
            )
            lease = asyncio.create_task(asking)
            await sent.wait()
            for _ in range(2):  # answered after the lease was read: it came before them
                assert (await http.get("/health")).status_code == 200
            ended = asyncio.create_task(asyncio.to_thread(server.stop))
            answer = await lease
    finally:
        await (ended or asyncio.to_thread(server.stop))
    assert answer.status_code == 200
    assert answer.json() == {"lease": None, "ended": False}


async def test_concurrent_sessions_never_mix(http: httpx.AsyncClient, store: RunStore):
    sessions = [await open_session(http, group_id=f"g{n}") for n in range(12)]

    async def agent(number: int, session: Session) -> None:
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key
        ) as client:
            messages: list = [{"role": "user", "content": f"canary {number}"}]
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="tiny", messages=messages, max_tokens=6
                )
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    MORE,
                ]

    await asyncio.gather(
        *(agent(number, session) for number, session in enumerate(sessions))
    )
    for session in sessions:
        summary = await finish(http, session)
        assert (summary.num_turns, summary.forks) == (2, 0)
        [trajectory] = store.rollout(session.id).trajectories
        assert [turn.parent_id for turn in trajectory.turns] == [
            None,
            trajectory.turns[0].id,
        ]
    assert [outcome.session_id for _, outcome in store.outbox_after(0)][-12:] == [
        s.id for s in sessions
    ]
