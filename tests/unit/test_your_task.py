"""The page rollout_fns/your_task/README.md: its code runs, its files are those beside
it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checks_by_name import USER_CODE, run_check
from tiny_model import make_tiny_model

from invrl.algorithms.presets import PRESETS
from invrl.cli.flags import parse_flags
from invrl.cli.presets import preset_names
from invrl.interfaces import RolloutResult
from invrl.rollout.tasks.tasks import load_eval_tasks, load_tasks
from invrl.run.settings.config import Config, resolve
from invrl.types.tasks import Task

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "rollout_fns" / "your_task"
PAGE = (FOLDER / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


class Replies:
    """An endpoint whose model says this, and how that ended; keeps what it was
    asked."""

    base_url = "http://127.0.0.1:9/s/key/v1"
    api_key = "key"
    model = "tiny"

    def __init__(self, content: str | None, finish_reason: str = "stop") -> None:
        message = SimpleNamespace(content=content)
        self._reply = SimpleNamespace(
            choices=[SimpleNamespace(message=message, finish_reason=finish_reason)]
        )
        self.asked: list[dict[str, Any]] = []

    def openai(self) -> Any:
        async def create(**request: Any) -> Any:
            self.asked.append(request)
            return self._reply

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=create))
        )


def function_of(code: str) -> Any:
    module: dict[str, Any] = {}
    exec(compile(code, "my_agent.py", "exec"), module)
    return module["rollout"]


def test_tutorial_shows_the_files_of_its_folder() -> None:
    [agent] = blocks(PAGE, "python")
    [tasks, held_out] = blocks(PAGE, "jsonl")
    [settings] = blocks(PAGE, "toml")
    assert agent == (FOLDER / "my_agent.py").read_text()
    assert tasks == (FOLDER / "tasks.jsonl").read_text()
    assert held_out == (FOLDER / "held_out.jsonl").read_text()
    assert settings == (FOLDER / "my_task.toml").read_text()


@pytest.mark.parametrize(
    ("label", "said", "finish_reason", "reward"),
    [
        ("Paris", "Paris", "stop", 1.0),
        ("Paris", " paris.", "stop", 1.0),
        (8, "8", "stop", 1.0),
        (8, "eight", "stop", 0.0),
        (8, "18", "stop", 0.0),
        (8, "8", "length", 0.0),
        ("Paris", "Paris or Rome", "stop", 0.0),
        ("Paris", "The capital is Paris.", "stop", 0.0),
        ("Paris", "", "stop", 0.0),
        ("Paris", None, "stop", 0.0),
    ],
)
async def test_tutorial_agent_rewards_only_the_label(
    label: str | int, said: str | None, finish_reason: str, reward: float
) -> None:
    rollout = function_of(blocks(PAGE, "python")[0])
    endpoint = Replies(said, finish_reason)
    result = await rollout(
        Task(id="a", payload={"question": "Well?"}, label=label), endpoint
    )
    assert isinstance(result, RolloutResult)
    assert result.reward == reward
    [request] = endpoint.asked
    assert request["model"] == "tiny"
    assert request["messages"][-1] == {"role": "user", "content": "Well?"}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "rollout_fns" / "README.md"], ids=str
)
@pytest.mark.parametrize(
    ("label", "said"),
    [
        (4, "4"),
        ("four", "four"),
    ],
)
async def test_agents_of_other_pages_accept_a_number_as_label(
    page: Path, label: str | int, said: str
) -> None:
    code = next(
        block
        for block in blocks(page.read_text(), "python")
        if "# my_agent.py" in block
    )
    rollout = function_of(code)
    task = Task(id="a", payload={"question": "What is 2+2?"}, label=label)
    assert await rollout(task, Replies(said)) == 1.0
    assert await rollout(task, Replies("1 2 3 4 four")) == 0.0
    assert await rollout(task, Replies(None)) == 0.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The page's command in an empty folder that holds the page's files."""
    [tasks, held_out] = blocks(PAGE, "jsonl")
    files = {
        "my_agent.py": blocks(PAGE, "python")[0],
        "tasks.jsonl": tasks,
        "held_out.jsonl": held_out,
        "my_task.toml": blocks(PAGE, "toml")[0],
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_agent", raising=False)
    [line] = [
        line
        for block in blocks(PAGE, "bash")
        for line in block.splitlines()
        if " train " in line
    ]
    model = make_tiny_model(tmp_path / "model")
    words = line.replace("$MODEL", str(model)).split()
    assert words[:2] == ["invrl", "train"]
    return resolve(*parse_flags(words[2:]))


def test_tutorial_command_passes_every_check(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    for name in ("model folder", "chat template", "trainable model", *USER_CODE):
        run_check(name, config)
    train = load_tasks(config.rollout, "train", config.run.seed)
    tasks = {task.id: task for task in (next(train) for _ in range(20))}
    assert len(tasks) == 20
    held_out = {task.id for task in load_eval_tasks(config.rollout, config.run.seed)}
    assert len(held_out) == 10
    assert not held_out & set(tasks)
    assert {type(task.label) for task in tasks.values()} == {str, int}
    labels = [str(task.label) for task in tasks.values()]
    assert len(set(labels)) == 20, "no one answer is right twice"


def test_tutorial_names_existing_settings_and_files(config: Config) -> None:
    written = tomllib.loads(blocks(PAGE, "toml")[0])
    default = resolve()
    assert {
        table: {key: config.settings()[table][key] for key in keys}
        for table, keys in written.items()
    } == written
    assert config.train.lr > default.train.lr
    for name in (*preset_names(), *PRESETS):
        assert f"`{name}`" in PAGE or f"--config {name}" in PAGE, name
    for path in re.findall(r"`(invrl/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for line in (FOLDER / "tasks.jsonl").read_text().splitlines():
        assert {"id", "question", "label"} == set(json.loads(line))
