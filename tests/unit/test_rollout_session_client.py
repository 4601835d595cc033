"""The session API client against a scripted HTTP server: what is retried, what is
refused, for how long."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from aiohttp import web

from invrl.errors import DeadlineError, SessionError
from invrl.rollout.workers import session_client
from invrl.rollout.workers.session_client import SessionClient, UnreportedRollout
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task

LEASE = GroupLease(
    group_id="g",
    task=Task(id="t", payload={"secret": 1}),
    members=(
        GroupMember(index=0, attempt=0),
        GroupMember(index=3, attempt=2),
    ),
)


def session(index, attempt):
    return Session(
        id=f"s{index}",
        key=f"k{index}",
        base_url=f"http://gw/s/k{index}/v1",
        task_id="t",
        group_id="g",
        index=index,
        attempt=attempt,
        purpose="train",
        sampling=Sampling(temperature=0.5),
    )


SUMMARY = RolloutSummary(
    session_id="s0",
    task_id="t",
    group_id="g",
    index=0,
    attempt=0,
    reward=0.5,
    reward_components={"format": 1.0},
    num_turns=2,
    prompt_tokens=10,
    cached_tokens=5,
    later_prompt_tokens=6,
    later_cached_tokens=5,
    sampled_tokens=7,
    trained_tokens=7,
    truncated=False,
    oldest_version=1,  # type: ignore[arg-type]
    newest_version=2,  # type: ignore[arg-type]
    forks=0,
    started_at=1.0,
    finished_at=2.0,
)


class ScriptedGateway:
    """Answers in order: (status, body, headers); the last one again and again."""

    def __init__(self):
        self.answers = []
        self.requests = []

    async def handle(self, request):
        self.requests.append(
            (
                request.path,
                request.headers["Authorization"],
                msgspec.json.decode(await request.read()),
            )
        )
        status, body, headers = self.answers[
            min(len(self.requests), len(self.answers)) - 1
        ]
        return web.Response(
            status=status,
            body=msgspec.json.encode(body),
            headers=headers,
            content_type="application/json",
        )


@pytest.fixture
async def gateway():
    scripted = ScriptedGateway()
    app = web.Application()
    app.router.add_post("/{path:.*}", scripted.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    scripted.client = SessionClient(
        f"http://127.0.0.1:{port}/", env_key="env", deadline_s=60.0
    )
    yield scripted
    await scripted.client.close()
    await runner.cleanup()


class Clock:
    """The client's time, which passes in its pauses alone."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(session_client, "time", clock)
    monkeypatch.setattr(session_client, "asyncio", clock)
    return clock


OPENED = {"sessions": [session(0, 0), session(3, 2)]}
FULL = {"error": {"message": "full", "type": "rate_limit_error", "code": "capacity"}}


async def test_opening_a_session_sends_the_lease_with_the_environment_key(gateway):
    gateway.answers = [(201, OPENED, {})]
    opened = await gateway.client.open(
        LEASE, purpose="eval", sampling=Sampling(temperature=0.0)
    )
    assert opened == [session(0, 0), session(3, 2)]
    assert len(gateway.requests[0][2].pop("request_id")) == 32
    assert gateway.requests == [
        (
            "/sessions",
            "Bearer env",
            {
                "task_id": "t",
                "group_id": "g",
                "members": [
                    {"index": 0, "attempt": 0},
                    {"index": 3, "attempt": 2},
                ],
                "purpose": "eval",
                "sampling": {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 512},
            },
        )
    ]


async def test_opening_a_session_waits_for_retry_after(gateway, clock):
    gateway.answers = [
        (429, FULL, {"Retry-After": "7.5"}),
        (503, {}, {}),
        (201, OPENED, {}),
    ]
    assert len(await gateway.client.open(LEASE)) == 2
    assert clock.pauses == [7.5, 0.1]
    # a retry can be told from a new one
    assert len({body["request_id"] for _, _, body in gateway.requests}) == 1
    assert len(gateway.requests) == 3


async def test_gateway_that_stays_full_ends_in_a_deadline_error_with_its_message(
    gateway, clock
):
    gateway.answers = [(429, FULL, {"Retry-After": "600"})]
    with pytest.raises(DeadlineError, match=r"open 2 sessions of group g.*429 full"):
        await gateway.client.open(LEASE, deadline_s=30.0)
    assert clock.pauses == [30.0]


async def test_a_gateway_whose_disk_is_full_is_waited_for_beyond_the_deadline(
    gateway, clock
):
    full_disk = {"error": {"message": "the disk at / is full", "code": "disk_full"}}
    refusals = [(503, full_disk, {"Retry-After": "5"})] * 100
    gateway.answers = [*refusals, (201, OPENED, {})]
    assert len(await gateway.client.open(LEASE, deadline_s=30.0)) == 2
    assert sum(clock.pauses) == 500.0


async def test_unreachable_gateway_ends_in_a_deadline_error(clock):
    client = SessionClient("http://127.0.0.1:1", deadline_s=30.0)
    with pytest.raises(DeadlineError, match="ConnectError"):
        await client.open(LEASE)
    assert sum(clock.pauses) == pytest.approx(30.0)
    assert max(clock.pauses) == 2.0
    await client.close()


async def test_refused_session_opening_is_not_retried(gateway):
    gateway.answers = [
        (401, {"error": {"message": "bad key", "code": "invalid_api_key"}}, {})
    ]
    with pytest.raises(SessionError, match="bad key") as caught:
        await gateway.client.open(LEASE)
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sessions": [session(0, 0)]},
        {"sessions": [{"id": "x"}, 5]},
        [1],
    ],
)
async def test_malformed_gateway_reply_is_an_error(gateway, body):
    gateway.answers = [(201, body, {})]
    with pytest.raises(SessionError) as caught:
        await gateway.client.open(LEASE)
    assert caught.value.code == "bad_answer"


async def test_finish_uses_the_key_of_the_session(gateway):
    gateway.answers = [(200, SUMMARY, {})]
    assert await gateway.client.finish(session(0, 0), 0.5, {"format": 1.0}) == SUMMARY
    assert gateway.requests == [
        (
            "/sessions/s0/finish",
            "Bearer k0",
            {"reward": 0.5, "components": {"format": 1.0}},
        )
    ]


async def test_finishing_a_failed_session_returns_its_failure(gateway):
    failed = FailedRollout(
        session_id="s0",
        task_id="t",
        group_id="g",
        index=0,
        attempt=0,
        reason=FailureReason.EMPTY,
        detail="no turn",
    )
    gateway.answers = [(200, failed, {})]
    assert await gateway.client.finish(session(0, 0), 1.0) == failed


FAILED = FailedRollout(
    session_id="s3",
    task_id="t",
    group_id="g",
    index=3,
    attempt=2,
    reason=FailureReason.TIMEOUT,
    detail="x",
)


async def test_abort_survives_a_restart_of_the_gateway(gateway):
    gateway.answers = [
        (503, {}, {}),
        (200, FAILED, {}),
    ]
    assert (
        await gateway.client.abort(session(3, 2), FailureReason.TIMEOUT, "x" * 10_000)
        == FAILED
    )
    path, key, body = gateway.requests[-1]
    assert path == "/sessions/s3/abort"
    assert key == "Bearer k3"
    assert body["reason"] == "timeout"
    assert len(body["detail"]) == 4000


async def test_abort_after_the_finish_returns_the_sessions_outcome(gateway):
    gateway.answers = [(200, SUMMARY, {})]
    assert (
        await gateway.client.abort(session(0, 0), FailureReason.WORKER_DIED, "\ud800")
        == SUMMARY
    )
    assert gateway.requests[-1][2]["detail"] == "?"


async def test_refused_abort_does_not_count_as_done(gateway):
    gateway.answers = [(401, {}, {})]
    outcome = await gateway.client.abort(
        session(0, 0), FailureReason.TIMEOUT, "it hangs"
    )
    assert isinstance(outcome, UnreportedRollout)
    assert outcome.reason is FailureReason.TIMEOUT
    assert outcome.detail.startswith("it hangs\nthe gateway to abort session s0: 401")
    gateway.answers = [(500, {}, {})]
    with pytest.raises(SessionError):
        await gateway.client.abort(session(0, 0), FailureReason.TIMEOUT, "")


def test_session_refusal_keeps_its_type_across_processes():
    error = SessionError(
        "full", status=429, code="capacity", param="x", retry_after_s=2.0
    )
    copy = pickle.loads(pickle.dumps(error))
    assert copy.args == ("full",)
    assert copy.status == 429
    assert copy.code == "capacity"
    assert copy.param == "x"
    assert copy.retry_after_s == 2.0
