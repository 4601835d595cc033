"""An environment that leased a task and is not heard of again: its sessions end before
their time, and only its own. Hours pass by moving the time that the gateway has lived
through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from running_gateway import ASK, Running, eventually, running

from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.sessions import lifecycle
from invrl.host.processes.awake_time import AwakeClock
from invrl.store.lease_store import LeaseStore
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.sessions import Session
from invrl.types.tasks import Task

IDLE_S = 900.0


class MovedClock(AwakeClock):
    """Has lived through as much more as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_s = 0.0

    def now(self) -> float:
        return super().now() + self.moved_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    monkeypatch.setattr(lifecycle, "_EXPIRY_INTERVAL_S", 0.01)
    return MovedClock()


class Outside:
    """A gateway whose training sessions are opened on leases."""

    def __init__(self, gateway: Running, folder: Path) -> None:
        self.gateway = gateway
        self._leases = LeaseStore(folder / "run.db")

    async def open(self, group: str, members: int = 1) -> list[Session]:
        places = tuple(GroupMember(index=index, attempt=0) for index in range(members))
        self._leases.offer(
            GroupLease(group_id=group, task=Task(id="t", payload={}), members=places)
        )
        assert (await self.gateway.env("/tasks/lease", {})).json()["lease"][
            "group_id"
        ] == group
        return await self.gateway.open(members=members, group_id=group)

    async def state(self, session: Session) -> str:
        """As the store has it: to ask the gateway would be a sign of life."""
        stored = self.gateway.store.closed_session(session.id)
        return stored.state if stored else "open"

    async def ended(self, session: Session) -> FailedRollout:
        await eventually(
            lambda: self.gateway.store.closed_session(session.id) is not None
        )
        stored = self.gateway.store.closed_session(session.id)
        assert stored is not None
        assert isinstance(stored.outcome, FailedRollout)
        return stored.outcome


@pytest.fixture
async def outside(
    tmp_path: Path, model: Path, renderer: Renderer, clock: MovedClock
) -> AsyncIterator[Outside]:
    limits = {
        "session": {"ttl_s": 1e6, "idle_timeout_s": IDLE_S},
        "place": WorkerPlace(awake_time=clock),
    }
    async with running(tmp_path, model, renderer, leases=True, **limits) as gateway:
        yield Outside(gateway, tmp_path)


async def test_sessions_of_a_vanished_environment_fail_with_their_own_reason(
    outside: Outside, clock: MovedClock
):
    opened = await outside.open("g", members=2)
    clock.moved_s += IDLE_S + 1
    for session in opened:
        outcome = await outside.ended(session)
        assert outcome.reason is FailureReason.ENVIRONMENT_GONE
        assert "session.idle_timeout_s = 900" in outcome.detail
        assert f"/sessions/{session.id}/heartbeat" in outcome.detail
    handed_over = [outcome for _, outcome in outside.gateway.store.outbox_after(0)]
    assert {outcome.session_id for outcome in handed_over} == {
        session.id for session in opened
    }
    late = await outside.gateway.env(
        f"/sessions/{opened[0].id}/heartbeat", {}, key=opened[0].key
    )
    assert late.json() == {
        "session_id": opened[0].id,
        "state": "expired",
        "session_idle_timeout_s": IDLE_S,
        "held_s": 0.0,
    }


@pytest.mark.parametrize(
    "call",
    [
        "chat",
        "models",
        "state",
        "reward",
        "heartbeat",
        "child",
        "child's chat",
        "a sibling's",
    ],
)
async def test_every_call_of_an_environment_is_a_sign_of_life(
    outside: Outside, clock: MovedClock, call: str
):
    gateway = outside.gateway
    mine, sibling = await outside.open("mine", members=2)
    [child] = (
        await gateway.env(f"/sessions/{mine.id}/children", {}, key=mine.key)
    ).json()["sessions"]
    [silent] = await outside.open("silent")
    clock.moved_s += 0.6 * IDLE_S
    own = f"/sessions/{mine.id}"
    body = {"model": "tiny", "messages": [ASK]}
    match call:
        case "chat":
            answer = await gateway.env("/v1/chat/completions", body, key=mine.key)
        case "models":
            answer = await gateway.env("/v1/models", key=mine.key)
        case "state":
            answer = await gateway.env(own, key=mine.key)
        case "reward":
            answer = await gateway.env(own + "/reward", {"reward": 1.0}, key=mine.key)
        case "heartbeat":
            answer = await gateway.env(own + "/heartbeat", {}, key=mine.key)
            assert answer.json()["state"] == "open"
        case "child":
            answer = await gateway.env(own + "/children", {}, key=mine.key)
        case "child's chat":
            answer = await gateway.env("/v1/chat/completions", body, key=child["key"])
        case _:
            answer = await gateway.env("/v1/chat/completions", body, key=sibling.key)
    assert answer.is_success, answer.text
    clock.moved_s += 0.6 * IDLE_S
    assert (await outside.ended(silent)).reason is FailureReason.ENVIRONMENT_GONE
    assert await outside.state(mine) == "open"
    clock.moved_s += 0.6 * IDLE_S
    assert (await outside.ended(mine)).reason is FailureReason.ENVIRONMENT_GONE


async def test_running_generation_is_a_sign_of_life(
    outside: Outside, clock: MovedClock
):
    gateway = outside.gateway
    held_back = True
    gateway.engine.holds = lambda _: held_back
    [mine] = await outside.open("mine")
    [silent] = await outside.open("silent")
    chat = gateway.client(mine).chat.completions
    call = asyncio.create_task(chat.create(model="tiny", messages=[ASK]))
    await eventually(lambda: gateway.engine.running)
    for _ in range(3):
        clock.moved_s += 0.9 * IDLE_S
        [marker] = await outside.open(f"marker {clock.moved_s}")
        await gateway.env(f"/sessions/{marker.id}/abort", {})
    await outside.ended(silent)
    assert await outside.state(mine) == "open"
    held_back = False
    await call
    clock.moved_s += 0.9 * IDLE_S
    [last] = await outside.open("last")
    clock.moved_s += 0.05 * IDLE_S
    assert (
        await gateway.env(f"/sessions/{last.id}/heartbeat", {}, key=last.key)
    ).is_success
    assert await outside.state(mine) == "open"
    clock.moved_s += 0.1 * IDLE_S
    assert (await outside.ended(mine)).reason is FailureReason.ENVIRONMENT_GONE


async def test_idle_timeout_ends_only_sessions_leased_for_training(
    tmp_path: Path, model: Path, renderer: Renderer, clock: MovedClock
):
    limits = {
        "session": {"ttl_s": 1e6, "idle_timeout_s": IDLE_S},
        "place": WorkerPlace(awake_time=clock),
    }
    async with running(
        tmp_path / "out", model, renderer, leases=True, **limits
    ) as gateway:
        outside = Outside(gateway, tmp_path / "out")
        [served] = await gateway.open(purpose="serve")
        [evaluated] = await gateway.open(purpose="eval")
        [silent] = await outside.open("silent")
        clock.moved_s += 10 * IDLE_S
        await outside.ended(silent)
        assert await outside.state(served) == await outside.state(evaluated) == "open"


@pytest.mark.parametrize(
    "changes",
    [
        {"leases": False},
        {"leases": True, "session": {"idle_timeout_s": None, "ttl_s": 1e6}},
    ],
)
async def test_idle_timeout_does_not_apply_to_our_own_workers_or_when_turned_off(
    tmp_path: Path, model: Path, renderer: Renderer, clock: MovedClock, changes: dict
):
    settings = {"session": {"idle_timeout_s": IDLE_S, "ttl_s": 1e6}, **changes}
    place = WorkerPlace(awake_time=clock)
    async with running(tmp_path, model, renderer, place=place, **settings) as gateway:
        if settings["leases"]:
            [session] = await Outside(gateway, tmp_path).open("g")
        else:
            [session] = await gateway.open()
        clock.moved_s += 100 * IDLE_S
        [short] = await gateway.open(purpose="serve", limits={"timeout_s": 1.0})
        clock.moved_s += 2.0
        await eventually(lambda: gateway.store.closed_session(short.id) is not None)
        assert gateway.store.closed_session(session.id) is None
