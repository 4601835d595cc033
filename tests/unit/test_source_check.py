"""A task source that is told outcomes: its mistakes are found before any process
starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from invrl.errors import PluginError
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks.tasks import check_tasks, load_tasks
from invrl.types.groups import GroupOutcome
from invrl.types.task_state import TaskStateError, stored_state
from invrl.types.tasks import Task


class Good:
    """Draws tasks; more of those that were solved."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.weights = [1.0] * 20

    def __iter__(self) -> Good:
        return self

    def __next__(self) -> Task:
        [number] = self.random.choices(range(20), self.weights)
        return Task(id=f"q{number}", payload={"n": number})

    def record(self, outcome: GroupOutcome) -> None:
        self.weights[int(outcome.task_id[1:])] += outcome.num_solved

    def state(self) -> Any:
        version, internal, gauss = self.random.getstate()
        return {
            "random": [version, list(internal), gauss],
            "weights": list(self.weights),
        }

    def restore(self, state: Any) -> None:
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.weights = list(state["weights"])


class OnlyTold(Iterator[Task]):
    def __next__(self) -> Task:
        return Task(id="q", payload={})

    def record(self, outcome: GroupOutcome) -> None:
        assert outcome.success_rate == 0.5


class OnlyKept(Good):
    record = None  # type: ignore[assignment]


class ForgetsRandom(Good):
    def state(self) -> Any:
        return {"weights": self.weights}

    def restore(self, state: Any) -> None:
        self.weights = state["weights"]
        self.random = random.Random(99)


class TupleState(Good):
    def state(self) -> Any:
        return self.random.getstate()


class LargeState(Good):
    def state(self) -> Any:
        return ["x" * 1000] * 70_000


class StateRaises(Good):
    def state(self) -> Any:
        raise RuntimeError("not yet")


class RestoreRaises(Good):
    def restore(self, state: Any) -> None:
        raise KeyError("weights")


class RecordRaises(Good):
    def record(self, outcome: GroupOutcome) -> None:
        raise ZeroDivisionError("no rollouts")


class RecordExits(Good):
    def record(self, outcome: GroupOutcome) -> None:
        raise SystemExit(1)


class RecordTakesTwo(Good):
    def record(self, task_id: str, reward: float) -> None: ...  # type: ignore[override]


class RecordIsAsync(Good):
    async def record(self, outcome: GroupOutcome) -> None: ...  # type: ignore[override]


class RecordIsAList(Good):
    record = []  # type: ignore[assignment]  # noqa: RUF012


class NoRestore(OnlyTold):
    def state(self) -> Any:
        return 1


class NoState(OnlyTold):
    def restore(self, state: Any) -> None: ...


class NoNext:
    def __iter__(self) -> Iterator[Task]:
        return iter([Task(id="q", payload={})])

    def record(self, outcome: GroupOutcome) -> None: ...


class NoTasks(OnlyTold):
    def __next__(self) -> Task:
        raise StopIteration


class YieldsText(OnlyTold):
    def __next__(self) -> Any:
        return "1 + 1?"


class YieldsABadId(OnlyTold):
    def __next__(self) -> Task:
        return Task(id="", payload={})


class NextRaises(OnlyTold):
    def __next__(self) -> Task:
        raise OSError("the dataset is not there")


class PlainWithAState:
    """Other kinds of iterators have an attribute of that name."""

    state = 3

    def __iter__(self) -> Iterator[Task]:
        return iter([Task(id="q", payload={})])


CHOSEN: dict[str, Any] = {}


def chosen(split: str, seed: int) -> Any:
    kind = CHOSEN["kind"]
    return kind(seed) if issubclass(kind, Good) else kind()


def config_of(kind: type) -> RolloutConfig:
    CHOSEN["kind"] = kind
    return RolloutConfig(task_source_path=f"{__name__}:chosen")


@pytest.mark.parametrize("kind", [Good, OnlyTold, PlainWithAState])
def test_valid_task_sources_pass_the_check(kind: type) -> None:
    check_tasks(config_of(kind), 0)
    assert next(load_tasks(config_of(kind), "train", 0)).id.startswith("q")


@pytest.mark.parametrize(
    ("kind", "reason", "fix"),
    [
        (
            ForgetsRandom,
            "after restore(state()) a new object yields task",
            "a random state included",
        ),
        (TupleState, "state() is a tuple, (3, (", "return JSON"),
        (LargeState, "it has 67 MiB as JSON; at most 64 are stored", "return JSON"),
        (StateRaises, "its state() raised RuntimeError: not yet (at ", "correct it"),
        (
            RestoreRaises,
            "its restore() of what its state() returned raised KeyError: 'weights'",
            "correct",
        ),
        (RecordRaises, "raised ZeroDivisionError: no rollouts (at ", "correct it"),
        (RecordExits, "raised SystemExit: 1", "correct it"),
        (
            RecordTakesTwo,
            "its record(task_id: 'str', reward: 'float')",
            "write it as record(self, outcome)",
        ),
        (
            RecordIsAsync,
            "its record() is async",
            "write it as def record(self, outcome)",
        ),
        (
            RecordIsAList,
            "its record is a list, not a method",
            "write record(self, outcome)",
        ),
        (
            OnlyKept,
            "its record is a NoneType, not a method",
            "write record(self, outcome)",
        ),
        (NoRestore, "has state() and no restore()", "write restore(self, state) too"),
        (NoState, "has restore() and no state()", "write state(self) too"),
        (
            NoNext,
            "a NoNext, is told outcomes and has no __next__",
            "write __next__(self) -> Task",
        ),
        (NoTasks, "has no tasks", "at least one"),
        (YieldsText, "it yielded a str, not a Task", "Task objects"),
        (YieldsABadId, "it yielded the task id ''", "1 to 256 characters"),
        (
            NextRaises,
            "its __next__() raised OSError: the dataset is not there",
            "correct it",
        ),
    ],
)
def test_mistake_of_a_task_source_is_named_with_its_fix(
    kind: type, reason: str, fix: str
) -> None:
    with pytest.raises(PluginError) as caught:
        check_tasks(config_of(kind), 0)
    assert caught.value.field == "task_source_path"
    assert caught.value.value == f"{__name__}:chosen"
    assert reason in caught.value.reason
    assert fix in caught.value.fix


# ----------------------------------------------------------------- states


def holds_itself() -> list[Any]:
    state: list[Any] = []
    state.append(state)
    return state


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0,
        -(2**63),
        2**130 + 1,
        1.5,
        "ä",
        [],
        {},
        {"a": [1, {"b": None}]},
        [[1.0, 2]] * 3,
    ],
)
def test_json_state_is_stored_unchanged(state: Any) -> None:
    assert stored_state(state) == state
    assert stored_state(state) is not state or not isinstance(state, list | dict)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"a": [0, {"b": (1, 2)}]},
            r"state\(\)\['a'\]\[1\]\['b'\] is a tuple, \(1, 2\), .* write a list",
        ),
        ({"a": {1, 2}}, r"is a set, \{1, 2\}"),
        ({"n": {3: 1}}, r"state\(\)\['n'\] has the key 3, a int"),
        ([float("inf")], r"state\(\)\[0\] is inf"),
        (["\ud800"], r"state\(\)\[0\] has lone surrogates"),
        ({"\ud800": 1}, "surrogates"),
        ([np.float64(0.5)], r"state\(\)\[0\] is a float64, .* write its tolist\(\)"),
        ({"w": np.zeros(2)}, r"state\(\)\['w'\] is a ndarray, .* write its tolist\(\)"),
        (b"bytes", r"state\(\) is a bytes"),
        (object(), r"state\(\) is a object"),
        ([Unshowable()], "which cannot be shown"),
        (holds_itself(), "nested too deeply, or contains itself"),
        (Task(id="t", payload={}), r"state\(\) is a Task"),
    ],
)
def test_state_that_is_not_json_is_refused_with_its_place(
    state: Any, message: str
) -> None:
    with pytest.raises(TaskStateError, match=message):
        stored_state(state)
