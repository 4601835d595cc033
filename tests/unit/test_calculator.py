"""The quickstart task: rewards by what the model wrote, and splits that cannot
overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations_with_replacement, islice
from types import SimpleNamespace

import pytest

from invrl.types.tasks import Task
from rollout_fns import calculator


@dataclass
class ScriptedModel:
    """An endpoint whose model says these turns: (text, finish_reason)."""

    turns: list[tuple[str | None, str]]
    asked: list[dict] = field(default_factory=list)
    base_url = api_key = model = "m"

    def openai(self):
        async def create(**request):
            request["messages"] = list(request["messages"])
            self.asked.append(request)
            text, finish_reason = self.turns[len(self.asked) - 1]
            choice = SimpleNamespace(
                message=SimpleNamespace(content=text),
                finish_reason=finish_reason,
            )
            return SimpleNamespace(choices=[choice])

        completions = SimpleNamespace(create=create)
        chat = SimpleNamespace(completions=completions)
        return SimpleNamespace(chat=chat)


TASK = Task(
    id="21*34",
    payload={"a": 21, "b": 34},
    label=714,
)
NUM_ORDERED_PAIRS = len(calculator.OPERANDS) ** 2


def first_tasks(
    split: str,
    *,
    seed: int,
    count: int,
) -> list[Task]:
    tasks = calculator.task_source(split, seed)
    return list(islice(tasks, count))


def ids_of(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def pairs(split: str, *, seed: int) -> set[tuple[int, int]]:
    """Numbers that the split multiplies, the smaller one first."""
    found: set[tuple[int, int]] = set()
    for task in first_tasks(split, seed=seed, count=NUM_ORDERED_PAIRS):
        small, large = sorted(calculator.operands(task))
        found.add((small, large))
    return found


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([("calc(21*34)", "stop"), ("714", "stop")], 1.0),
        ([("calc(21*34)", "stop"), ("21*34 is 714.", "stop")], 1.0),
        ([("calc(21*34)", "stop"), ("714 or 715", "stop")], 0.2),
        ([("calc(21*34)", "stop"), ("714", "length")], 0.2),
        ([("calc(21*34)", "stop"), (None, "stop")], 0.2),
        ([("calc(34*21)", "stop"), ("715", "stop")], 0.1),
        ([("calc(21*35)", "stop"), ("735", "stop")], 0.1),
        ([("calc(21*35)", "stop"), ("714", "stop")], 1.0),
        ([("calc(21*34)", "length")], 0.0),
        ([("The answer is 714", "stop")], 0.0),
        ([("calc(a*b)", "stop")], 0.0),
        ([(None, "stop")], 0.0),
    ],
)
async def test_calculator_reward_follows_from_the_models_replies(
    turns: list[tuple[str | None, str]],
    reward: float,
) -> None:
    model = ScriptedModel(turns)
    result = await calculator.rollout(TASK, model)  # type: ignore[arg-type]
    assert result.reward == reward
    assert len(model.asked) == len(turns)


async def test_second_turn_appends_the_result_of_the_written_call():
    model = ScriptedModel([("calc(21*35)", "stop"), ("735", "stop")])
    await calculator.rollout(TASK, model)  # type: ignore[arg-type]
    first_request, second_request = model.asked
    first = first_request["messages"]
    second = second_request["messages"]
    contents = [message["content"] for message in first]
    assert contents == [
        "You have a tool: write calc(a*b) to get a result. Then give the answer.",
        "What is 12*13?",
        "calc(12*13)",
        "Result: 156",
        "156",
        "What is 21*34?",
    ]
    assert second == [
        *first,
        {"role": "assistant", "content": "calc(21*35)"},
        {"role": "user", "content": "Result: 735"},
    ]


def test_splits_share_no_pair_of_numbers_for_any_seeds() -> None:
    train = pairs("train", seed=1)
    for seed in range(5):
        assert not train & pairs("eval", seed=seed)
    numbers = calculator.OPERANDS
    everything = set(combinations_with_replacement(numbers, 2))
    example = (12, 13)
    held_out = pairs("eval", seed=0)
    assert train | held_out == everything - {example}


def test_eval_split_is_finite_distinct_and_large_enough() -> None:
    tasks = list(calculator.task_source("eval", 0))
    assert len(tasks) >= 200
    assert len(tasks) == len(pairs("eval", seed=0))
    assert {task.split for task in tasks} == {"eval"}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_equal_seeds_give_equal_calculator_tasks(split: str) -> None:
    ids = ids_of(first_tasks(split, seed=3, count=100))
    same_seed = ids_of(first_tasks(split, seed=3, count=100))
    other_seed = ids_of(first_tasks(split, seed=4, count=100))
    assert same_seed == ids
    assert other_seed != ids


def test_train_split_uses_all_pairs_before_repeating() -> None:
    tasks = first_tasks(
        "train",
        seed=0,
        count=3 * NUM_ORDERED_PAIRS,
    )
    ids = ids_of(tasks)
    num_tasks = len(set(ids))
    first_pass = ids[:num_tasks]
    second_pass = ids[num_tasks : 2 * num_tasks]
    assert len(set(first_pass)) == num_tasks
    assert set(second_pass) == set(first_pass)
    assert second_pass != first_pass


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="'test'"):
        next(calculator.task_source("test", 0))


def test_calculator_task_without_integers_is_refused() -> None:
    task = Task(
        id="x",
        payload={"a": "1", "b": 2},
    )
    with pytest.raises(TypeError, match="task x"):
        calculator.operands(task)
