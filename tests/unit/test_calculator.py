"""The quickstart task: rewards by what the model wrote, and splits that cannot
overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice, product
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
            message = SimpleNamespace(content=text)
            return SimpleNamespace(
                choices=[SimpleNamespace(message=message, finish_reason=finish_reason)]
            )

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(create=create))
        )


TASK = Task(id="21*34", payload={"a": 21, "b": 34}, label=714)


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
async def test_calculator_reward_follows_from_the_models_replies(turns, reward):
    model = ScriptedModel(turns)
    result = await calculator.rollout(TASK, model)  # type: ignore[arg-type]
    assert result.reward == reward
    assert len(model.asked) == len(turns)


async def test_second_turn_appends_the_result_of_the_written_call():
    model = ScriptedModel([("calc(21*35)", "stop"), ("735", "stop")])
    await calculator.rollout(TASK, model)  # type: ignore[arg-type]
    first, second = (request["messages"] for request in model.asked)
    assert [m["content"] for m in first] == [
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


def pairs(tasks):
    return {tuple(sorted(calculator.operands(task))) for task in tasks}


ALL_ORDERED = len(calculator.OPERANDS) ** 2


def test_splits_share_no_pair_of_numbers_for_any_seeds():
    train = pairs(islice(calculator.task_source("train", 1), ALL_ORDERED))
    for seed in range(5):
        assert not train & pairs(calculator.task_source("eval", seed))
    everything = {
        tuple(sorted(pair)) for pair in product(calculator.OPERANDS, repeat=2)
    }
    assert train | pairs(calculator.task_source("eval", 0)) == everything - {(12, 13)}


def test_eval_split_is_finite_distinct_and_large_enough():
    tasks = list(calculator.task_source("eval", 0))
    assert len(tasks) == len(pairs(tasks)) >= 200
    assert {task.split for task in tasks} == {"eval"}


def test_equal_seeds_give_equal_calculator_tasks():
    def ids(split, seed, n=100):
        return [task.id for task in islice(calculator.task_source(split, seed), n)]

    for split in ("train", "eval"):
        assert ids(split, 3) == ids(split, 3) != ids(split, 4)


def test_train_split_uses_all_pairs_before_repeating():
    ids = [
        task.id for task in islice(calculator.task_source("train", 0), 3 * ALL_ORDERED)
    ]
    one_pass = len(set(ids))
    assert len(set(ids[:one_pass])) == one_pass
    assert set(ids[one_pass : 2 * one_pass]) == set(ids[:one_pass])
    assert ids[one_pass : 2 * one_pass] != ids[:one_pass]


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'test'"):
        next(calculator.task_source("test", 0))


def test_calculator_task_without_integers_is_refused():
    with pytest.raises(TypeError, match="task x"):
        calculator.operands(Task(id="x", payload={"a": "1", "b": 2}))
