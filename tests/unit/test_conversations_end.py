"""A closed session leaves nothing behind, however its calls ended: without the help of
the collector for cycles, which the gateway lets look at old objects about once in half
a million requests."""

from __future__ import annotations

import asyncio
import gc
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from running_gateway import ASK, Running, eventually, running
from slow_cases import first_quick

from invrl.engines.client.sglang_client import SglangClient
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.turns.generation import Generation
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.sessions import Session

End = Callable[[Running, Session, bool], Awaitable[None]]
"""How a call ends."""


_earlier: list[object] = []
"""What tests before this one left alive: a gateway may live on in their process when it
has ended."""


def alive() -> list[object]:
    return [
        instance
        for instance in gc.get_objects()
        if type(instance) in (Conversation, Generation)
    ]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    _earlier[:] = alive()
    gc.disable()
    logging.disable()  # pytest keeps what is logged, errors with their tracebacks too
    yield
    logging.disable(logging.NOTSET)
    gc.enable()
    _earlier.clear()


@pytest.fixture
async def gateway(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    without_collector: None,
) -> AsyncIterator[Running]:
    async with running(
        tmp_path, model, renderer, session={"generate_timeout_s": 60.0}
    ) as gateway:
        gateway.engine.script = lambda _: list(range(10, 60))
        yield gateway


async def all_let_go() -> None:
    """No conversation and no generation of this test is alive any more."""
    earlier = {id(instance) for instance in _earlier}
    await eventually(lambda: all(id(instance) in earlier for instance in alive()), 20)


async def ask(gateway: Running, session: Session, *, stream: bool, n: int = 1) -> int:
    body = {
        "model": "tiny",
        "messages": [ASK],
        "stream": stream,
        "n": n,
    }
    url = session.base_url + "/chat/completions"
    return (await gateway.http.post(url, json=body)).status_code


async def go_away(gateway: Running, session: Session, stream: bool) -> None:
    """The client disconnects in the middle of the answer."""
    gateway.engine.holds = lambda count: count > 20
    before = len(gateway.engine.cancelled)
    async with httpx.AsyncClient(verify=False) as http:
        body = {"model": "tiny", "messages": [ASK], "stream": stream}
        call = asyncio.create_task(
            http.post(session.base_url + "/chat/completions", json=body)
        )
        await eventually(lambda: bool(gateway.engine.running))
        call.cancel()
    await eventually(lambda: len(gateway.engine.cancelled) > before)


async def close_meanwhile(gateway: Running, session: Session, stream: bool) -> None:
    """The session is finished while it samples."""
    gateway.engine.holds = lambda count: count > 20
    call = asyncio.create_task(ask(gateway, session, stream=stream))
    await eventually(lambda: bool(gateway.engine.running))
    await gateway.finish(session)
    await call


async def lose_the_engine(gateway: Running, session: Session, stream: bool) -> None:
    gateway.engine.drop_connections = 3  # the gateway tries three times
    assert await ask(gateway, session, stream=stream) == 503


async def be_aborted(gateway: Running, session: Session, stream: bool) -> None:
    gateway.engine.aborts = 3
    await ask(gateway, session, stream=stream)


async def fail_of_two(gateway: Running, session: Session, stream: bool) -> None:
    """One of two choices at a time."""
    gateway.engine.aborts = 5  # of the six tries of both
    await ask(gateway, session, stream=stream, n=2)


async def be_refused(gateway: Running, session: Session, stream: bool) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x" * 20_000}],
        "stream": stream,
    }
    answer = await gateway.http.post(session.base_url + "/chat/completions", json=body)
    assert answer.status_code == 400


async def be_refused_in_a_thread(
    gateway: Running, session: Session, stream: bool
) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x" * 200_000}],
        "stream": stream,
    }
    for path in ("/chat/completions", "/messages/count_tokens"):
        answer = await gateway.http.post(session.base_url + path, json=body)
        assert answer.status_code == (400 if path == "/chat/completions" else 200)
    answer = await gateway.http.post(
        session.base_url + "/chat/completions", content=b"[" * 100_000
    )
    assert answer.status_code == 400


async def be_answered(gateway: Running, session: Session, stream: bool) -> None:
    assert await ask(gateway, session, stream=stream) == 200


@pytest.mark.parametrize("stream", first_quick([True, False]))
@pytest.mark.parametrize(
    "end",
    [
        go_away,
        close_meanwhile,
        lose_the_engine,
        be_aborted,
        fail_of_two,
        be_refused,
        be_refused_in_a_thread,
        be_answered,
    ],
)
async def test_closed_session_is_freed(gateway: Running, end: End, stream: bool):
    for _ in range(4):
        [session] = await gateway.open()
        await end(gateway, session, stream)
        gateway.engine.holds = lambda _: False
        await gateway.finish(session)
    await all_let_go()


@pytest.mark.parametrize("stream", first_quick([True, False]))
async def test_session_whose_engine_timed_out_is_freed(
    gateway: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
):
    for client in [
        instance for instance in gc.get_objects() if type(instance) is SglangClient
    ]:
        monkeypatch.setattr(client, "_generate_deadline_s", 0.2)
    [session] = await gateway.open()
    gateway.engine.holds = lambda count: count > 20
    assert await ask(gateway, session, stream=stream) in (200, 503)
    await gateway.finish(session)
    await all_let_go()


class FullDisk:
    """A database that takes no turn."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        if sql.startswith("INSERT INTO turns"):
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, values)


@pytest.mark.parametrize("stream", first_quick([True, False]))
@pytest.mark.parametrize("fault", ["decoding", "store"])
async def test_session_with_an_internal_error_is_freed(
    gateway: Running,
    stream: bool,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """What was sampled is on record all the same, as far as there is a record."""
    [session] = await gateway.open()

    def fail(*_: object) -> str:
        raise ValueError("cannot be decoded")

    with monkeypatch.context() as patched:
        if fault == "decoding":
            patched.setattr(TextStream, "push", fail)
        else:
            for store in [
                instance
                for instance in gc.get_objects()
                if type(instance) is RunStoreWriter
            ]:
                patched.setattr(store, "_db", FullDisk(store._db))
        assert await ask(gateway, session, stream=stream) == 500 or stream
    if fault == "decoding":
        [turn] = gateway.turns(session)
        assert turn.finish_reason == "abort"
        assert (
            turn.sampled_ids_T.tolist()
            == list(range(10, 60))[: len(turn.sampled_ids_T)]
            != []
        )
    await gateway.finish(session)
    await all_let_go()


async def test_sixty_aborted_sessions_leave_no_conversation_in_memory(gateway: Running):
    for _ in range(60):
        [session] = await gateway.open()
        await go_away(gateway, session, True)
        await gateway.env(
            f"/sessions/{session.id}/abort", {"reason": "aborted", "detail": "x"}
        )
    await all_let_go()
