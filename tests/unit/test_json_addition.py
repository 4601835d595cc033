"""JSON addition: what counts as the answer, and splits that cannot overlap."""

from __future__ import annotations

from itertools import combinations_with_replacement, islice
from types import SimpleNamespace

import pytest

from invrl.types.tasks import Task
from rollout_fns import json_addition

TASK = Task(id="9+18", payload={"a": 9, "b": 18}, label=27)


class ScriptedModel:
    """An endpoint whose model says one thing."""

    base_url = api_key = model = "m"

    def __init__(self, text: str | None, finish_reason: str = "stop") -> None:
        self.text = text
        self.finish_reason = finish_reason
        self.asked = []

    def openai(self):
        async def create(**request):
            self.asked.append(request)
            message = SimpleNamespace(content=self.text)
            choice = SimpleNamespace(message=message, finish_reason=self.finish_reason)
            return SimpleNamespace(choices=[choice])

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=create))
        )


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ('{"answer": 27}', "stop", 1.0),
        (' {"answer":27}\n', "stop", 1.0),
        ('{"answer": 27}', "length", 0.0),
        ('{"answer": 28}', "stop", 0.0),
        ('{"answer": "27"}', "stop", 0.0),
        ('{"answer": 27.0}', "stop", 0.0),
        ('{"answer": 27} or so', "stop", 0.0),
        ('{"answer": 27, "sure": false}', "stop", 0.0),
        ('{"sum": 27}', "stop", 0.0),
        ("27", "stop", 0.0),
        ("[" * 100_000, "stop", 0.0),
        ("", "stop", 0.0),
        (None, "stop", 0.0),
    ],
)
async def test_json_addition_reward_follows_from_the_reply(
    text: str | None, finish_reason: str, reward: float
) -> None:
    model = ScriptedModel(text, finish_reason)
    result = await json_addition.rollout(TASK, model)  # type: ignore[arg-type]
    assert result.reward == reward
    assert result.output == (text or "")


async def test_json_true_does_not_count_as_1() -> None:
    task = Task(
        id="0+1",
        payload={"a": 0, "b": 1},
        label=1,
    )
    model = ScriptedModel('{"answer": true}')
    result = await json_addition.rollout(task, model)  # type: ignore[arg-type]
    assert result.reward == 0.0


async def test_worked_example_is_in_no_split() -> None:
    model = ScriptedModel("")
    await json_addition.rollout(TASK, model)  # type: ignore[arg-type]
    [request] = model.asked
    contents = [message["content"] for message in request["messages"]]
    _, question, worked_answer, asked = contents
    assert question == "12 + 13"
    assert worked_answer == '{"answer": 25}'
    assert asked == "9 + 18"


def first_tasks(
    split: str,
    *,
    seed: int,
    count: int,
) -> list[Task]:
    tasks = json_addition.task_source(split, seed)
    return list(islice(tasks, count))


def ids_of(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def pairs(split: str, seed: int) -> set[tuple[int, int]]:
    """Numbers that the split adds, the smaller one first."""
    found: set[tuple[int, int]] = set()
    for task in first_tasks(split, seed=seed, count=2000):
        small, large = sorted((task.payload["a"], task.payload["b"]))  # type: ignore[type-var]
        found.add((small, large))  # type: ignore[arg-type]
    return found


def test_splits_share_no_pair_and_contain_all_but_the_example() -> None:
    train = pairs("train", seed=1)
    for seed in range(5):
        assert not train & pairs("eval", seed)
    numbers = range(1, 21)
    everything = set(combinations_with_replacement(numbers, 2))
    example = (12, 13)
    held_out = pairs("eval", seed=0)
    assert train | held_out == everything - {example}


def test_eval_split_is_finite_and_distinct() -> None:
    tasks = list(json_addition.task_source("eval", 0))
    assert len(tasks) == 69
    assert len(set(ids_of(tasks))) == 69


def test_train_split_repeats_its_tasks_without_end() -> None:
    num_held_out = 69
    num_tasks = 20 * 20 - 2 - num_held_out
    tasks = first_tasks("train", seed=0, count=2 * num_tasks)
    first_pass = ids_of(tasks[:num_tasks])
    second_pass = ids_of(tasks[num_tasks:])
    assert len(set(first_pass)) == num_tasks
    assert set(first_pass) == set(second_pass)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_label_of_a_task_is_its_sum(split: str) -> None:
    for task in first_tasks(split, seed=0, count=700):
        assert task.label == task.payload["a"] + task.payload["b"]  # type: ignore[operator]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_order_of_tasks_depends_only_on_the_seed(split: str) -> None:
    ids = ids_of(first_tasks(split, seed=3, count=50))
    same_seed = ids_of(first_tasks(split, seed=3, count=50))
    other_seed = ids_of(first_tasks(split, seed=4, count=50))
    assert same_seed == ids
    assert other_seed != ids


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'test'"):
        next(json_addition.task_source("test", 0))
