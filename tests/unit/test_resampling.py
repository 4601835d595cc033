"""The same request again: a new sample if it is asked on purpose, the recorded answer
if that was lost.

Clients without the official ones' retry header (curl, Vercel's `ai`, litellm's own
transports) draw several samples by sending equal bytes; so the gateway must not take
equal bytes for a retry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from running_gateway import ASK, MORE, Running, eventually, running
from slow_cases import first_quick
from training_samples_example import training_rows

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.http.connection import ClientConnection
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Purpose, Session

FIRST_TRY = {"x-stainless-retry-count": "0"}
RETRY = {"x-stainless-retry-count": "1"}
BODIES = {
    "/chat/completions": {"messages": [ASK]},
    "/completions": {"prompt": "What is 12*13?"},
    "/responses": {"input": "What is 12*13?"},
    "/messages": {"messages": [ASK], "max_tokens": 40},
}


async def post(
    gateway: Running,
    session: Session,
    headers: dict[str, str] | None = None,
    *,
    path: str = "/chat/completions",
    stream: bool = False,
    **changes: object,
) -> httpx.Response:
    """As a client sends it that knows nothing of the official clients' headers."""
    body = {
        "model": "tiny",
        "stream": stream,
        **BODIES[path],
        **changes,
    }
    url = f"{gateway.url}/s/{session.key}/v1{path}"
    return await gateway.http.post(url, json=body, headers=headers)


def gather_requests(gateway: Running, count: int) -> None:
    """The engine answers none of the next `count` requests before it has them all."""
    expected = len(gateway.engine.requests) + count
    gateway.engine.holds = lambda _: len(gateway.engine.requests) < expected


@pytest.mark.parametrize("purpose", first_quick(["train", "eval", "serve"]))
@pytest.mark.parametrize("stream", first_quick([True, False]))
@pytest.mark.parametrize("path", BODIES)
async def test_equal_requests_are_sampled_independently(
    gateway: Running, path: str, stream: bool, purpose: Purpose
):
    [session] = await gateway.open(purpose=purpose)
    answers = [await post(gateway, session, path=path, stream=stream) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200] * 4
    turns = gateway.turns(session)
    assert len({tuple(turn.sampled_ids_T) for turn in turns}) == len(turns) == 4
    assert len({answer.content for answer in answers}) == 4
    assert len(gateway.engine.requests) == 4
    await eventually(lambda: all(turn.delivered for turn in gateway.turns(session)))


async def test_a_retry_is_of_a_request_in_the_same_dialect(gateway: Running):
    """Equal bytes are another request where the dialect is another one."""
    [session] = await gateway.open()
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}'
    for path, headers in (("/chat/completions", FIRST_TRY), ("/messages", RETRY)):
        url = f"{session.base_url}{path}"
        answer = await gateway.http.post(url, content=body, headers=headers)
        assert answer.status_code == 200
    assert len(gateway.turns(session)) == 2


async def test_equal_requests_count_as_turns(gateway: Running):
    [session] = await gateway.open(limits={"max_turns": 3})
    statuses = [(await post(gateway, session)).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 403, 403]
    assert len(gateway.turns(session)) == 3


@pytest.mark.parametrize("headers", [{}, FIRST_TRY])
async def test_concurrent_equal_requests_are_sampled_independently(
    gateway: Running, headers: dict[str, str]
):
    [session] = await gateway.open()
    gather_requests(gateway, 6)
    answers = await asyncio.gather(*(post(gateway, session, headers) for _ in range(6)))
    assert (
        len({answer.json()["choices"][0]["message"]["content"] for answer in answers})
        == 6
    )
    assert len(gateway.turns(session)) == 6


async def test_a_retry_of_one_of_two_requests_in_flight_is_a_sample_of_its_own(
    gateway: Running,
):
    """Nobody knows which of the two it repeats."""
    [session] = await gateway.open()
    gather_requests(gateway, 3)
    calls = [asyncio.create_task(post(gateway, session)) for _ in range(2)]
    await eventually(lambda: len(gateway.engine.requests) == 2)
    calls.append(asyncio.create_task(post(gateway, session, RETRY)))
    await eventually(lambda: len(gateway.engine.requests) == 3)
    answers = await asyncio.gather(*calls)
    assert len({answer.content for answer in answers}) == 3


async def test_samples_of_one_prompt_are_siblings(gateway: Running):
    """Best of three at the second turn; the agent goes on from the second of them."""
    [session] = await gateway.open()
    first = (await post(gateway, session)).json()["choices"][0]["message"]
    asked = [ASK, first, MORE]
    drawn = [(await post(gateway, session, messages=asked)).json() for _ in range(3)]
    chosen = drawn[1]["choices"][0]["message"]
    await post(gateway, session, messages=[*asked, chosen, MORE])
    root, *samples, last = gateway.turns(session)
    assert [turn.parent_id for turn in samples] == [root.id] * 3
    assert last.parent_id == samples[1].id
    assert [turn.fork_reason for turn in (root, *samples, last)] == [""] * 5
    assert len({tuple(turn.context_ids_T) for turn in samples}) == 1
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.num_turns == 5
    rows = training_rows(gateway.store.rollout(session.id))
    trained = [turn_id for row in rows for turn_id in row.turn_ids]
    assert sum(int(row.loss_mask_T.sum()) for row in rows) == summary.sampled_tokens
    assert set(trained) == {turn.id for turn in (root, *samples, last)}


async def test_samples_of_the_first_prompt_are_one_conversation(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Each is a root, but none of them departed from anything: they fork nothing, and
    all are trained."""
    async with running(
        tmp_path, model, renderer, session={"train_auxiliary_roots": False}
    ) as gateway:
        [session] = await gateway.open()
        for _ in range(3):
            await post(gateway, session)
        for message in ({"role": "user", "content": "A title, please."}, ASK):
            await post(gateway, session, messages=[message], n=2)
        turns = gateway.turns(session)
        new = "new_conversation"
        assert [turn.fork_reason for turn in turns] == ["", "", "", new, new, "", ""]
        shown = (await gateway.env(f"/sessions/{session.id}")).json()
        assert shown["auxiliary_roots"] == [turn.id for turn in turns[3:5]]
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        assert summary.trained_tokens == sum(
            len(turn.sampled_ids_T) for turn in [*turns[:3], *turns[5:]]
        )


# ----------------------------------------------------------------- what a client lost


async def lose_answers(
    gateway: Running, session: Session, monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> list[httpx.Response]:
    """Answers to equal requests that are sampled and recorded whole, and whose clients
    go away before they have the last byte."""

    async def cut(self: ClientConnection, data: bytes) -> bool:
        await whole(self, data)
        return False

    whole = ClientConnection.end
    with monkeypatch.context() as patched:
        patched.setattr(ClientConnection, "end", cut)
        gather_requests(gateway, count)
        answers = await asyncio.gather(*(post(gateway, session) for _ in range(count)))
    assert [turn.delivered for turn in gateway.turns(session)] == [False] * count
    return answers


def answered_by(answer: httpx.Response) -> str:
    """The turn whose answer this is."""
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


@pytest.mark.parametrize("headers", [{}, FIRST_TRY, RETRY])
async def test_undelivered_reply_goes_to_the_next_equal_request(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
):
    [session] = await gateway.open()
    await lose_answers(gateway, session, monkeypatch)
    [lost] = gateway.turns(session)
    assert answered_by(await post(gateway, session, headers)) == lost.id
    await eventually(lambda: gateway.turns(session)[0].delivered)
    assert answered_by(await post(gateway, session)) != lost.id
    assert len(gateway.engine.requests) == 2


@pytest.mark.parametrize("headers", [{}, FIRST_TRY, RETRY])
async def test_each_undelivered_reply_goes_to_only_one_request(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
):
    """Also while the first of the askers is still being told it."""
    [session] = await gateway.open()
    await lose_answers(gateway, session, monkeypatch, 3)
    sending = asyncio.Event()
    may_end = asyncio.Event()
    whole = ClientConnection.end

    async def slowly(self: ClientConnection, data: bytes) -> bool:
        sending.set()
        await may_end.wait()
        return await whole(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(ClientConnection, "end", slowly)
        first = asyncio.create_task(post(gateway, session, headers))
        await asyncio.wait_for(sending.wait(), 60)
        others = [
            asyncio.create_task(post(gateway, session, headers)) for _ in range(3)
        ]
        await eventually(lambda: len(gateway.engine.requests) == 4)
        may_end.set()
        answers = await asyncio.gather(first, *others)
    assert {answered_by(answer) for answer in answers} == {
        turn.id for turn in gateway.turns(session)
    }
    assert len(gateway.turns(session)) == 4


async def test_reply_that_a_client_continued_is_not_replayed(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    [session] = await gateway.open()
    [answer] = await lose_answers(gateway, session, monkeypatch)
    [first] = gateway.turns(session)
    await post(
        gateway, session, messages=[ASK, answer.json()["choices"][0]["message"], MORE]
    )
    assert gateway.turns(session)[1].parent_id == first.id
    assert answered_by(await post(gateway, session)) not in {
        turn.id for turn in gateway.turns(session)[:2]
    }


async def test_retries_of_failed_equal_requests_are_sampled_independently(
    gateway: Running,
):
    """Best of four with the official client's headers, while the fleet fails: each asks
    twice more."""
    gateway.engine.drop_connections = 12  # each of four, three times
    [session] = await gateway.open()
    failed = await asyncio.gather(
        *(post(gateway, session, FIRST_TRY) for _ in range(4))
    )
    assert [answer.status_code for answer in failed] == [503] * 4
    gather_requests(gateway, 4)
    answers = await asyncio.gather(*(post(gateway, session, RETRY) for _ in range(4)))
    assert len({answered_by(answer) for answer in answers}) == 4
    assert len(gateway.turns(session)) == 4


async def test_retry_of_the_only_request_joins_its_generation_or_gets_its_reply(
    gateway: Running,
):
    gateway.engine.holds = lambda count: count > 3
    [session] = await gateway.open()
    first = asyncio.create_task(post(gateway, session, FIRST_TRY))
    await eventually(lambda: bool(gateway.engine.running))
    joined = asyncio.create_task(post(gateway, session, RETRY))
    async with asyncio.timeout(60):
        while (await gateway.env("/metrics")).json()["turns"].get(
            "retries_answered"
        ) != 1:
            await asyncio.sleep(0.01)
    gateway.engine.holds = lambda _: False
    assert answered_by(await first) == answered_by(await joined)
    assert answered_by(await post(gateway, session, RETRY)) == answered_by(await first)
    assert len(gateway.engine.requests) == 1


async def test_successor_worker_gives_each_undelivered_reply_to_only_one_request(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    monkeypatch: pytest.MonkeyPatch,
):
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        await lose_answers(gateway, session, monkeypatch, 2)
        delivered = answered_by(await post(gateway, session, messages=[MORE]))
        lost = {turn.id for turn in gateway.turns(session)} - {delivered}
    async with running(tmp_path, model, renderer) as gateway:
        answers = [answered_by(await post(gateway, session)) for _ in range(3)]
        assert set(answers[:2]) == lost
        assert answers[2] not in lost
        assert (
            answered_by(await post(gateway, session, RETRY, messages=[MORE]))
            == delivered
        )
        assert answered_by(await post(gateway, session, messages=[MORE])) != delivered
