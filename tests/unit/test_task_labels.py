"""Labels of tasks: guessed where another field holds them, missed where the code reads
them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.task_checks import check_held_out_labels, check_labels
from invrl.rollout.config import EvalConfig, RolloutConfig
from invrl.rollout.tasks.task_labels import GUESSED_KEYS, guess_notes, missing_labels
from invrl.rollout.tasks.tasks import held_out_only, load_tasks
from invrl.run.settings.config import Config, Source, resolve
from invrl.user_code.source import reads_attribute

READING = "async def rollout(task, endpoint):\n    return float(task.label == 1)\n"
NOT_READING = (
    "async def rollout(task, endpoint):\n    return float(task.payload['gold'] == 1)\n"
)
IMPORTING = "from scoring_NAME import score\n\nasync def rollout(task, endpoint):\n    return score(task)\n"
SCORING = "def score(task):\n    return float(task.label == 1)\n"


def tasks_in(file: Path, *lines: str, **settings: Any) -> RolloutConfig:
    file.write_text("\n".join(lines))
    return RolloutConfig(task_file=str(file), **settings)


@pytest.mark.parametrize("key", [*GUESSED_KEYS, "Answer"])
def test_the_label_is_guessed_with_a_word(tmp_path: Path, key: str) -> None:
    config = tasks_in(tmp_path / "t.jsonl", f'{{"question": "2+2?", "{key}": 4}}')
    assert next(load_tasks(config, "train", 0)).label == 4
    (note,) = guess_notes(config)
    assert f"Task.label is its field '{key}'" in note
    assert f"--task-label-key {key}" in note
    assert missing_labels(config) == ""


def test_a_label_of_its_own_name_or_of_a_given_one_is_not_guessed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "t.jsonl"
    named = tasks_in(file, '{"label": 1, "answer": 2, "gold": 3}')
    assert next(load_tasks(named, "train", 0)).label == 1
    config = tasks_in(
        file, '{"label": 1, "answer": 2, "gold": 3}', task_label_key="gold"
    )
    assert next(load_tasks(config, "train", 0)).label == 3
    some = tasks_in(file, '{"q": 1, "answer": 2}', '{"q": 2}')
    assert next(load_tasks(some, "train", 0)).label is None
    assert guess_notes(named) == guess_notes(config) == guess_notes(some) == []


def test_the_label_of_held_out_tasks_is_guessed_too(tmp_path: Path) -> None:
    config = tasks_in(tmp_path / "t.jsonl", '{"question": "2+2?", "label": 4}')
    (tmp_path / "h.jsonl").write_text('{"question": "3+3?", "answer": 6}')
    held_out = str(tmp_path / "h.jsonl")
    config = config.model_copy(update={"eval": EvalConfig(task_file=held_out, tasks=1)})
    sets = config.model_copy(
        update={"eval": EvalConfig(sets=(f"easy={held_out}",), tasks=1)}
    )
    alone = held_out_only(RolloutConfig(task_file=held_out))
    for task_config in (config, sets, alone):
        (note,) = guess_notes(task_config)
        assert "h.jsonl" in note
    assert next(load_tasks(config, "eval", 0)).label == 6


def test_missing_and_empty_labels_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    assert (
        missing_labels(
            tasks_in(file, '{"q": "a", "label": "1"}', '{"q": "b", "label": ""}')
        )
        == ""
    )
    assert missing_labels(tasks_in(file, '{"label": 0}', '{"label": false}')) == ""
    missing = missing_labels(tasks_in(file, '{"q": "a", "gold": 1}'))
    assert "so every Task.label is None (it has: gold, q)" in missing
    empty = missing_labels(
        tasks_in(file, '{"q": "a", "label": ""}', '{"q": "b", "label": null}')
    )
    assert "(field 'label') are all empty" in empty


@pytest.fixture
def agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Any:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"labelled_{abs(hash(request.node.name))}"

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source.replace("NAME", name))
        (tmp_path / f"scoring_{name}.py").write_text(SCORING)
        return f"{name}:rollout"

    return write


def configuration(file: str | bool, path: str, **rollout: Any) -> Config:
    return resolve(
        Source(
            name="test",
            tables={
                "rollout": {"task_file": file, "rollout_function_path": path, **rollout}
            },
        )
    )


@pytest.mark.parametrize("source", [READING, IMPORTING])
def test_no_label_is_doubted_where_the_code_reads_one(
    tmp_path: Path, agent: Any, source: str
) -> None:
    tasks_in(tmp_path / "t.jsonl", '{"q": "2+2?", "gold": 4}')
    config = configuration(str(tmp_path / "t.jsonl"), agent(source))
    with pytest.raises(CheckWarning, match=r"reads Task\.label"):
        check_labels(config)
    with pytest.raises(CheckWarning, match=r"reads Task\.label"):
        check_held_out_labels(
            config.model_copy(update={"rollout": held_out_only(config.rollout)})
        )


def test_no_label_is_no_doubt_where_no_code_reads_one(
    tmp_path: Path, agent: Any
) -> None:
    tasks_in(tmp_path / "t.jsonl", '{"q": "2+2?", "gold": 4}')
    config = configuration(str(tmp_path / "t.jsonl"), agent(NOT_READING))
    assert "no task of" in check_labels(config)


def test_a_reward_function_that_reads_labels_counts_too(
    tmp_path: Path, agent: Any
) -> None:
    tasks_in(tmp_path / "t.jsonl", '{"q": "2+2?", "gold": 4}')
    module = agent(
        NOT_READING + "\ndef reward(task, result):\n    return float(task.label == 1)\n"
    )
    path = module.replace(":rollout", ":reward")
    config = configuration(str(tmp_path / "t.jsonl"), module, reward_function_path=path)
    with pytest.raises(CheckWarning, match=r"reads Task\.label"):
        check_labels(config)


def test_a_source_whose_tasks_have_no_label_is_doubted(agent: Any) -> None:
    source = (
        "from invrl.types import Task\n"
        "def tasks(split, seed):\n    yield Task(id='a', payload={'q': 1})\n" + READING
    )
    module = agent(source)
    config = configuration(
        False, module, task_source_path=module.replace(":rollout", ":tasks")
    )
    with pytest.raises(CheckWarning, match="the first 8 tasks of"):
        check_labels(config)


def test_code_of_libraries_is_not_searched() -> None:
    module = ModuleType("made_up")
    exec("def rollout(task, endpoint): ...", vars(module))
    assert reads_attribute(vars(module)["rollout"], "label") == ""
