"""The index of a run, and the questions that the page asks of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from indexed_run import refreshed, rollout_rows, session_ids
from recorded_run import RecordedRun, record_run

from invrl.buffer.ledger.ledger_store import LedgerStore
from invrl.errors import ConfigError
from invrl.gateway.types import Message, ToolCall
from invrl.types.reasons import DropReason, FailureReason
from invrl.viewer.last_replies import last_replies
from invrl.viewer.rollout_queries import match_expression
from invrl.viewer.viewed_run import ViewedRun, open_runs


def viewed(recorded: RecordedRun, cache: Path) -> ViewedRun:
    [run] = open_runs([recorded.folder.path], cache)
    return refreshed(run)


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    return record_run(tmp_path)


def test_every_rollout_has_a_row_with_its_outcome(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    trained = recorded.add("a", "four", 1.0, step=2, version=0)
    dropped = recorded.add("b", "five", 0.0, step=None, drop=DropReason.ZERO_VARIANCE)
    failed = recorded.add(
        "c", "six", 0.0, failure=FailureReason.TIMEOUT, detail="too late\nand more"
    )
    held_out = recorded.add("d", "seven", 1.0, purpose="eval", step=3)
    run = viewed(recorded, tmp_path / "cache")

    by_id = {row["session_id"]: row for row in rollout_rows(run)}
    assert set(by_id) == {trained, dropped, failed, held_out}
    row = by_id[trained]
    assert row["state"] == "trained"
    assert row["step"] == 2
    assert row["reward"] == 1.0
    assert row["staleness"] == 1
    assert by_id[dropped]["state"] == "dropped"
    assert by_id[dropped]["reason"] == "zero_variance"
    assert by_id[failed]["failure"] == "timeout"
    assert by_id[failed]["detail"] == "too late"
    assert by_id[held_out]["state"] == "evaluated"
    assert by_id[held_out]["evaluation"] == "greedy"
    assert by_id[held_out]["step"] == 3
    assert run.index_state.ready


def test_filters_select_rows_and_facets_count_them(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    good = recorded.add("a", "x", 1.0, group="g", index=0)
    bad = recorded.add("a", "x", 0.0, group="g", index=1, ending="length")
    dropped = recorded.add("b", "x", 0.5, step=None, drop=DropReason.STALE)
    failed = recorded.add("c", "x", 0.0, failure=FailureReason.EXCEPTION, detail="no")
    run = viewed(recorded, tmp_path / "cache")

    assert session_ids(run, min_reward=0.6) == {good}
    assert session_ids(run, max_reward=0.2) == {bad}
    assert session_ids(run, drop="stale") == {dropped}
    assert session_ids(run, failure="exception") == {failed}
    assert session_ids(run, truncated=1) == {bad}
    assert session_ids(run, trained=1) == {good, bad}
    assert session_ids(run, task="a", truncated=0) == {good}
    assert session_ids(run, group="g") == {good, bad}
    assert session_ids(run, session=failed) == {failed}
    assert [row["session_id"] for row in rollout_rows(run, sort="best")][:1] == [good]
    assert rollout_rows(run, sort="worst")[0]["session_id"] == bad
    with run.queries() as queries:
        facets = queries.facets({"task": ["a"]})
    assert facets["total"] == 2
    assert facets["truncated"] == {"0": 1, "1": 1}
    assert facets["ranges"]["reward"] == [0.0, 1.0]


def test_most_surprising_reward_is_farthest_from_its_groups_mean(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    for index in range(7):
        recorded.add("a", "x", 0.0, group="g", index=index)
    odd = recorded.add("a", "x", 1.0, group="g", index=7)
    run = viewed(recorded, tmp_path / "cache")
    first = rollout_rows(run, sort="surprising")[0]
    assert first["session_id"] == odd
    assert first["surprise"] == pytest.approx(7**0.5)  # (1 - 1/8) / sqrt(1/8 * 7/8)


def test_search_finds_texts_of_conversations(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    call = ToolCall(id="1", name="search_web", arguments='{"query": "Zürich weather"}')
    with_call = recorded.add(
        "a", Message("assistant", "let me look", "thinking hard", (call,)), 1.0
    )
    plain = recorded.add("b", ["first reply", "second answer"], 1.0)
    run = viewed(recorded, tmp_path / "cache")
    assert session_ids(run, q="zurich") == {with_call}
    assert session_ids(run, q="thinking") == {with_call}
    assert session_ids(run, q="seco") == {plain}
    assert session_ids(run, q='"second answer"') == {plain}
    assert session_ids(run, q='"answer second"') == set()
    assert session_ids(run, q="first second") == set(), "both words in one turn"
    assert session_ids(run, q=plain) == {plain}
    assert session_ids(run, q="b") == {plain}, "the id of its task"


@pytest.mark.parametrize(
    "text",
    [
        '"',
        "a AND",
        "NEAR(",
        "x*",
        "col:y",
        "-z",
        "'; DROP TABLE said; --",
        "(",
        "\0",
        "^a OR b",
    ],
)
def test_search_text_is_never_an_operator(
    recorded: RecordedRun, tmp_path: Path, text: str
) -> None:
    recorded.add("a", "hello", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    assert isinstance(rollout_rows(run, q=text), list)
    assert (
        "AND" not in match_expression(text).replace('" AND "', "").replace("* AND ", "")
        or "AND" in text
    )


def test_index_follows_a_growing_run(recorded: RecordedRun, tmp_path: Path) -> None:
    first = recorded.add("a", "x", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    assert session_ids(run) == {first}
    second = recorded.add("b", "later words", 1.0, step=2)
    refreshed(run)
    assert session_ids(run) == {first, second}
    assert session_ids(run, q="later") == {second}
    assert session_ids(run, step=2) == {second}


def test_second_start_reuses_the_index(recorded: RecordedRun, tmp_path: Path) -> None:
    first = recorded.add("a", "x", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    run.close()
    again = viewed(recorded, tmp_path / "cache")
    assert session_ids(again) == {first}
    assert session_ids(again, q="x") == {first}
    assert again.index_state.turns_indexed == 1


def test_another_run_at_the_same_path_has_another_index(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    old = recorded.add("a", "old words", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    run.close()
    recorded.folder.path.rename(tmp_path / "moved")
    replaced = record_run(tmp_path)
    new = replaced.add("b", "new words", 1.0)
    replaced.opened = 7.0
    again = viewed(replaced, tmp_path / "cache")
    assert old == new, "both runs name their first session alike"
    assert session_ids(again, q="old") == set()
    assert session_ids(again, q="new") == {new}


def test_index_of_another_version_is_rebuilt(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorded.add("a", "x", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    run.close()
    monkeypatch.setattr("invrl.viewer.viewed_run.INDEX_VERSION", 1_000)
    again = viewed(recorded, tmp_path / "cache")
    assert session_ids(again) == {first}
    [index] = (tmp_path / "cache").glob("*/index.sqlite")
    assert index.stat().st_mode & 0o077 == 0, "conversations are private"


def test_rollouts_of_a_lost_incarnation_are_marked_as_lost(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    kept = recorded.add("a", "x", 1.0)
    sequence = recorded.sequence
    gone = recorded.add("b", "x", 1.0, step=2)
    run = viewed(recorded, tmp_path / "cache")
    assert session_ids(run, state="trained") == {kept, gone}
    recorded.ledger = LedgerStore(recorded.folder.store_path)
    recorded.ledger.begin(parent=1, step=1, sequence=sequence)
    refreshed(run)
    assert session_ids(run, state="trained") == {kept}
    assert session_ids(run, state="lost") == {gone}


def test_repeated_evaluation_counts_once(recorded: RecordedRun, tmp_path: Path) -> None:
    first = recorded.add("a", "x", 0.0, purpose="eval", step=0)
    second = recorded.add("a", "x", 1.0, purpose="eval", step=0)
    run = viewed(recorded, tmp_path / "cache")
    assert session_ids(run, state="repeated") == {first}
    assert session_ids(run, state="evaluated") == {second}
    with run.queries() as queries:
        assert queries.held_out_rewards() == {("a", "greedy"): {"0": [1.0]}}


def test_index_lists_tasks_groups_and_steps(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    recorded.add("a", "x", 0.0, group="g1", index=0, step=1)
    recorded.add("a", "x", 1.0, group="g1", index=1, step=1)
    recorded.add("a@1", "x", 1.0, group="g2", step=4)
    run = viewed(recorded, tmp_path / "cache")
    with run.queries() as queries:
        [task] = queries.tasks({})["rows"]
        groups = {row["group_id"]: row for row in queries.groups({})["rows"]}
        steps = queries.steps()["steps"]
    assert task["task"] == "a"
    assert task["rollouts"] == 3
    assert task["gain"] == 0.5
    assert groups["g1"]["reward_mean"] == 0.5
    assert groups["g1"]["trained"] == 2
    assert groups["g1"]["reward_std"] == pytest.approx(0.5)
    assert [(step["step"], step["rollouts"]) for step in steps] == [(1, 2), (4, 1)]


def test_two_viewers_share_one_index(recorded: RecordedRun, tmp_path: Path) -> None:
    first = recorded.add("a", "x", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    other = viewed(recorded, tmp_path / "cache")
    assert session_ids(other) == {first}
    run.close()
    second = recorded.add("b", "x", 1.0)
    refreshed(other)
    assert session_ids(other) == {first, second}


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "nothing"},
        {"step": "x"},
        {"min_reward": "much"},
        {"limit": "all"},
        {"trained": "yes"},
    ],
)
def test_wrong_filter_is_refused_by_name(
    recorded: RecordedRun, tmp_path: Path, query: dict[str, str]
) -> None:
    recorded.add("a", "x", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    with pytest.raises(ConfigError) as error:
        rollout_rows(run, **query)
    assert error.value.field == next(iter(query))
    assert error.value.fix


def test_last_replies_of_a_task_are_listed_by_step(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    call = ToolCall(id="1", name="add", arguments='{"a": 1}')
    last = recorded.add("a", ["first", "second"], 1.0)
    with_call = recorded.add(
        "a", Message("assistant", "", "thinking", (call,)), 0.0, index=1
    )
    thought = recorded.add("a", Message("assistant", "", "only thinking"), 0.0, index=2)
    long = recorded.add("a", "x" * 5_000, 0.0, index=3, purpose="eval")
    recorded.add("b", "of another task", 1.0)
    run = viewed(recorded, tmp_path / "cache")
    replies = last_replies(run, "a")["replies"]
    assert {name: reply["text"] for name, reply in replies.items()} == {
        last: "second",
        with_call: 'add({"a": 1})',
        thought: "only thinking",
        long: "x" * 2_000,
    }
    assert replies[long]["characters"] == 5_000
    assert set(last_replies(run, "a", only={long})["replies"]) == {long}
    assert last_replies(run, "none")["replies"] == {}
