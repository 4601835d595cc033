"""The agents that the documentation shows run as they stand: against a gateway process
with the real router, in front of an engine whose replies this file writes. Every
recorded token is then compared with the wire."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tiny_model import make_tiny_model
from truth_stack import MODEL_NAME, Stack, scripted_stack

from invrl.interfaces import RolloutResult
from invrl.rollout.workers.endpoint import ConnectionPool, SessionEndpoint
from invrl.types.sessions import Session
from invrl.types.tasks import Task

ROOT = Path(__file__).parents[2]
YOUR_AGENT = ROOT / "docs" / "your-agent.md"
PAGES = [ROOT / "README.md", ROOT / "rollout_fns" / "README.md", YOUR_AGENT]


def agents_of(page: Path) -> list[str]:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [block for block in blocks if block.startswith("# my_agent.py")]


AGENTS = [(page, index) for page in PAGES for index in range(len(agents_of(page)))]


def reply(prompt: str) -> str:
    """Calls the calculator once where the prompt offers it, and answers with its
    result."""
    question = prompt.rpartition("<|im_start|>user")[2]
    result = re.search(r"<\|im_start\|>tool\n(\d+)", question)
    if result:
        return result[1]
    if "calculator" in prompt:
        call = {"name": "calculator", "arguments": {"a": 12, "b": 13}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return "156"


@pytest.fixture(scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("docs-agents")
    model = make_tiny_model(folder / "model", max_positions=200_000)
    async with scripted_stack(folder, model, reply) as running:
        yield running


@pytest.mark.parametrize(
    ("page", "index"), AGENTS, ids=[f"{page.name}-{index}" for page, index in AGENTS]
)
async def test_an_agent_of_the_documentation_runs_and_its_tokens_are_recorded(
    stack: Stack, page: Path, index: int
) -> None:
    module: dict[str, object] = {}
    exec(compile(agents_of(page)[index], page.name, "exec"), module)
    rollout = module["rollout"]
    assert callable(rollout)
    opened = await stack.open()
    session = SimpleNamespace(
        id=opened["id"], base_url=opened["base_url"], key=opened["key"]
    )
    endpoint = SessionEndpoint(
        cast(Session, session), model=MODEL_NAME, timeout_s=60.0, pool=ConnectionPool()
    )
    task = Task(id="t", payload={"question": "What is 12*13?"}, label=156)
    result = await rollout(task, endpoint)
    reward = result.reward if isinstance(result, RolloutResult) else result
    assert reward == 1.0
    await stack.finish(opened, reward)
    verdict = await stack.verdict(session_ids=[opened["id"]])
    assert verdict.mismatches == []
    uses_tools = "TOOLS" in module
    assert verdict.turns == (2 if uses_tools else 1)
    if uses_tools:
        assert verdict.continued == 1, (
            "the second turn continues the first one's exact tokens"
        )


def test_documentation_page_shows_all_agents() -> None:
    """One turn, a loop with tools, and a planner with a sub-agent."""
    assert len(agents_of(YOUR_AGENT)) == 3
