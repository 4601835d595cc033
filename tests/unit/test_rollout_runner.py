"""Whatever user code does, `Runner.run` returns one typed outcome per session, in
time."""

from __future__ import annotations

import asyncio
import sys
import threading

import httpx
import numpy as np
import openai
import pytest

from invrl.buffer.failures import shown_detail
from invrl.interfaces import RolloutResult
from invrl.rollout.workers.runner import Failure, Runner, Scored
from invrl.types.reasons import FailureReason
from invrl.types.tasks import Task

TASK = Task(id="t", payload={"q": "?"}, label="4")
OURS = "http://127.0.0.1:8000/s/key/v1"
CHILDS = OURS.rpartition("/s/")[0] + "/s/isk-child/v1"


class Address:
    base_url = OURS
    api_key = "key"
    model = "m"

    def openai(self):
        raise AssertionError("not used here")


async def run_one(function, reward_function=None, timeout_s=60.0):
    runner = Runner(function, reward_function, timeout_s=timeout_s)
    (outcome,) = await runner.run(TASK, [Address()])
    return outcome


def returning(value):
    async def rollout(task, endpoint):
        return value

    return rollout


def raising(error):
    async def rollout(task, endpoint):
        raise error

    return rollout


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (np.int64(3), 3.0),
        (-2.0, -2.0),
        (RolloutResult(reward=0.5, components={"format": 1}), 0.5),
    ],
)
async def test_usable_rewards_are_accepted(returned, reward):
    outcome = await run_one(returning(returned))
    assert isinstance(outcome, Scored)
    assert outcome.reward == reward
    assert type(outcome.reward) is float


async def test_reward_components_become_floats():
    outcome = await run_one(
        returning(RolloutResult(reward=1.0, components={"format": True}))
    )
    assert outcome == Scored(reward=1.0, components={"format": 1.0})


@pytest.mark.parametrize(
    ("returned", "reason", "seen"),
    [
        (None, FailureReason.BAD_RETURN, "NoneType"),
        ("0.5", FailureReason.BAD_RETURN, "str"),
        ([1.0], FailureReason.BAD_RETURN, "list"),
        (1j, FailureReason.BAD_RETURN, "complex"),
        (RolloutResult(components=[("a", 1.0)]), FailureReason.BAD_RETURN, "list"),  # type: ignore[arg-type]
        (float("nan"), FailureReason.BAD_REWARD, "nan"),
        (float("inf"), FailureReason.BAD_REWARD, "inf"),
        (np.float32("nan"), FailureReason.BAD_REWARD, "nan"),
        (10**400, FailureReason.BAD_REWARD, "inf"),
        (1e30, FailureReason.BAD_REWARD, "1e+30"),
        (RolloutResult(), FailureReason.BAD_REWARD, "None"),
        (RolloutResult(reward="1"), FailureReason.BAD_REWARD, "str"),  # type: ignore[arg-type]
        (
            RolloutResult(reward=1.0, components={"x": float("nan")}),
            FailureReason.BAD_REWARD,
            "'x'",
        ),
    ],
)
async def test_unusable_returns_are_named(returned, reason, seen):
    outcome = await run_one(returning(returned))
    assert isinstance(outcome, Failure)
    assert outcome.reason is reason
    assert seen in outcome.detail


async def test_an_exception_keeps_its_traceback():
    outcome = await run_one(raising(KeyError("no such field")))
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.EXCEPTION
    assert "no such field" in outcome.detail
    assert "test_rollout_runner.py" in outcome.detail


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(1),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
)
async def test_base_exceptions_of_user_code_fail_only_the_rollout(error):
    outcome = await run_one(raising(error))
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.EXCEPTION
    assert type(error).__name__ in outcome.detail


async def test_sys_exit_in_a_sync_function_fails_only_the_rollout():
    outcome = await run_one(lambda task, endpoint: sys.exit(3))
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.EXCEPTION


async def test_hung_rollout_ends_at_its_deadline_and_names_its_line():
    async def rollout(task, endpoint):
        await asyncio.Event().wait()

    outcome = await run_one(rollout, timeout_s=0.1)
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.TIMEOUT
    assert "Event().wait()" in outcome.detail


async def test_rollout_function_that_swallows_its_cancellation_is_left_behind():
    released = asyncio.Event()

    async def rollout(task, endpoint):
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    outcome = await run_one(rollout, timeout_s=0.1)
    released.set()
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.TIMEOUT
    assert "ignores its cancellation" in outcome.detail


async def test_sync_rollout_function_runs_in_its_own_thread():
    together = threading.Barrier(40)

    def rollout(task, endpoint):
        together.wait(60)  # breaks unless all forty run at once
        return float(threading.current_thread() is not threading.main_thread())

    runner = Runner(rollout, None, timeout_s=120.0)
    outcomes = await asyncio.gather(*(runner.run(TASK, [Address()]) for _ in range(40)))
    assert [outcome for (outcome,) in outcomes] == [
        Scored(reward=1.0, components={})
    ] * 40
    assert runner.stuck_threads == 0


async def test_hung_sync_function_is_left_behind_and_counted():
    release = threading.Event()

    def rollout(task, endpoint):
        release.wait()
        return 1.0

    runner = Runner(rollout, None, timeout_s=0.5)
    (outcome,) = await runner.run(TASK, [Address()])
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.TIMEOUT
    assert "release.wait()" in outcome.detail
    assert runner.stuck_threads == 1
    release.set()
    async with asyncio.timeout(60):
        while runner.stuck_threads:
            await asyncio.sleep(0.01)


async def test_a_sync_function_may_return_an_awaitable():
    outcome = await run_one(lambda task, endpoint: returning(0.5)(task, endpoint))
    assert outcome == Scored(reward=0.5, components={})


async def test_object_with_an_async_call_method_is_a_rollout_function():
    class Agent:
        async def __call__(self, task, endpoint):
            return 0.75

    assert await run_one(Agent()) == Scored(reward=0.75, components={})


# ----------------------------------------------------------------- reward functions


async def test_reward_function_judges_the_returned_value():
    async def judge(task, result):
        return 1.0 if result.output == task.label else 0.0

    assert await run_one(returning(RolloutResult(output="4")), judge) == Scored(
        reward=1.0, components={}
    )
    outcome = await run_one(returning(0.5), lambda task, result: result.reward * 2)
    assert outcome == Scored(reward=1.0, components={})


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda task, result: None, FailureReason.BAD_REWARD),
        (lambda task, result: float("nan"), FailureReason.BAD_REWARD),
        (lambda task, result: "good", FailureReason.BAD_REWARD),
        (lambda task, result: 1 / 0, FailureReason.EXCEPTION),
        (lambda task, result: threading.Event().wait(), FailureReason.TIMEOUT),
    ],
)
async def test_a_bad_reward_function_fails_the_rollout(judge, reason):
    timeout_s = 0.2 if reason is FailureReason.TIMEOUT else 60.0
    outcome = await run_one(
        returning(RolloutResult(output="4")), judge, timeout_s=timeout_s
    )
    assert isinstance(outcome, Failure)
    assert outcome.reason is reason


# ----------------------------------------------------------------- groups


def group_returning(value):
    async def rollout(task, endpoints):
        return value

    rollout.group = True  # type: ignore[attr-defined]
    return rollout


async def run_group(function, reward_function=None, timeout_s=60.0):
    return await Runner(function, reward_function, timeout_s=timeout_s).run(
        TASK, [Address(), Address(), Address()]
    )


async def test_members_of_a_group_fail_individually():
    first, second, third = await run_group(
        group_returning([1.0, float("nan"), RolloutResult(reward=0.5)])
    )
    assert first == Scored(reward=1.0, components={})
    assert isinstance(second, Failure)
    assert second.reason is FailureReason.BAD_REWARD
    assert third == Scored(reward=0.5, components={})


async def test_a_reward_function_that_exits_on_one_member_fails_that_member():
    def judge(task, result):
        return sys.exit(1) if result.output == "b" else 1.0

    outcomes = await run_group(
        group_returning([RolloutResult(output=name) for name in "abc"]), judge
    )
    assert [type(outcome) for outcome in outcomes] == [Scored, Failure, Scored]


@pytest.mark.parametrize("returned", [[1.0, 2.0], 1.0, {"a": 1.0}, "abc"])
async def test_a_group_that_returns_the_wrong_shape_fails_whole(returned):
    outcomes = await run_group(group_returning(returned))
    assert {o.reason for o in outcomes if isinstance(o, Failure)} == {
        FailureReason.BAD_RETURN
    }
    assert len(outcomes) == 3


async def test_a_group_may_return_an_array():
    outcomes = await run_group(group_returning(np.array([0.0, 0.5, 1.0])))
    assert [o.reward for o in outcomes if isinstance(o, Scored)] == [0.0, 0.5, 1.0]


# ----------------------------------------------------------------- engine or user?


def status_error(url, status):
    request = httpx.Request("POST", url)
    return openai.APIStatusError(
        "x", response=httpx.Response(status, request=request), body=None
    )


def stream_error(url, kind):
    """As a stream raises it that has begun."""
    fields = {"type": kind, "code": "disk_full", "message": "x"}
    return openai.APIError("x", httpx.Request("POST", url), body=fields)


def anthropic_stream_error(url, kind):
    error = status_error(url, 200)
    error.body = {"type": "error", "error": {"type": kind, "message": "x"}}
    return error


def wrapped(error):
    outer = RuntimeError("the agent framework gave up")
    outer.__cause__ = ExceptionGroup("in parallel", [error])
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (status_error(f"{OURS}/chat/completions", 503), FailureReason.ENGINE),
        (wrapped(status_error(f"{OURS}/chat/completions", 500)), FailureReason.ENGINE),
        (
            httpx.ConnectError("refused", request=httpx.Request("POST", OURS)),
            FailureReason.ENGINE,
        ),
        (status_error(f"{CHILDS}/chat/completions", 503), FailureReason.ENGINE),
        (
            httpx.ReadTimeout("late", request=httpx.Request("POST", OURS)),
            FailureReason.TIMEOUT,
        ),
        (stream_error(OURS, "server_error"), FailureReason.ENGINE),
        (anthropic_stream_error(OURS, "overloaded_error"), FailureReason.ENGINE),
        (stream_error(OURS, "invalid_request_error"), FailureReason.EXCEPTION),
        (stream_error("http://judge.example", "server_error"), FailureReason.EXCEPTION),
        (status_error(f"{OURS}/chat/completions", 400), FailureReason.EXCEPTION),
        (status_error("http://judge.example/v1/chat", 503), FailureReason.EXCEPTION),
        (httpx.ConnectError("no request known"), FailureReason.EXCEPTION),
    ],
)
async def test_errors_of_other_endpoints_are_not_engine_failures(error, reason):
    outcome = await run_one(raising(error))
    assert isinstance(outcome, Failure)
    assert outcome.reason is reason


async def refuses_a_second_loop(task, endpoint):
    return asyncio.run(asyncio.sleep(0))


async def starts_a_loop(task, endpoint):
    return asyncio.new_event_loop().run_until_complete(asyncio.sleep(0))


async def awaits_a_value(task, endpoint):
    return await returning_a_value()


def returning_a_value():
    return 1.0


async def forgets_to_await(task, endpoint):
    return asyncio.sleep(0).choices[0]  # type: ignore[attr-defined]


async def forgets_it_in_a_task(task, endpoint):
    async with asyncio.TaskGroup() as group:
        group.create_task(forgets_to_await(task, endpoint))


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (
            refuses_a_second_loop,
            "asyncio.run() does not work inside an async function: await the coroutine",
        ),
        (starts_a_loop, "cannot start another: await the coroutine"),
        (awaits_a_value, "the client may be a synchronous one"),
        (forgets_to_await, "an await is missing"),
        (forgets_it_in_a_task, "an await is missing"),
    ],
)
async def test_a_function_at_odds_with_its_client_is_told_what_to_do(function, advice):
    outcome = await run_one(function)
    assert isinstance(outcome, Failure)
    *_, sentence, place = outcome.detail.splitlines()
    assert advice in sentence
    assert place.startswith("at ")
    assert advice in shown_detail(outcome.detail), "the console shows it"
