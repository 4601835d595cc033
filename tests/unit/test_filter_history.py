"""Group filters that see a task's reward history: what they are shown, the built-in one
against its definition, a resume, and what a filter's parameters may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_buffer import lease_all, summary

from invrl.buffer.config import BufferConfig, DifficultyConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import (
    GROUP_FILTERS,
    configured_group_filter,
    group_filter_function,
    medium_difficulty,
)
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.reward_history import RECENT_GROUPS, RewardHistory
from invrl.errors import PluginError
from invrl.interfaces import GroupFilter, HistoryGroupFilter
from invrl.rollout.config import RolloutConfig
from invrl.types.groups import Group, GroupOutcome, TaskHistory
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion
from invrl.user_code.plugins import takes_history


def two_tasks() -> Iterator[Task]:
    while True:
        yield Task(id="a", payload={})
        yield Task(id="b", payload={})


def make(
    group_filter: GroupFilter | HistoryGroupFilter, **fields: object
) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig.model_validate({"max_staleness": 9, **fields}),
        RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2),
        tasks=two_tasks(),
        group_filter=group_filter,
    )


def finish(buffer: GroupBuffer, group_id: str, *rewards: float) -> None:
    for index, reward in enumerate(rewards):
        buffer.record(summary(group_id, index, reward=reward))


def outcome(
    task_id: str, *rewards: float, complete: bool = True, dropped: str = ""
) -> GroupOutcome:
    return GroupOutcome(
        task_id=task_id,
        group_id="g",
        version=WeightVersion(0),
        rewards_G=rewards,
        num_solved=sum(reward >= 1.0 for reward in rewards),
        complete=complete,
        dropped=dropped,
    )


def group_of(*rewards: float) -> Group:
    rollouts = tuple(
        summary("g", index, reward=reward) for index, reward in enumerate(rewards)
    )
    return Group(id="g", task_id="t", rollouts_G=rollouts)


class Looks:
    """Keeps what it was shown. Drops the groups of a task that had two before."""

    def __init__(self) -> None:
        self.seen: list[TaskHistory] = []

    def __call__(self, group: Group, *, history: TaskHistory) -> str | None:
        self.seen.append(history)
        return "twice_is_enough" if history.num_groups >= 2 else None


# ------------------------------------------------------------- what a filter is shown


def test_group_filter_sees_the_earlier_groups_of_the_task() -> None:
    looks = Looks()
    buffer = make(looks)
    assert [lease.task.id for lease in lease_all(buffer)][:5] == [
        "a",
        "b",
        "a@1",
        "b@1",
        "a@2",
    ]
    finish(buffer, "g0", 0.0, 1.0)
    finish(buffer, "g1", 0.5, 0.5)
    finish(buffer, "g2", 1.0, 1.0)
    finish(buffer, "g4", 0.0, 0.0)
    first, of_b, second, third = looks.seen
    assert first == TaskHistory(task_id="a")
    assert first.success_rate is None
    assert first.mean_reward is None
    assert of_b == TaskHistory(task_id="b")
    assert second.num_groups == 1
    assert second.num_rollouts == 2
    assert second.num_solved == 1
    assert [past.rewards_G for past in second.recent] == [(0.0, 1.0)]
    assert third.success_rate == 0.75
    assert third.mean_reward == 0.75
    assert third.num_kept == 2
    assert buffer.events.dropped == {"filtered/twice_is_enough": 1}


def test_reward_history_is_part_of_the_snapshot() -> None:
    first = make(Looks())
    lease_all(first)
    finish(first, "g0", 0.0, 1.0)
    finish(first, "g2", 1.0, 1.0)
    encoded = msgspec.json.encode(first.snapshot(WeightVersion(0)))
    looks = Looks()
    again = make(looks)
    again.restore(
        msgspec.json.decode(encoded, type=BufferSnapshot),
        [summary("g4", 0, reward=0.0)],
    )
    lease_all(again)
    finish(again, "g4", 0.0, 0.0)
    (history,) = looks.seen
    assert [past.rewards_G for past in history.recent] == [(0.0, 1.0), (1.0, 1.0)]
    assert again.events.dropped == {"filtered/twice_is_enough": 1}


def test_no_history_is_kept_for_a_filter_without_a_history_argument() -> None:
    buffer = make(lambda group: None)
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    assert buffer.snapshot(WeightVersion(0)).histories == ()


def test_filter_that_fails_on_the_history_drops_the_group_and_is_reported() -> None:
    def divides(group: Group, history: TaskHistory) -> str | None:
        return "easy" if history.num_solved / history.num_rollouts > 0.5 else None

    buffer = make(divides)
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    finish(buffer, "g2", 1.0, 1.0)
    assert buffer.events.dropped == {"filtered/filter_raised_ZeroDivisionError": 1}
    assert "in divides: return" in buffer.failure_report().firsts["group_filter"]


@given(
    groups=st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=60
    )
)
def test_reward_history_is_the_sum_of_its_groups(
    groups: list[tuple[str, bool, bool]],
) -> None:
    history = RewardHistory()
    of_a: list[GroupOutcome] = []
    for number, (task_id, complete, kept) in enumerate(groups):
        noted = outcome(
            task_id,
            float(number),
            1.0,
            complete=complete,
            dropped="" if kept else "zero_variance",
        )
        history.note(noted)
        if task_id == "a" and complete:
            of_a.append(noted)
    task_history = history.of("a")
    assert task_history.num_groups == len(of_a)
    assert task_history.num_kept == sum(not noted.dropped for noted in of_a)
    assert task_history.num_rollouts == 2 * len(of_a)
    assert task_history.num_solved == sum(noted.num_solved for noted in of_a)
    assert task_history.reward_sum == sum(sum(noted.rewards_G) for noted in of_a)
    assert list(task_history.recent) == of_a[-RECENT_GROUPS:]
    again = RewardHistory()
    again.restore(history.snapshot())
    assert again.snapshot() == history.snapshot()


def test_history_of_the_least_recent_task_is_forgotten() -> None:
    history = RewardHistory(max_tasks=2)
    for task_id in "abac":
        history.note(outcome(task_id, 1.0))
    assert [history.of(task_id).num_groups for task_id in "abc"] == [2, 0, 1]


# ----------------------------------------------------------------- the built-in one


@given(
    earlier=st.lists(
        st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4), max_size=20
    ),
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6),
    num_groups=st.integers(1, RECENT_GROUPS),
    bounds=st.sampled_from([(0.2, 0.8), (0.0, 1.0), (0.5, 0.5), (0.0, 0.4)]),
)
def test_medium_difficulty_filter_follows_its_definition(
    earlier: list[list[float]],
    rewards: list[float],
    num_groups: int,
    bounds: tuple[float, float],
) -> None:
    history = RewardHistory()
    for past in earlier:
        history.note(outcome("t", *past))
    low, high = bounds
    reason = medium_difficulty(
        group_of(*rewards),
        history=history.of("t"),
        low=low,
        high=high,
        num_groups=num_groups,
    )
    if len(set(rewards)) == 1:
        assert reason == "zero_variance"
        return
    counted = [reward for past in [*earlier, rewards][-num_groups:] for reward in past]
    rate = sum(reward == 1.0 for reward in counted) / len(counted)
    expected = "too_hard" if rate < low else "too_easy" if rate > high else None
    assert reason == expected


def test_difficulty_settings_reach_the_filter() -> None:
    config = BufferConfig(
        group_filter="medium_difficulty",
        difficulty=DifficultyConfig(low=0.4, high=0.6, groups=1),
        success_reward=0.5,
    )
    buffer = make(configured_group_filter(config))
    lease_all(buffer)
    finish(buffer, "g0", 0.5, 0.75)
    finish(buffer, "g1", 0.0, 0.25)
    finish(buffer, "g2", 0.25, 0.5)
    assert buffer.events.dropped == {"filtered/too_easy": 1, "filtered/too_hard": 1}


# --------------------------------------------------------- the parameters of a filter


CODE = """
def old(group): return None
def other_name(g, *, strict=True): return None
def rest(group, **kwargs): return None
def new(group, *, history): return None
def positional(group, history): return None
def optional(group, history=None): return None
def unknown(group, *, model): return None
def both(group, *, history, model): return None
def history(history): return None
class Looks:
    def __call__(self, group, *, history): return None
looks = Looks()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "filters_of_mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "is_given"),
    [
        ("old", False),
        ("other_name", False),
        ("rest", False),
        ("new", True),
        ("positional", True),
        ("optional", True),
        ("looks", True),
        ("history", False),
    ],
)
def test_filters_with_and_without_history_load(
    here: Path, name: str, is_given: bool
) -> None:
    function = group_filter_function(f"filters_of_mine:{name}")
    assert takes_history(function) == is_given
    buffer = make(function)
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    assert not buffer.failure_report().firsts
    assert len(buffer.takeable()) == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("unknown", "write it as unknown(group) or unknown(group, *, history)"),
        ("both", "write it as both(group, *, history)"),
    ],
)
def test_a_filter_with_unknown_parameters_is_refused(
    here: Path, name: str, fix: str
) -> None:
    with pytest.raises(PluginError) as caught:
        group_filter_function(f"filters_of_mine:{name}")
    assert caught.value.field == "group_filter"
    assert "missing a required argument: 'model'" in caught.value.reason
    assert caught.value.fix == fix


def test_wrong_filter_name_is_answered_with_the_built_in_filters() -> None:
    with pytest.raises(PluginError, match="did you mean 'medium_difficulty'"):
        group_filter_function("medium_dificulty")
    assert set(GROUP_FILTERS) == {"nonzero_variance", "medium_difficulty", "none"}
