"""The time for which the gate holds a rollout's turns is not the rollout's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_workers import FakeWorker, assignment, given, reasons, started_pool
from running_gateway import ASK, running

from invrl.errors import DeadlineError, SessionError
from invrl.gateway.rendering.renderer import Renderer
from invrl.interfaces import Endpoint
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.held_time import longest_held, wait_unheld
from invrl.rollout.workers.runner import Failure, Runner, Scored
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import WorkerSettings
from invrl.types.reasons import FailureReason
from invrl.types.tasks import Task

TASK = Task(id="t", payload={})


ENDPOINT: Any = SimpleNamespace(
    base_url="http://127.0.0.1:8000/s/key/v1", api_key="key"
)


class Held:
    """Held seconds that the gateway tells, one after the other; the last one again and
    again."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.asked = 0

    async def __call__(self) -> float:
        self.asked += 1
        return self.seconds[min(self.asked, len(self.seconds)) - 1]


async def forever(task: Task, endpoint: Endpoint) -> float:
    await asyncio.Event().wait()
    return 1.0


async def test_deadline_is_later_by_the_time_that_turns_were_held() -> None:
    held = Held(0.02, 0.05, 0.05)
    never = asyncio.get_running_loop().create_future()
    assert await wait_unheld({never}, 0.01, held) == 0.05
    assert held.asked == 3


async def test_gateway_is_not_asked_before_the_deadline() -> None:
    held = Held(1.0)
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    assert await wait_unheld({done}, 60.0, held) == 0.0
    assert held.asked == 0


async def test_rollout_whose_turn_is_held_beyond_its_timeout_gets_its_reward() -> None:
    released = asyncio.Event()

    async def rollout(task: Task, endpoint: Endpoint) -> float:
        await released.wait()
        return 1.0

    class Releasing(Held):
        async def __call__(self) -> float:
            if self.asked == 2:
                released.set()
            return await super().__call__()

    runner = Runner(rollout, None, timeout_s=0.01)
    held = Releasing(0.02, 0.04, 60.0)
    [outcome] = await runner.run(TASK, [ENDPOINT], held_s=held)
    assert isinstance(outcome, Scored)


async def test_timeout_of_a_held_rollout_names_both_times() -> None:
    runner = Runner(forever, None, timeout_s=0.01)
    held = Held(0.6)
    [outcome] = await runner.run(TASK, [ENDPOINT], held_s=held)
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.TIMEOUT
    assert "within 0.01 s, besides 1 s for which the gate held it" in outcome.detail


async def test_requests_of_an_endpoint_may_take_as_long_as_a_hold() -> None:
    rollout = RolloutConfig.model_validate({"rollout_timeout_s": 20.0})
    settings = WorkerSettings(gateway_url="", model="", rollout=rollout)
    assert settings.request_timeout_s == 20.0
    gated = WorkerSettings(gateway_url="", model="", rollout=rollout, max_hold_s=5.0)
    assert gated.request_timeout_s == 25.0


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [((60.0,), FailureReason.EXCEPTION), ((0.0,), FailureReason.TIMEOUT)],
)
async def test_worker_is_not_stuck_while_its_turns_are_held(
    seconds: tuple[float, ...], reason: FailureReason
) -> None:
    pool, workers, gateway = await started_pool(run_timeout_s=0.01, holds_turns=True)
    asked = asyncio.Event()

    async def held_s(session, *, deadline_s):
        asked.set()
        return seconds[0]

    gateway.held_s = held_s  # type: ignore[attr-defined]
    run = asyncio.create_task(pool.run(assignment("hold-a")))
    await given(workers[0], "hold-a")
    await asked.wait()
    await asyncio.sleep(0.05)
    worker: FakeWorker = workers[0]
    worker.release.set()
    assert reasons(await run) == [reason]


@pytest.mark.parametrize(
    "error",
    [SessionError("gone", status=404, code="gone"), DeadlineError("the gateway", 1.0)],
)
async def test_gateway_that_does_not_tell_counts_as_one_that_held_nothing(
    error: Exception,
) -> None:
    class Silent:
        async def held_s(self, session, *, deadline_s):
            raise error

    held_s = longest_held(Silent(), assignment("t", sessions=2).sessions)  # type: ignore[arg-type]
    assert await held_s() == 0.0


async def test_session_that_was_held_longest_counts() -> None:
    class Gateway:
        async def held_s(self, session, *, deadline_s):
            return {"t0": 1.0, "t1": 3.0}[session.id]

    held_s = longest_held(Gateway(), assignment("t", sessions=2).sessions)  # type: ignore[arg-type]
    assert await held_s() == 3.0


# ----------------------------------------------------------------- through a gateway


async def test_gateway_tells_how_long_a_session_is_held_while_it_is(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    gate = {"policy": "gate_policies:hold_all", "max_hold_s": 600.0}
    async with running(tmp_path, model, renderer, gate=gate) as gateway:
        [session] = await gateway.open()
        client = SessionClient(gateway.url)
        assert await client.held_s(session, deadline_s=60.0) == 0.0
        body = {"model": "tiny", "messages": [ASK]}
        url = session.base_url + "/chat/completions"
        turn = asyncio.create_task(gateway.http.post(url, json=body))
        async with asyncio.timeout(60):
            while not await client.held_s(session, deadline_s=60.0):
                await asyncio.sleep(0.02)
        turn.cancel()
        await client.close()


async def test_whole_answer_of_a_held_turn_begins_with_blanks(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    """A client that hears nothing for ten minutes would ask again."""
    gate = {"policy": "gate_policies:hold_all", "max_hold_s": 0.5}
    async with running(
        tmp_path, model, renderer, gate=gate, keep_alive_s=0.01
    ) as gateway:
        [session] = await gateway.open()
        body = {"model": "tiny", "messages": [ASK]}
        url = session.base_url + "/chat/completions"
        answer = await gateway.http.post(url, json=body)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-invrl-session"] == session.id
        assert answer.text.startswith("  ")
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"
        assert len(gateway.turns(session)) == 1


async def test_whole_answer_that_fails_after_blanks_is_cut_off_and_a_retry_is_refused(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    gate = {"policy": "gate_policies:hold_all", "max_hold_s": 600.0}
    async with running(
        tmp_path, model, renderer, gate=gate, keep_alive_s=0.01
    ) as gateway:
        [session] = await gateway.open()
        body = {"model": "tiny", "messages": [ASK]}
        url = session.base_url + "/chat/completions"
        async with gateway.http.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200
            ending = {"reason": "exception", "detail": "enough"}
            await gateway.env(f"/sessions/{session.id}/abort", ending)
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()
        again = await gateway.http.post(url, json=body)
        assert again.status_code == 401
        assert again.json()["error"]["code"] == "session_closed"
