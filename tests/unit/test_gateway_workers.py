"""Several workers of one gateway: any connection serves any session, and no answer
comes from another one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import openai
import pytest
from fakes import FakeEngine, random_reply
from gateway_workers import Workers
from running_gateway import ASK, ENV_KEY, MORE, eventually

from invrl.gateway.keys import signed_key
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.workers import forwarder
from invrl.gateway.server.workers.peers import merge_metrics
from invrl.types.rollouts import RolloutSummary


async def test_any_worker_serves_any_session(workers: Workers):
    for owner in range(2):
        [session] = await workers.at[owner].open()
        assert session.id.startswith(f"ses-0{owner}")
        assert session.key.startswith(f"isk-0{owner}")
        messages: list = [ASK]
        for turn in range(4):
            url = f"{workers.urls[turn % 2]}/s/{session.key}/v1"
            client = workers.at[0].client(session, base_url=url)
            if turn < 2:
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True
                )
                text = "".join(
                    [event.choices[0].delta.content or "" async for event in stream]
                )
            else:
                answer = await client.chat.completions.create(
                    model="tiny", messages=messages
                )
                text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, MORE]
        bearer = workers.at[0].client(
            session, base_url=workers.urls[1 - owner] + "/v1", api_key=session.key
        )
        assert [card.id for card in (await bearer.models.list()).data] == ["tiny"]
        response = await bearer.responses.create(model="tiny", input="Hi")
        assert (
            await bearer.responses.retrieve(response.id)
        ).output_text == response.output_text
        other = workers.at[1 - owner]
        assert len((await other.env(f"/sessions/{session.id}")).json()["turns"]) == 5
        summary = await other.finish(session)
        assert isinstance(summary, RolloutSummary)
        assert summary.num_turns == 5
        assert summary.forks == 1
        assert summary.trained_tokens == summary.sampled_tokens


async def test_a_forwarded_stream_carries_tokens_as_they_are_sampled(workers: Workers):
    """Of every six, which may be parts of one character, something has arrived before
    the next is sampled."""
    arrived = 0
    workers.engine.holds = lambda count: count > 6 * (arrived + 1)
    [session] = await workers.at[1].open()
    client = workers.at[0].client(
        session, base_url=f"{workers.urls[0]}/s/{session.key}/v1"
    )
    async with asyncio.timeout(60):
        async for event in await client.chat.completions.create(
            model="tiny", messages=[ASK], stream=True
        ):
            arrived += bool(event.choices[0].delta.content)
    assert arrived > 2


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_reaches_the_worker_that_owns_the_session(
    workers: Workers, stream: bool
):
    workers.engine.holds = lambda count: count > 20
    workers.engine.script = lambda _: list(range(10, 60))
    [session] = await workers.at[1].open()
    client = workers.at[0].client(
        session, base_url=f"{workers.urls[0]}/s/{session.key}/v1"
    )
    call = asyncio.create_task(
        client.chat.completions.create(model="tiny", messages=[ASK], stream=stream)
    )
    await eventually(lambda: bool(workers.engine.running))
    if stream:
        await anext(aiter(await call))
    call.cancel()
    await client.close()
    await eventually(lambda: bool(workers.engine.cancelled))
    await workers.at[1].finish(session)
    assert not any(turn.delivered for turn in workers.at[1].turns(session))


async def test_forwarded_refusal_keeps_its_shape(workers: Workers):
    [session] = await workers.at[1].open(purpose="serve")
    [other] = await workers.at[0].open()
    client = workers.at[0].client(
        session, base_url=f"{workers.urls[0]}/s/{session.key}/v1"
    )
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=[ASK])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as large:
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 30_000}]
        )
    assert large.value.status_code == 413
    assert large.value.code == "request_too_large"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key=other.key).chat.completions.create(
            model="tiny", messages=[ASK]
        )
    for guess in ("isk-ff" + session.key[6:], "isk-01guess", "isk-zz", "isk-"):
        wrong = workers.at[0].client(
            session, base_url=workers.urls[0] + "/v1", api_key=guess
        )
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(model="tiny", messages=[ASK])
    answer = await workers.at[0].env(
        f"/sessions/{session.id}/finish", {"reward": 1.0}, key=other.key
    )
    assert answer.status_code == 401


async def test_repeated_opening_under_one_request_id_returns_the_same_sessions(
    workers: Workers, model: Path, renderer: Renderer
):
    opened = await workers.at[0].open(members=2, request_id="first")
    assert await workers.at[1].open(members=2, request_id="first") == opened
    answer = await workers.at[1].env(
        "/sessions",
        {
            "task_id": "t",
            "group_id": "h",
            "members": [{"index": 0}],
            "request_id": "first",
        },
    )
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "request_id_reused"
    owners = {
        (await workers.at[0].open(request_id=name))[0].id[:6]
        for name in ("one", "two", "three", "four")
    }
    assert owners == {"ses-00", "ses-01"}
    again = await workers.at[0].open(members=2, request_id="first")
    assert again == opened  # a full gateway answers a retry


async def test_admission_counts_the_sessions_of_all_workers(workers: Workers):
    await workers.at[0].open(members=4)
    body = {
        "task_id": "t",
        "group_id": "g",
        "members": [{"index": n} for n in range(3)],
    }
    assert (await workers.at[1].env("/sessions", body)).status_code == 429
    [session, *_] = await workers.at[1].open(members=2)
    assert (await workers.at[0].env("/sessions", body)).status_code == 429
    await workers.at[1].finish(session)
    await workers.at[0].open()


async def test_child_session_is_owned_by_the_worker_of_its_parent(workers: Workers):
    [parent] = await workers.at[1].open()
    for asked, name in ((0, "one"), (1, "one"), (0, "")):
        body = {"request_id": name}
        answer = await workers.at[asked].env(
            f"/sessions/{parent.id}/children", body, key=parent.key
        )
        assert answer.status_code == 201, answer.text
        [child] = answer.json()["sessions"]
        assert child["id"][:6] == "ses-01"
        assert child["key"][:6] == "isk-01"
        assert child["parent_id"] == parent.id
    shown = (await workers.at[0].env(f"/sessions/{parent.id}")).json()
    assert len(shown["children"]) == 2
    assert shown["children"][-1] == child["id"]
    assert (await workers.at[0].env("/metrics?worker=own")).json()["sessions"] == {}


async def test_metric_fractions_are_over_the_tokens_of_all_workers(workers: Workers):
    sampled = {}
    for owner, count in ((0, 1), (1, 3)):
        sessions = await workers.at[owner].open(members=count)
        for session in sessions:
            await (
                workers.at[owner]
                .client(session)
                .chat.completions.create(model="tiny", messages=[ASK])
            )
        end = "finish" if owner else "abort"
        for session in sessions:
            await workers.at[owner].env(
                f"/sessions/{session.id}/{end}", {"reward": 1.0} if owner else {}
            )
        sampled[owner] = sum(
            len(workers.at[owner].turns(s)[0].sampled_ids_T) for s in sessions
        )
    metrics = (await workers.at[0].env("/metrics")).json()
    assert metrics["tokens"]["sampled"] == sum(sampled.values())
    assert metrics["delivered_fraction"] == 1.0
    assert metrics["trained_fraction"] == sampled[1] / sum(sampled.values())
    assert (await workers.at[0].env("/metrics?worker=own")).json()[
        "trained_fraction"
    ] == 0.0


async def test_metrics_sum_over_all_workers(workers: Workers):
    for owner, count in ((0, 1), (1, 3)):
        sessions = await workers.at[owner].open(members=count)
        for session in sessions:
            await (
                workers.at[owner]
                .client(session)
                .chat.completions.create(model="tiny", messages=[ASK])
            )
    metrics = (await workers.at[0].env("/metrics")).json()
    assert metrics["sessions"]["open"] == 4
    assert metrics["turns"]["stop"] == 4
    assert metrics["workers"].keys() == {"0", "1"}
    assert (await workers.at[1].env("/metrics?worker=own")).json()["turns"]["stop"] == 3
    assert (await workers.at[1].env("/metrics", key="guess")).status_code == 401


def test_merged_worker_metrics_add_up_except_for_the_lag():
    parts = [
        {"run_id": "r", "loop_lag_ms": {"max": lag}, "turns": {"stop": 1, name: 2}}
        for lag, name in ((1.5, "length"), (0.5, "abort"))
    ]
    expected = {
        "run_id": "r",
        "loop_lag_ms": {"max": 1.5},
        "turns": {"stop": 2, "length": 2, "abort": 2},
    }
    assert merge_metrics(parts) == expected


async def test_head_request_gets_the_same_head_from_any_worker(workers: Workers):
    [session] = await workers.at[1].open()
    async with httpx.AsyncClient(timeout=20) as http:
        heads = [
            await http.head(f"{url}/s/{session.key}/v1/models") for url in workers.urls
        ]
    assert heads[0].status_code == heads[1].status_code
    assert heads[0].headers.keys() == heads[1].headers.keys()
    assert heads[0].headers.get("content-length") == heads[1].headers.get(
        "content-length"
    )


class DyingOwner:
    """Listens where worker 1 would: hangs up on the first requests, then does what
    `last` says."""

    def __init__(self, deaths: int, last: bytes) -> None:
        self.deaths = deaths
        self.last = last
        self.heard = list[bytes]()

    async def __call__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.heard.append(await reader.readexactly(length))
        if len(self.heard) > self.deaths:
            writer.write(self.last)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def a_worker_beside(
    owner: DyingOwner, folder: Path, model: Path, renderer: Renderer
):
    async with (
        FakeEngine(random_reply()) as engine,
        httpx.AsyncClient(timeout=120) as http,
    ):
        both = Workers(engine, http, folder)
        listening = await asyncio.start_server(owner, sock=both.listeners[1])
        try:
            await both.start(0, model, renderer)
            yield both
        finally:
            listening.close()
            await both.stop()


async def test_request_unanswered_by_a_dead_worker_goes_to_its_successor(
    tmp_path: Path, model: Path, renderer: Renderer
):
    owner = DyingOwner(
        2, b"HTTP/1.1 207 Fine\r\ncontent-length: 2\r\nx-own: 1\r\ndate: then\r\n\r\nok"
    )
    async with a_worker_beside(owner, tmp_path, model, renderer) as both:
        answer = await both.at[0].env("/sessions/ses-01abc/finish", {"reward": 1.0})
        assert answer.status_code == 207
        assert answer.text == "ok"
        assert answer.headers["x-own"] == "1"
        assert owner.heard == [b'{"reward":1.0}'] * 3
        assert "then" not in answer.headers.get_list("date")


async def test_reply_broken_off_by_the_owning_worker_is_broken_off(
    tmp_path: Path, model: Path, renderer: Renderer
):
    owner = DyingOwner(0, b"HTTP/1.1 200 Fine\r\ncontent-length: 99\r\n\r\nhalf")
    async with a_worker_beside(owner, tmp_path, model, renderer) as both:
        with pytest.raises(httpx.RemoteProtocolError):
            await both.at[0].env("/sessions/ses-01abc/finish", {"reward": 1.0})
        assert len(owner.heard) == 1


async def test_dead_owning_worker_is_a_503_that_clients_retry(
    tmp_path: Path, model: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forwarder, "_SUCCESSOR_S", 0.2)
    async with a_worker_beside(
        DyingOwner(10**9, b""), tmp_path, model, renderer
    ) as both:
        key = signed_key("isk-01" + "A" * 32, ENV_KEY.encode())
        answer = await both.at[0].env(f"/s/{key}/v1/chat/completions", {})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "gateway_unavailable"


def test_owning_worker_is_read_from_the_name_of_a_session_or_key():
    place = WorkerPlace(number=1, urls=("a", "b"))
    assert [
        place.owner(name)
        for name in ("isk-01x", "ses-00", "isk-02x", "isk-zz", "", "01")
    ] == [
        1,
        0,
        None,
        None,
        None,
        None,
    ]
