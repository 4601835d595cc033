"""A failure of user code names its line, and a value that is no reward is named with
its fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from invrl.rollout.workers.runner import Failure, Runner
from invrl.types.reasons import FailureReason
from invrl.types.tasks import Task
from invrl.user_code.plugins import load_rollout_function

AGENT = """\
import asyncio
import json
import functools
from invrl.types.metrics import resolve

async def misspelt(task, endpoint):
    await asyncio.sleep(0)
    return float(task.payload["awnser"] == "4")


async def parses(task, endpoint):
    return helper("no json")


def helper(text):
    return json.loads(text)


def in_thread(task, endpoint):
    return 1 / 0


async def grouped(task, endpoint):
    async with asyncio.TaskGroup() as group:
        group.create_task(misspelt(task, endpoint))


async def texts(task, endpoint):
    answer = "yes"
    return answer


async def falls_through(task, endpoint):
    if task.label == "never":
        return 1.0


async def two_ways(task, endpoint):
    if task.label == "4":
        return None
    return 1.0


def score(task, result):
    return float("nan")


async def fine(task, endpoint):
    return 1.0


@functools.wraps(texts)
async def wrapped(task, endpoint):
    return await texts(task, endpoint)


class Agent:
    async def __call__(self, task, endpoint):
        return {"reward": 1.0}


agent = Agent()


async def stops(task, endpoint):
    next(iter([]))


def stops_in_thread(task, endpoint):
    return next(iter([]))


async def misuses_the_package(task, endpoint):
    resolve("no metrics")
"""


class Address:
    base_url = "http://127.0.0.1:8000/s/secret-key/v1"
    api_key = "secret-key"
    model = "m"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The function of that name in my_agent.py, in the current folder."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: load_rollout_function(f"my_agent:{name}")


async def failure_of(function: Any, reward_function: Any = None) -> Failure:
    runner = Runner(function, reward_function, timeout_s=600.0)
    (outcome,) = await runner.run(Task(id="t", payload={}, label="4"), [Address()])  # type: ignore[list-item]
    assert isinstance(outcome, Failure), outcome
    return outcome


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "misspelt",
            'at my_agent.py:8, in misspelt: return float(task.payload["awnser"] == "4")',
        ),
        ("parses", "at my_agent.py:16, in helper: return json.loads(text)"),
        ("in_thread", "at my_agent.py:20, in in_thread: return 1 / 0"),
        (
            "grouped",
            'at my_agent.py:8, in misspelt: return float(task.payload["awnser"] == "4")',
        ),
        ("stops", "at my_agent.py:66, in stops: next(iter([]))"),
        (
            "stops_in_thread",
            "at my_agent.py:70, in stops_in_thread: return next(iter([]))",
        ),
        (
            "misuses_the_package",
            'at my_agent.py:74, in misuses_the_package: resolve("no metrics")',
        ),
    ],
)
async def test_an_exception_names_the_innermost_line_of_user_code(
    in_folder: Callable[[str], Any], name: str, line: str
) -> None:
    failure = await failure_of(in_folder(name))
    assert failure.reason is FailureReason.EXCEPTION
    assert failure.detail.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("name", "value", "fix", "line"),
    [
        (
            "texts",
            "'yes' (type str)",
            "return a float",
            "at my_agent.py:30, in texts: return answer",
        ),
        (
            "falls_through",
            "None (type NoneType)",
            "one path ends without it",
            "at my_agent.py:35, in falls_through: return 1.0",
        ),
        (
            "two_ways",
            "None (type NoneType)",
            "return a float on every path",
            "at my_agent.py:38, in two_ways: async def two_ways(task, endpoint):",
        ),
        (
            "wrapped",
            "'yes' (type str)",
            "return a float",
            "at my_agent.py:30, in texts: return answer",
        ),
        (
            "agent",
            "{'reward': 1.0} (type dict)",
            "RolloutResult",
            'at my_agent.py:59, in __call__: return {"reward": 1.0}',
        ),
    ],
)
async def test_reward_that_is_not_a_number_is_named_with_its_line_and_fix(
    in_folder: Callable[[str], Any], name: str, value: str, fix: str, line: str
) -> None:
    failure = await failure_of(in_folder(name))
    assert failure.reason is FailureReason.BAD_RETURN
    message, place = failure.detail.splitlines()
    assert message.startswith(
        f"the rollout function returned {value}, not a number. Fix: "
    )
    assert fix in message
    assert place == line


async def test_error_in_the_reward_function_names_the_reward_function(
    in_folder: Callable[[str], Any],
) -> None:
    function = in_folder("fine")
    failure = await failure_of(function, sys.modules["my_agent"].score)
    assert failure.reason is FailureReason.BAD_REWARD
    message, place = failure.detail.splitlines()
    assert message.startswith(
        "the reward function's reward is nan, not a finite number. Fix: return a finite"
    )
    assert place == 'at my_agent.py:45, in score: return float("nan")'


async def test_code_without_a_source_has_no_line() -> None:
    module = ModuleType("made")
    exec("async def rollout(task, endpoint):\n    return 'x'", vars(module))
    failure = await failure_of(vars(module)["rollout"])
    assert "returned 'x' (type str)" in failure.detail
    assert "\nat " not in failure.detail


async def test_long_value_is_truncated_and_an_unprintable_value_is_named() -> None:
    class Unshowable:
        def __repr__(self) -> str:
            raise RuntimeError

    async def long(task: Task, endpoint: Any) -> object:
        return "x" * 5000

    async def hidden(task: Task, endpoint: Any) -> object:
        return Unshowable()

    async def keyed(task: Task, endpoint: Any) -> object:
        return json.dumps({"url": endpoint.base_url})

    assert "xxx... (type str)" in (await failure_of(long)).detail
    assert (
        "something that cannot be shown (type Unshowable)"
        in (await failure_of(hidden)).detail
    )
    assert "secret-key" not in (await failure_of(keyed)).detail
