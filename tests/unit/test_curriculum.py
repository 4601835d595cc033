"""The curriculum: schemes against their formulas, the same picks for the same seed and
outcomes, a state that goes on where it was, and what its settings refuse."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.rollout.config import CurriculumConfig, CurriculumScheme, RolloutConfig
from invrl.rollout.tasks.curriculum import CURRICULA, Curriculum
from invrl.rollout.tasks.tasks import check_tasks, feedback_notes, load_tasks
from invrl.run.settings.config import resolve
from invrl.types.groups import GroupOutcome
from invrl.types.task_state import stored_state
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

SCHEMES = sorted(CURRICULA)


def listed(count: int) -> list[Task]:
    return [Task(id=f"q{n}", payload={"n": n}) for n in range(count)]


def make(
    count: int, scheme: str = "learnability", decay: float = 0.5, seed: int = 0
) -> Curriculum:
    return Curriculum(listed(count), CURRICULA[scheme], decay=decay, seed=seed)


def ended(
    task_id: str, solved: int, size: int = 8, *, complete: bool = True
) -> GroupOutcome:
    return GroupOutcome(
        task_id=task_id,
        group_id="g",
        version=WeightVersion(0),
        rewards_G=(1.0,) * solved + (0.0,) * (size - solved),
        num_solved=solved,
        complete=complete,
    )


def shares(curriculum: Curriculum, picks: int) -> dict[str, float]:
    """How often each task is picked while nothing is learned: each group is dropped
    before it is complete."""
    counts: Counter[str] = Counter()
    for _ in range(picks):
        task = next(curriculum)
        counts[task.id] += 1
        curriculum.record(ended(task.id, 0, complete=False))
    return {task_id: count / picks for task_id, count in counts.items()}


# ------------------------------------------------------ the posterior and the schemes


@given(
    decay=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    solved=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12),
)
def test_curriculum_posterior_is_the_discounted_count(
    decay: float, solved: list[tuple[int, int]]
) -> None:
    """Against the sum written out, in exact fractions: the prior never fades, the group
    before last weighs decay, the one before it decay squared."""
    curriculum = make(2, decay=decay)
    for num_solved, num_unsolved in solved:
        curriculum.record(ended("q1", num_solved, num_solved + num_unsolved))
    alpha = Fraction(1)
    beta = Fraction(1)
    for age, (num_solved, num_unsolved) in enumerate(reversed(solved)):
        alpha += Fraction(decay) ** age * num_solved
        beta += Fraction(decay) ** age * num_unsolved
    expected = [] if alpha == beta == 1 else [float(alpha), float(beta), 0]
    assert curriculum.state()["tasks"].get("q1", []) == pytest.approx(
        expected, rel=1e-12
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", ["learnability", "prioritized"])
def test_tasks_are_drawn_in_proportion_to_their_weight(scheme: str) -> None:
    curriculum = make(4, scheme, decay=1.0)
    for task_id, solved in (("q0", 0), ("q1", 4), ("q2", 8)):  # q3 was never seen
        curriculum.record(ended(task_id, solved))
    alpha = np.array([1.0, 5.0, 9.0, 1.0])
    beta = np.array([9.0, 5.0, 1.0, 1.0])
    if scheme == "prioritized":
        weight = 1.0 - alpha / (alpha + beta)
    else:  # E[p] - E[p^2] of a Beta distribution, from its mean and variance
        mean = alpha / (alpha + beta)
        variance = mean * (1.0 - mean) / (alpha + beta + 1.0)
        weight = mean - (variance + mean**2)
    expected = weight / weight.sum()
    picks = 4000
    measured = shares(curriculum, picks)
    for index, share in enumerate(expected):
        error = (share * (1.0 - share) / picks) ** 0.5
        assert measured[f"q{index}"] == pytest.approx(share, abs=4 * error)
    if scheme == "learnability":
        assert measured["q1"] > measured["q3"] > max(measured["q0"], measured["q2"])
    else:
        assert measured["q0"] > measured["q3"] > measured["q2"]


def test_thompson_prefers_tasks_with_a_success_rate_near_one_half() -> None:
    curriculum = make(4, "thompson", decay=1.0)
    for _ in range(3):
        for task_id, solved in (("q0", 0), ("q1", 4), ("q2", 8)):
            curriculum.record(ended(task_id, solved))
    measured = shares(curriculum, 1000)
    assert measured["q1"] > 0.6
    assert measured["q1"] > measured["q3"] > 0.1, "what was never seen is explored"
    assert measured.get("q0", 0.0) < 0.02
    assert measured.get("q2", 0.0) < 0.02


def test_solved_task_returns_when_the_model_forgets_it() -> None:
    curriculum = make(2, decay=0.5)
    for _ in range(10):
        curriculum.record(ended("q0", 8))
    before = shares(curriculum, 500)["q0"]
    curriculum.record(ended("q0", 3))
    after = shares(curriculum, 500)["q0"]
    assert 0.1 < before < 0.35
    assert after > 0.45


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_task_is_open_twice_while_other_tasks_are_free(scheme: str) -> None:
    curriculum = make(5, scheme)
    for _ in range(6):
        curriculum.record(ended("q0", 4))
    assert len({next(curriculum).id for _ in range(5)}) == 5
    assert len({next(curriculum).id for _ in range(5)}) == 5
    curriculum.record(ended("q3", 1))
    assert next(curriculum).id == "q3"


# -------------------------------------------------- the same again, and over a resume


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    count=st.integers(1, 6),
    seed=st.integers(0, 5),
    decay=st.sampled_from([0.0, 0.5, 1.0]),
    moves=st.lists(st.integers(0, 9), max_size=40),
    cut=st.integers(0, 40),
)
def test_restored_curriculum_continues_with_the_same_picks(
    scheme: str, count: int, seed: int, decay: float, moves: list[int], cut: int
) -> None:
    """Picks and outcomes in any order; the state passes through JSON after any of
    them."""
    first, second = (make(count, scheme, decay, seed) for _ in range(2))
    open_ids: list[str] = []
    for number, move in enumerate(moves):
        if number == cut:
            state = stored_state(first.state())
            second = make(count, scheme, decay, seed)
            second.restore(json.loads(json.dumps(state)))
        if move == 9 and open_ids:
            outcome = ended(open_ids.pop(0), 0, 3, complete=False)
        elif move >= 5 and open_ids:
            outcome = ended(open_ids.pop(), move - 5)
        else:
            task = next(first)
            assert next(second) == task
            open_ids.append(task.id)
            continue
        first.record(outcome)
        second.record(outcome)
    assert first.state() == second.state()
    assert json.loads(json.dumps(first.state())) == first.state()


def test_seed_and_outcomes_determine_the_picks() -> None:
    def ids(seed: int, solved: int) -> list[str]:
        curriculum = make(50, seed=seed)
        picked: list[str] = []
        for _ in range(40):
            task = next(curriculum)
            picked.append(task.id)
            curriculum.record(ended(task.id, solved))
        return picked

    assert ids(1, 4) == ids(1, 4)
    assert ids(1, 4) != ids(2, 4)
    assert ids(1, 4) != ids(1, 8)


def test_curriculum_state_of_another_task_list_is_refused() -> None:
    curriculum = make(3)
    curriculum.record(ended(next(curriculum).id, 2))
    state = curriculum.state()
    with pytest.raises(ValueError, match="the state is of 3 tasks, the list has 4"):
        make(4).restore(state)
    renamed = Curriculum(
        [Task(id=f"r{n}", payload={}) for n in range(3)],
        CURRICULA["thompson"],
        decay=0.5,
        seed=0,
    )
    with pytest.raises(ValueError, match="among them 'q"):
        renamed.restore(state)


def test_a_curriculum_raises_the_share_of_groups_that_teach() -> None:
    """Simulated: of 60 tasks a third is solved never, a third always, a third half of
    the time. The share of groups with both rewards among the last of 300, against a
    third and less without a curriculum."""
    success_rate = [0.0, 1.0, 0.5]
    for scheme in ("learnability", "thompson"):
        draw = random.Random(0)
        curriculum = make(60, scheme)
        teaching: list[bool] = []
        for _ in range(300):
            task = next(curriculum)
            solved = sum(
                draw.random() < success_rate[int(task.id[1:]) % 3] for _ in range(8)
            )
            curriculum.record(ended(task.id, solved))
            teaching.append(0 < solved < 8)
        assert sum(teaching[150:]) / 150 > 0.5, scheme


# ----------------------------------------------------------------- settings


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"id": f"q{n}", "n": n}) for n in range(6)))
    return str(path)


def endless(split: str, seed: int) -> Iterator[Task]:
    n = 0
    while True:
        yield Task(id=f"{seed}-{n % 4}", payload={})
        n += 1


def finite(split: str, seed: int) -> Iterator[Task]:
    return iter(listed(5))


def empty(split: str, seed: int) -> Iterator[Task]:
    return iter(())


class Told(Iterator[Task]):
    def __next__(self) -> Task:
        return Task(id="t", payload={})

    def record(self, outcome: GroupOutcome) -> None: ...


def told(split: str, seed: int) -> Iterator[Task]:
    return Told()


def from_source(name: str, **fields: object) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"task_source_path": f"{__name__}:{name}", **fields}
    )


def first_ids(config: RolloutConfig, count: int) -> set[str]:
    tasks = load_tasks(config, "train", 3)
    assert isinstance(tasks, Curriculum)
    return {next(tasks).id for _ in range(count)}


@pytest.mark.parametrize("curriculum", SCHEMES)
def test_curriculum_picks_from_a_file_or_a_source(
    file: str, curriculum: CurriculumScheme
) -> None:
    config = RolloutConfig(task_file=file, curriculum=CurriculumConfig(kind=curriculum))
    check_tasks(config, 3)
    assert first_ids(config, 6) == {f"q{n}" for n in range(6)}
    two = RolloutConfig(
        task_file=file, curriculum=CurriculumConfig(kind=curriculum, tasks=2)
    )
    assert first_ids(two, 20) == {"q0", "q1"}
    assert first_ids(from_source("finite", curriculum={"kind": curriculum}), 5) == {
        f"q{n}" for n in range(5)
    }
    of_endless = from_source("endless", curriculum={"kind": curriculum, "tasks": 5})
    assert first_ids(of_endless, 5) == {"3-0", "3-1", "3-2", "3-3", "3-0@1"}


@pytest.mark.parametrize(
    ("name", "fields", "field", "reason", "fix"),
    [
        (
            "endless",
            {},
            "curriculum.tasks",
            "more than 100000 training tasks",
            "give --curriculum.tasks N",
        ),
        (
            "finite",
            {"tasks": 9},
            "curriculum.tasks",
            "there are 5 training tasks",
            "at most 5",
        ),
        ("empty", {}, "task_source_path", "has no tasks", "yield"),
        (
            "told",
            {},
            "curriculum",
            "picks its tasks by itself",
            "leave --curriculum out",
        ),
    ],
)
def test_task_source_unfit_for_a_curriculum_is_refused_before_the_run(
    name: str, fields: dict[str, object], field: str, reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tasks(from_source(name, curriculum={"kind": "learnability", **fields}), 0)
    assert caught.value.field == field
    assert reason in caught.value.reason
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--curriculum.tasks", "3"], "curriculum.kind"),
        (["--curriculum.decay", "0.9"], "curriculum.kind"),
        (["--curriculum", "easy"], "curriculum.kind"),
        (["--curriculum", "thompson", "--curriculum.decay", "1.5"], "curriculum.decay"),
        (
            ["--difficulty.low", "0.9", "--group-filter", "medium_difficulty"],
            "difficulty.low",
        ),
        (
            ["--difficulty.groups", "2", "--group-filter", "none"],
            "buffer.group_filter",
        ),
        (["--difficulty.groups", "17"], "difficulty.groups"),
    ],
)
def test_meaningless_curriculum_settings_are_refused(
    flags: list[str], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*parse_flags(["--model-path", "m", "--task-file", "t.jsonl", *flags]))
    assert caught.value.field.endswith(field)


def test_task_source_without_saved_state_is_noted() -> None:
    (note,) = feedback_notes(from_source("told"), 0)
    assert "after a resume it begins anew" in note
    assert feedback_notes(from_source("finite"), 0) == []
