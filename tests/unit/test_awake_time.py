"""No deadline passes in a time that nobody lived through: a clock that is set, a
process that was stopped."""

import asyncio
from pathlib import Path

import pytest
from gateway_restarts import Life, ask
from running_gateway import ASK, Running, eventually
from stepped_clock import SteppedClock, SteppedMachine

from invrl.gateway.registry import WorkerPlace
from invrl.gateway.server.processes.heartbeat_page import HeartbeatPage
from invrl.host.processes.awake_time import AwakeClock, awake_wait
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Session

_TWO_HOURS_S = 7200.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SteppedMachine:
    return SteppedMachine(monkeypatch)


def test_of_a_long_gap_ten_seconds_count_and_of_short_ones_all():
    clock = SteppedClock()
    awake_time = AwakeClock(clock=clock)
    clock.step(_TWO_HOURS_S)
    assert awake_time.now() == 10.0
    for _ in range(30):
        clock.step(1.5)
        awake_time.now()
    assert awake_time.now() == 55.0


def test_the_worker_that_replaces_another_goes_on_with_its_time():
    page = HeartbeatPage(HeartbeatPage.create(workers=3), workers=3)
    page.beat(0)
    page.count_hung(3)
    page.end_run()
    clock = SteppedClock()
    first = AwakeClock(page.awake_word(2), clock=clock)
    clock.step(4.0)
    assert first.now() == 4.0
    clock.step(_TWO_HOURS_S)
    second = AwakeClock(page.awake_word(2), clock=clock)
    assert second.now() == 4.0
    assert page.awake_word(0)[0] == 0
    assert page.awake_word(1)[0] == 0
    assert page.beats(0) == 1
    assert page.hung(3) == 1
    assert page.run_has_ended()


async def test_a_wait_goes_on_after_its_process_was_stopped(machine: SteppedMachine):
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(awake_wait([answer], 60.0, clock=machine.monotonic))
    await asyncio.sleep(0)
    machine.stop_for(_TWO_HOURS_S)
    asyncio.get_running_loop().call_later(0.1, answer.set_result, 7)
    assert await waiting == ({answer}, set())
    silent: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    assert await awake_wait([answer, silent], 0.05) == ({answer}, {silent})
    first = await awake_wait(
        [answer, silent], 60.0, return_when=asyncio.FIRST_COMPLETED
    )
    assert first == ({answer}, {silent})
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(ValueError())
    both = await awake_wait([failed, silent], 60.0, return_when=asyncio.FIRST_EXCEPTION)
    assert both == ({failed}, {silent})


@pytest.mark.parametrize(
    ("jump_s", "restarts"),
    [
        (_TWO_HOURS_S, True),
        pytest.param(-_TWO_HOURS_S, True, marks=pytest.mark.slow),
        pytest.param(_TWO_HOURS_S, False, marks=pytest.mark.slow),
        pytest.param(-_TWO_HOURS_S, False, marks=pytest.mark.slow),
    ],
)
async def test_a_session_lives_as_long_as_it_may_whatever_the_clock_is_set_to(
    life: Life, machine: SteppedMachine, jump_s: float, restarts: bool
):
    """The clock jumps, and in two of the cases the gateway worker dies as well. The
    session is there after the jump, and ends when its time is up."""
    place = WorkerPlace(awake_time=AwakeClock(clock=machine.monotonic))
    async with life.again(session={"ttl_s": 15.0}, place=place) as gateway:
        [session] = await gateway.open()
        await ask(gateway, session, [ASK])
        machine.set_clock(jump_s)
        # longer than from one look at the sessions to the next
        await asyncio.sleep(1.2)
        assert state(gateway, session) == "open"
        if not restarts:
            await _ends_after_its_time(gateway, machine, session)
    if restarts:
        async with life.again(session={"ttl_s": 15.0}, place=place) as gateway:
            await asyncio.sleep(1.2)
            assert state(gateway, session) == "open"
            await _ends_after_its_time(gateway, machine, session)


async def _ends_after_its_time(
    gateway: Running, machine: SteppedMachine, session: Session
) -> None:
    for _ in range(2):
        machine.stop_for(8.0)
        await asyncio.sleep(1.2)
    await eventually(lambda: state(gateway, session) == "expired")


def state(gateway: Running, session: Session) -> str:
    stored = gateway.store.session(session.id)
    assert stored is not None
    return stored.state


async def test_a_stopped_gateway_ends_no_session_and_times_what_was_lived(
    life: Life, machine: SteppedMachine
):
    place = WorkerPlace(awake_time=AwakeClock(clock=machine.monotonic))
    async with life.again(
        session={"ttl_s": 60.0, "idle_timeout_s": 30.0}, place=place
    ) as gateway:
        [session] = await gateway.open()
        machine.stop_for(_TWO_HOURS_S)
        await asyncio.sleep(1.2)
        await ask(gateway, session, [ASK])
        machine.set_clock(-_TWO_HOURS_S)
        outcome = await gateway.finish(session)
    assert isinstance(outcome, RolloutSummary)
    assert 10.0 < outcome.finished_at - outcome.started_at < 60.0


async def test_a_reward_may_come_after_the_clock_was_set(
    life: Life, machine: SteppedMachine
):
    place = WorkerPlace(awake_time=AwakeClock(clock=machine.monotonic))
    async with life.again(late={"deadline_s": 60.0}, place=place) as gateway:
        [session] = await gateway.open()
        await ask(gateway, session, [ASK])
        answer = await gateway.env(
            f"/sessions/{session.id}/finish", {}, key=session.key
        )
        assert answer.status_code == 202
        machine.set_clock(_TWO_HOURS_S)
        await asyncio.sleep(1.2)
    async with life.again(late={"deadline_s": 60.0}, place=place) as gateway:
        await asyncio.sleep(1.2)
        answer = await gateway.env(
            f"/sessions/{session.id}/reward", {"reward": 0.5}, key=session.key
        )
        assert answer.json()["state"] == "finished"


def test_only_people_are_told_the_time_of_the_wall_clock():
    """Every use of a clock that can be set, file by file. A duration or a deadline has
    no place here."""
    package = Path(__file__).parents[2] / "invrl"
    using = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(
            clock in path.read_text("utf-8")
            for clock in ("time.time()", "datetime.now(", "=time.time")
        )
    }
    assert using == _FOR_PEOPLE


_FOR_PEOPLE = {
    "buffer/process/buffer_actor.py",  # how long an environment has been silent, in a message
    "buffer/ledger/ledger_store.py",  # when an entry was written
    "cli/commands/watch.py",
    "gateway/rendering/chat_template.py",  # today's date, for the model
    "gateway/server/routes/session_api.py",  # when a lease was taken
    "gateway/sessions/lifecycle.py",  # when a session was opened, and what a client is told of its deadline
    "gateway/turns/generation.py",  # when a turn began
    "observe/sinks/phases.py",
    "observe/sinks/sinks.py",
    "run/loop/loop.py",  # where a phase is in a trace
    "run/hosts/cluster_check.py",  # how far the clocks of nodes are apart
    "run/hosts/node_report.py",
    "run/processes/process_samples.py",
    "run/processes/served_metrics.py",
    "viewer/export.py",
}
