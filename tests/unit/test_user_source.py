"""What the source of user code shows before it runs, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.code_checks import check_reward_code, check_rollout_code
from invrl.run.settings.config import Config, Source, resolve

Agent = Callable[[str], Config]
EXAMPLES = [
    "calculator:rollout",
    "json_addition:rollout",
    "math_single_turn:rollout",
    "your_task.my_agent:rollout",
]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> Config:
        (tmp_path / "agent_of_sources.py").write_text(source)
        paths = {"rollout_function_path": "agent_of_sources:rollout"}
        if "def reward" in source:
            paths["reward_function_path"] = "agent_of_sources:reward"
        return resolve(Source(name="test", tables={"rollout": paths}))

    return write


@pytest.mark.parametrize(
    "source",
    [
        "async def rollout(task, endpoint):\n    return 1.0\n",
        "def rollout(task, endpoint):\n    return 1.0\n",
        "async def run(task, endpoints):\n    return [1.0]\nrun.group = True\nrollout = run\n",
        "class Agent:\n    async def __call__(self, task, endpoint):\n        return 1\nrollout = Agent()\n",
    ],
)
def test_a_function_that_never_asks_the_model_is_doubted(
    agent: Agent, source: str
) -> None:
    with pytest.raises(CheckWarning, match="never uses its endpoint"):
        check_rollout_code(agent(source))


BLOCKING = [
    "async def rollout(task, endpoint):\n    client = openai.OpenAI(base_url=endpoint.base_url)\n",
    "from openai import OpenAI\ndef ask(e):\n    return OpenAI(base_url=e.base_url)\n"
    "async def rollout(task, endpoint):\n    return ask(endpoint)\n",
    "import time\nasync def rollout(task, endpoint):\n    if endpoint:\n        time.sleep(1)\n",
    "async def ask(e):\n    return requests.post(e.base_url)\n"
    "async def rollout(task, endpoint):\n    return await ask(endpoint)\n",
]


@pytest.mark.parametrize("source", BLOCKING)
def test_a_synchronous_client_in_an_async_function_is_doubted(
    agent: Agent, source: str
) -> None:
    with pytest.raises(
        CheckWarning, match=r"\(agent_of_sources\.py:\d+\) is synchronous"
    ):
        check_rollout_code(agent(source))


def test_another_event_loop_in_an_async_function_is_doubted(agent: Agent) -> None:
    source = "import asyncio\nasync def rollout(task, endpoint):\n    return asyncio.run(endpoint.ask())\n"
    with pytest.raises(
        CheckWarning,
        match=r"asyncio\.run \(agent_of_sources\.py:3\) is called from an async",
    ):
        check_rollout_code(agent(source))


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\ndef rollout(task, endpoint):\n    return asyncio.run(endpoint.ask())\n",
        "import time\ndef rollout(task, endpoint):\n    time.sleep(endpoint.model)\n",
        "import asyncio, time\nasync def rollout(task, endpoint):\n"
        "    return await asyncio.to_thread(time.sleep, endpoint.model)\n",
        "import asyncio, time\nasync def rollout(task, endpoint):\n    def wait():\n        time.sleep(1)\n"
        "    return await asyncio.to_thread(wait, endpoint)\n",
        "async def rollout(task, endpoint):\n    client = endpoint.openai()\n    return client\n",
    ],
)
def test_what_waits_in_a_thread_is_no_doubt(agent: Agent, source: str) -> None:
    assert check_rollout_code(agent(source)) == "in order"


def test_a_reward_function_that_blocks_is_doubted_too(agent: Agent) -> None:
    source = (
        "import time\nasync def rollout(task, endpoint):\n    return endpoint\n"
        "async def reward(task, result):\n    time.sleep(1)\n"
    )
    with pytest.raises(CheckWarning) as caught:
        check_reward_code(agent(source))
    assert caught.value.field == "rollout.reward_function_path"


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_examples_that_are_shipped_are_in_order(path: str) -> None:
    tables = {"rollout": {"rollout_function_path": f"rollout_fns.{path}"}}
    assert check_rollout_code(resolve(Source(name="test", tables=tables))) == "in order"
