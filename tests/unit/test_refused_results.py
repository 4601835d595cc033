"""What user code returns and the gateway would not take: a failed rollout with a
reason, never an error that leaves the worker. The bounds are the same where the value
is made and where it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from dispatcher_parts import HeldPool, Leases, Opener
from local_worker import worker_at
from running_gateway import ENV_KEY, Running

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.errors import ConfigError, SessionError
from invrl.interfaces import RolloutResult
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.dispatcher import Dispatcher
from invrl.rollout.dispatch.external_environments import ExternalDispatcher
from invrl.rollout.tasks.tasks import check_tasks
from invrl.rollout.workers.rewards import Rejected, valid_components
from invrl.rollout.workers.session_client import SessionClient, UnreportedRollout
from invrl.rollout.workers.worker_actor import Assignment
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.types.groups import Group
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import (
    MAX_NAME_LENGTH,
    MAX_REWARD_COMPONENTS,
    Sampling,
    Session,
)
from invrl.types.tasks import Task


def components(count: int, length: int) -> dict[str, float]:
    return {f"{n:03d}".ljust(length, "\U0001f600"): 1.0 for n in range(count)}


def as_made(parts: dict[Any, Any]) -> Callable[[], object]:
    return lambda: RolloutResult(reward=1.0, components=parts)


def grown_later() -> object:
    parts: dict[str, float] = {}
    result = RolloutResult(reward=1.0, components=parts)
    parts.update(components(MAX_REWARD_COMPONENTS + 1, 9))
    return result


class LongText:
    """A name that becomes too long only as text."""

    def __str__(self) -> str:
        return "x" * (MAX_NAME_LENGTH + 1)


FITS = as_made(components(MAX_REWARD_COMPONENTS, MAX_NAME_LENGTH))
TOO_MANY = as_made(components(MAX_REWARD_COMPONENTS + 1, 9))
TOO_LONG = as_made(components(1, MAX_NAME_LENGTH + 1))


@pytest.mark.parametrize(
    ("make", "reason", "told"),
    [
        (FITS, None, ""),
        (as_made({"\ud800": 1.0, 3: 2.0, "a\x00b": 3}), None, ""),
        (TOO_MANY, FailureReason.EXCEPTION, "has 257 entries; at most 256 are allowed"),
        (TOO_LONG, FailureReason.EXCEPTION, "a name of 513 characters, '000"),
        (
            grown_later,
            FailureReason.BAD_REWARD,
            "has 257 entries; at most 256 are allowed",
        ),
        (
            as_made({LongText(): 1.0}),
            FailureReason.BAD_REWARD,
            "a component's name has 513 characters",
        ),
        (as_made({"a": 10**400}), FailureReason.BAD_REWARD, "component 'a' is inf"),
        (
            as_made({"a": 2e9}),
            FailureReason.BAD_REWARD,
            "component 'a' is 2e+09, beyond",
        ),
    ],
)
async def test_invalid_reward_components_fail_the_rollout_and_valid_ones_pass_the_gateway(
    gateway: Running,
    make: Callable[[], object],
    reason: FailureReason | None,
    told: str,
) -> None:
    [session] = await gateway.open()

    async def rollout(task: Task, endpoint: Any) -> object:
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}]
        )
        return make()

    assignment = Assignment(task=Task(id="t", payload={}), sessions=(session,))
    reply = await worker_at(gateway.url, rollout).run(assignment)
    (outcome,) = reply.outcomes
    if reason is None:
        assert isinstance(outcome, RolloutSummary), outcome
        assert len(outcome.reward_components) >= 3
    else:
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason is reason
        assert told in outcome.detail


def test_too_many_or_too_long_components_are_refused_where_the_result_is_made() -> None:
    with pytest.raises(
        ValueError,
        match=r"RolloutResult\.components has 257 entries; at most 256 are allowed",
    ):
        TOO_MANY()
    with pytest.raises(Rejected, match="a name of 513 characters"):
        valid_components(components(1, MAX_NAME_LENGTH + 1))


# ----------------------------------------------------------------- refusals


class RefusingGateway:
    """Answers by what the path ends with."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = {}
        self.aborted: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        verb = request.path.rsplit("/", 1)[-1]
        if verb == "abort":
            self.aborted.append(msgspec.json.decode(await request.read()))
        status, body = self.answers[verb]
        return web.Response(
            status=status,
            body=msgspec.json.encode(body),
            content_type="application/json",
        )


@pytest.fixture
async def refusing() -> AsyncIterator[tuple[RefusingGateway, str]]:
    scripted = RefusingGateway()
    app = web.Application()
    app.router.add_post("/{path:.*}", scripted.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield scripted, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def assignment() -> Assignment:
    session = Session(
        id="s0",
        key="k0",
        base_url="http://127.0.0.1:1/s/k0/v1",
        task_id="t",
        group_id="g",
        index=3,
        attempt=2,
        purpose="train",
        sampling=Sampling(),
    )
    return Assignment(task=Task(id="t", payload={}), sessions=(session,))


def refusal(message: str) -> object:
    return {
        "error": {
            "message": message,
            "type": "invalid_request",
            "param": None,
            "code": "some_code",
        }
    }


FAILED = {
    "session_id": "s0",
    "task_id": "t",
    "group_id": "g",
    "index": 3,
    "attempt": 2,
    "outcome": "failed",
    "reason": "bad_return",
    "detail": "as it was told",
}


async def good(task: Task, endpoint: Any) -> float:
    return 1.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_refused_finish_fails_the_rollout(
    refusing: tuple[RefusingGateway, str], status: int
) -> None:
    gateway, url = refusing
    gateway.answers = {
        "finish": (status, refusal("no room for this")),
        "abort": (200, FAILED),
    }
    reply = await worker_at(url, good).run(assignment())
    assert [type(outcome) for outcome in reply.outcomes] == [FailedRollout]
    assert gateway.aborted[0]["reason"] == "bad_return"
    assert f"{status} no room for this" in gateway.aborted[0]["detail"]


async def test_session_unknown_to_the_gateway_is_reported_to_the_buffer(
    refusing: tuple[RefusingGateway, str],
) -> None:
    gateway, url = refusing
    gone = (401, refusal("no such session"))
    gateway.answers = {"finish": gone, "abort": gone}
    work = assignment()
    (outcome,) = (await worker_at(url, good).run(work)).outcomes
    assert isinstance(outcome, UnreportedRollout)
    assert outcome.group_id == "g"
    assert outcome.index == 3
    assert outcome.attempt == 2
    assert "no such session" in outcome.detail

    class Pool(HeldPool):
        async def run(
            self, assignment: Assignment, dropped: asyncio.Event | None = None
        ) -> tuple[object, ...]:
            return (outcome,)

    recorded = asyncio.Event()
    outcomes: list[object] = []

    class Buffered(Leases):
        async def record(self, outcome: object) -> None:
            outcomes.append(outcome)
            recorded.set()

    buffer = Buffered(groups=1, size=1)
    dispatcher = Dispatcher(buffer, Opener(), Pool(), concurrency=1, group_form=False)  # type: ignore[arg-type]
    dispatcher.start()
    await asyncio.wait_for(dispatcher.guard(recorded.wait()), 120)
    await dispatcher.stop()
    assert outcomes == [outcome]


async def test_failing_gateway_ends_the_run(
    refusing: tuple[RefusingGateway, str],
) -> None:
    gateway, url = refusing
    gateway.answers = {
        "finish": (500, refusal("internal error")),
        "abort": (200, FAILED),
    }
    with pytest.raises(SessionError, match="500 internal error"):
        await worker_at(url, good).run(assignment())


# ---------------------------------------------------- rewards of external environments


@pytest.mark.parametrize("route", ["reward", "finish"])
@pytest.mark.parametrize("reward", [1e300, -2e9])
async def test_gateway_refuses_a_reward_that_would_overflow(
    gateway: Running, route: str, reward: float
) -> None:
    [session] = await gateway.open()
    bodies = [
        {"reward": reward},
        {"reward": 1.0, "components": {"a": reward}},
    ]
    for body in bodies:
        answer = await gateway.http.post(
            f"{gateway.url}/sessions/{session.id}/{route}",
            json=body,
            headers={"authorization": f"Bearer {ENV_KEY}"},
        )
        assert answer.status_code == 400
        assert "1000000000" in answer.text


# ----------------------------------------------------------------- tasks and filters


def lone_surrogate_tasks() -> Any:
    yield Task(id="bad", payload={"text": "\ud800"})
    yield from (Task(id=f"good{n}", payload={}) for n in range(100))


async def test_task_outside_of_json_is_dropped_and_the_next_is_offered(
    tmp_path: Path,
) -> None:
    buffer = GroupBuffer(
        BufferConfig(),
        RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=2, rollout_max_attempts=2
        ),
        tasks=lone_surrogate_tasks(),
        group_filter=lambda group: None,
    )

    class Held:
        async def lease(self) -> object:
            return buffer.lease()

        async def record(self, outcome: FailedRollout) -> None:
            details.append(outcome.detail)
            buffer.record(outcome)

        async def unwanted(self) -> object:
            await asyncio.sleep(0.01)
            return buffer.unwanted()

    details: list[str] = []
    store = LeaseStore(tmp_path / "run.sqlite")
    # nothing is opened at one here
    sessions = SessionClient("http://no-gateway", env_key="k")
    offers = ExternalDispatcher(
        Held(), store, RunStore(tmp_path / "run.sqlite"), sessions, timeout_s=600.0
    )  # type: ignore[arg-type]
    offers.start()

    async def good_task() -> None:
        while (lease := await asyncio.to_thread(store.take, 1.0)) is None:
            await asyncio.sleep(0.01)
        assert lease.task.id == "good0"

    await offers.guard(asyncio.wait_for(good_task(), 120))
    await offers.stop()
    store.close()
    assert buffer.events.dropped == {"incomplete": 1}
    assert all("task bad cannot be sent as JSON" in detail for detail in details)


def test_a_file_for_outside_environments_is_checked_before_the_run(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a"}\n{"question": "\\ud800"}\n')
    config = RolloutConfig(task_file=str(file))
    check_tasks(config, 0)
    outside = config.model_copy(update={"external_environments": True})
    with pytest.raises(
        ConfigError, match=r"task 2 cannot be sent as JSON: .*surrogates"
    ):
        check_tasks(outside, 0)


@pytest.mark.parametrize("word", ["\ud800", "x" * 65, "two\nlines"])
def test_drop_reason_unfit_for_metrics_or_ledger_is_replaced(word: str) -> None:
    buffer = filtered_by(lambda group: word)
    assert buffer.events.dropped == {"filtered/filter_returned_no_word": 1}


def test_a_filter_that_exits_drops_the_group() -> None:
    def leaves(group: Group) -> str | None:
        raise SystemExit(3)

    assert filtered_by(leaves).events.dropped == {
        "filtered/filter_raised_SystemExit": 1
    }


def filtered_by(group_filter: Callable[[Group], str | None]) -> GroupBuffer:
    """A buffer whose one complete group has met this filter."""
    from small_buffer import summary

    buffer = GroupBuffer(
        BufferConfig(),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        tasks=iter([Task(id="t", payload={})]),
        group_filter=group_filter,
    )
    lease = buffer.lease()
    assert lease is not None
    for member in lease.members:
        buffer.record(summary(lease.group_id, member.index, reward=float(member.index)))
    return buffer
