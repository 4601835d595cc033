"""JSON addition: what counts as the answer, and splits that cannot overlap."""

from __future__ import annotations

import json
from itertools import islice, product
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
    result = await json_addition.rollout(TASK, ScriptedModel(text, finish_reason))  # type: ignore[arg-type]
    assert result.reward == reward
    assert result.output == (text or "")


async def test_json_true_does_not_count_as_1() -> None:
    task = Task(id="x", payload={"a": 0, "b": 1}, label=1)
    result = await json_addition.rollout(task, ScriptedModel('{"answer": true}'))  # type: ignore[arg-type]
    assert result.reward == 0.0


async def test_worked_example_is_in_no_split() -> None:
    model = ScriptedModel("")
    await json_addition.rollout(TASK, model)  # type: ignore[arg-type]
    (request,) = model.asked
    assert [m["content"] for m in request["messages"][1:]] == [
        "12 + 13",
        '{"answer": 25}',
        "9 + 18",
    ]
    assert json.loads(request["messages"][2]["content"])["answer"] == 12 + 13


def pairs(split: str, seed: int, n: int = 2000) -> set[tuple[int, int]]:
    tasks = islice(json_addition.task_source(split, seed), n)
    return {tuple(sorted((task.payload["a"], task.payload["b"]))) for task in tasks}  # type: ignore[misc]


def test_splits_share_no_pair_and_contain_all_but_the_example() -> None:
    train = pairs("train", 1)
    for seed in range(5):
        assert not train & pairs("eval", seed)
    everything = {tuple(sorted(pair)) for pair in product(range(1, 21), repeat=2)}
    assert train | pairs("eval", 0) == everything - {(12, 13)}


def test_eval_split_is_finite_and_distinct_and_train_split_is_endless() -> None:
    held = list(json_addition.task_source("eval", 0))
    assert len(held) == len({task.id for task in held}) == 69
    once = 20 * 20 - 2 - len(held)
    train = list(islice(json_addition.task_source("train", 0), 2 * once))
    assert {task.id for task in train[:once]} == {task.id for task in train[once:]}
    assert len({task.id for task in train}) == once
    for task in held + train:
        assert task.label == task.payload["a"] + task.payload["b"]  # type: ignore[operator]


def test_order_of_tasks_depends_only_on_the_seed() -> None:
    for split in ("train", "eval"):
        a, b, c = (
            [t.id for t in islice(json_addition.task_source(split, s), 50)]
            for s in (3, 3, 4)
        )
        assert a == b != c
    with pytest.raises(ValueError, match="'test'"):
        next(json_addition.task_source("test", 0))
