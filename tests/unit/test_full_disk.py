"""A full disk is named once, refuses requests for a while, and ends no run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from running_gateway import ASK, Running, eventually, running
from stored_rollouts import stored_session
from tiny_model import make_tiny_model

from invrl.errors import DiskFullError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.turns import generation
from invrl.host.files.disk import full_disk
from invrl.host.output.log_lines import LogSettings, write_log_lines
from invrl.rollout.workers.runner import classify
from invrl.store import run_store_writer
from invrl.store.run_store_writer import RunStoreWriter
from invrl.store.schema import connect
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary

_MOST_PAGES = 2**31


class Disk:
    """The disk of the stores that writers open in a test. SQLite refuses to grow a file
    on a full one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._connections: list[sqlite3.Connection] = []
        monkeypatch.setattr(run_store_writer, "connect", self._connect)

    def _connect(self, path: Path, **options: float) -> sqlite3.Connection:
        connection = connect(path, **options)
        self._connections.append(connection)
        return connection

    def set_full(self, is_full: bool) -> None:
        for connection in self._connections:
            connection.execute(f"PRAGMA max_page_count={1 if is_full else _MOST_PAGES}")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def filled(write: Callable[[int], object]) -> int:
    """Write until the disk is full. How many writes fitted into the pages that were
    there."""
    for count in range(1000):
        try:
            write(count)
        except DiskFullError:
            return count
    pytest.fail("the disk never became full")


def test_the_store_says_it_once_and_goes_on_when_there_is_space(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.sqlite"
    writer = RunStoreWriter(path)

    def open_session(number: int) -> None:
        record = stored_session(f"s{number}", bytes([number % 256, number // 256]), 0.0)
        writer.open_sessions([record]).result(60)

    disk.set_full(True)
    count = filled(open_session)
    for number in range(count, count + 5):
        with pytest.raises(DiskFullError, match=f"the disk of {tmp_path} is full"):
            open_session(number)
    [line] = [
        record for record in caplog.records if record.name == run_store_writer.__name__
    ]
    assert "other requests are refused until there is space" in line.message
    disk.set_full(False)
    open_session(count)
    disk.set_full(True)
    filled(lambda number: open_session(number + count + 1))
    assert len(caplog.records) == 2, "the next time it is said again"
    writer.close()
    with closing(sqlite3.connect(path)) as db:
        [[num_sessions]] = db.execute("SELECT count(*) FROM sessions")
    assert num_sessions > count


async def test_a_request_that_cannot_be_recorded_is_to_come_again(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model")
    renderer = load_renderer(str(model), 512)
    async with running(tmp_path, model, renderer, space_wait_s=0.0) as gateway:
        [session] = await gateway.open()
        disk.set_full(True)
        url = f"{session.base_url}/chat/completions"
        headers = {"authorization": f"Bearer {session.key}"}
        body = {"model": "tiny", "messages": [ASK], "max_tokens": 8}
        opening = {
            "task_id": "t",
            "members": [{"index": 0, "attempt": 0}],
        }

        async def call(number: int) -> httpx.Response:
            return await gateway.http.post(url, json=body, headers=headers)

        async def open_session(number: int) -> httpx.Response:
            return await gateway.env("/sessions", opening | {"group_id": f"h{number}"})

        for request in (call, open_session):
            answers = [await request(number) for number in range(100)]
            refusal = answers[-1]
            assert refusal.status_code == 503, refusal.text
            assert refusal.headers["retry-after"] == "5"
            assert (
                "nothing can be recorded: the disk of"
                in refusal.json()["error"]["message"]
            )
            assert {answer.status_code for answer in answers} <= {200, 201, 503}
        assert not [record for record in caplog.records if record.exc_info], (
            "no traceback"
        )
        disk.set_full(False)
        answer = await gateway.http.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text


LONG = {"role": "user", "content": "word " * 1000}
"""A turn with it takes pages of its own."""


async def fill_store(gateway: Running) -> None:
    """Opens sessions until nothing more can be recorded."""
    for number in range(1000):
        opening = {
            "task_id": "t",
            "members": [{"index": 0, "attempt": 0}],
            "group_id": f"filling-{number}",
        }
        if (await gateway.env("/sessions", opening)).status_code == 503:
            return
    pytest.fail("the disk never became full")


async def sampled(gateway: Running) -> None:
    await eventually(lambda: len(gateway.engine.requests) > 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agents_call_waits_for_space_and_its_turn_is_recorded_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(generation, "_SPACE_POLL_S", 0.01)
    model = make_tiny_model(tmp_path / "model")
    renderer = load_renderer(str(model), 512)
    async with running(
        tmp_path, model, renderer, context_length=8192, keep_alive_s=0.05
    ) as gateway:
        [session] = await gateway.open()
        disk.set_full(True)
        await fill_store(gateway)
        body = {"model": "tiny", "messages": [LONG], "max_tokens": 40, "stream": stream}
        answering = asyncio.create_task(
            gateway.env("/v1/chat/completions", body, key=session.key)
        )
        await sampled(gateway)
        done, _ = await asyncio.wait([answering], timeout=0.5)
        assert not done
        assert gateway.turns(session) == []
        disk.set_full(False)
        answer = await answering
        assert answer.status_code == 200, answer.text
        if stream:
            assert answer.text.rstrip().endswith("data: [DONE]")
            assert ": " in answer.text.split("data: [DONE]")[0]
        [turn] = gateway.turns(session)
        counts = (await gateway.env("/metrics")).json()["turns"]
        assert counts["sampled_tokens"] == len(turn.sampled_ids_T)
        assert len(gateway.engine.requests) == 1
        outcome = await gateway.finish(session)
        assert isinstance(outcome, RolloutSummary)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_has_waited_long_for_space_fails_its_rollout_with_that_reason(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The official client does not ask again."""
    monkeypatch.setattr(generation, "_SPACE_POLL_S", 0.01)
    model = make_tiny_model(tmp_path / "model")
    renderer = load_renderer(str(model), 512)
    async with running(
        tmp_path, model, renderer, context_length=8192, space_wait_s=0.2
    ) as gateway:
        [session] = await gateway.open()
        disk.set_full(True)
        await fill_store(gateway)
        create = gateway.client(session, max_retries=2).chat.completions.create
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "stream": stream}

        async def ask() -> None:
            async for _ in await create(messages=[cast(Any, LONG)], **options):
                pass

        with pytest.raises(openai.APIError) as raised:
            await ask()
        failure = classify(raised.value, [cast(Any, session)])
        assert failure.reason is FailureReason.ENGINE
        assert "nothing can be recorded: the disk of" in failure.detail
        assert len(gateway.engine.requests) == 1
        disk.set_full(False)
        assert gateway.turns(session) == []
        outcome = await gateway.finish(session)
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason is FailureReason.EMPTY


async def test_a_session_that_ends_while_its_turn_waits_for_space_has_no_such_turn(
    tmp_path: Path, disk: Disk
) -> None:
    model = make_tiny_model(tmp_path / "model")
    renderer = load_renderer(str(model), 512)
    async with running(tmp_path, model, renderer, context_length=8192) as gateway:
        [session] = await gateway.open()
        body = {"model": "tiny", "messages": [ASK], "max_tokens": 8}
        first = await gateway.env("/v1/chat/completions", body, key=session.key)
        assert first.status_code == 200
        disk.set_full(True)
        await fill_store(gateway)
        body["messages"] = [LONG]
        answering = asyncio.create_task(
            gateway.env("/v1/chat/completions", body, key=session.key)
        )
        await eventually(lambda: len(gateway.engine.requests) > 1)
        await asyncio.wait([answering], timeout=0.2)
        assert not answering.done()
        disk.set_full(False)
        outcome = await gateway.finish(session)
        assert isinstance(outcome, RolloutSummary)
        assert (await answering).status_code == 401
        recorded = sum(len(turn.sampled_ids_T) for turn in gateway.turns(session))
        assert outcome.sampled_tokens == recorded


def test_the_full_disk_is_named_with_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert full_disk(tmp_path) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_340_000))
    mount = tmp_path
    while not mount.is_mount():
        mount = mount.parent
    assert full_disk(tmp_path) == f"the disk at {mount} is full: 1.3 MB are free"


def test_log_lines_that_cannot_be_written_print_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    try:
        write_log_lines("test", LogSettings(), file=Path("/dev/full"))
        logging.getLogger("invrl.test").error("a line")
        assert capfd.readouterr().err == ""
        logging.getLogger("invrl.test").error("%d", "a mistake of ours is still shown")
        assert "Logging error" in capfd.readouterr().err
    finally:
        for handler in root.handlers:
            with suppress(OSError):
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
