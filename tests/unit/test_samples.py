"""`invrl samples`: what the model said in a run, from its store alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from recorded_run import RecordedRun, database_rows, record_run

from invrl.cli import main as cli
from invrl.gateway.types import Message, ToolCall
from invrl.observe.samples.samples import read_samples, spread
from invrl.store.rows import StoredSession
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.sessions import Sampling, Session
from invrl.types.turns import Segment


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return record_run(tmp_path)


def shown(run: RecordedRun, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["samples", str(run.folder.path), *flags]) == 0
    return capsys.readouterr().out


def refused(run: RecordedRun, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["samples", str(run.folder.path), *flags]) == 2
    return capsys.readouterr().err


def test_samples_show_the_last_step_with_prompt_reply_and_reward(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "old news", 0.0, step=1)
    run.add("2+2", ["let me think", "four"], 0.25, step=2, index=0)
    run.add("2+2", "5", 0.75, step=2, index=1, ending="length")
    out = shown(run, capsys)
    assert "old news" not in out
    assert out.startswith(
        "step 2, the last: 2 rollouts of 1 task, reward mean 0.500 (0.25 to 0.75), cut 50%, "
    )
    assert "2 distinct replies of 2" in out
    assert (
        "== task 2+2, rollout 0 of group g-2+2-2: reward 0.250, step 2, weights 1, "
        in out
    )
    assert (
        "user: What is 2+2?\n> model: let me think\nuser: Go on.\n> model: four\n"
        in out
    )
    assert "CUT" in out
    assert "(the prompt above)\n> model [length: cut]: 5\n" in out


def test_samples_name_a_kept_interrupted_reply(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("2+2", ["let me", "four"], 0.25, step=2, ending="length")
    run.add("1+1", ["let me", "two"], 0.25, step=2)
    out = shown(run, capsys)
    kept = (
        "> model [length: cut]: let me\n-- keeps the interrupted reply:\nuser: Go on."
    )
    assert kept in out
    assert "> model: let me\nuser: Go on." in out


def test_samples_name_the_engines_of_a_moved_turn(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    segments = (
        Segment(engine="engine-1.ab", start=0, end=34),
        Segment(engine=None, start=34, end=35),
    )
    run.add("2+2", "four", 1.0, step=2, segments=segments)
    out = shown(run, capsys)
    engines = "34 tokens by engine-1.ab, 1 token by an engine without a name"
    assert f"> model [moved: {engines}]: four" in out
    [sample] = json.loads(shown(run, capsys, "--json"))
    assert sample["turns"][0]["segments"] == [
        {"engine": "engine-1.ab", "start": 0, "end": 34},
        {"engine": None, "start": 34, "end": 35},
    ]


def test_samples_of_a_live_run_do_not_change_its_folder(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "2", 1.0, step=None)  # finished, its group is not complete
    record = StoredSession(session=_open_session(), key_hash=b"hash", opened_at=7.0)
    run.writer.open_sessions([record]).result(60)
    before = database_rows(run.folder.store_path)
    out = shown(run, capsys)
    assert "no step has trained on them yet" in out
    assert "reward 1.000, finished" in out
    assert database_rows(run.folder.store_path) == before
    run.add("1+1", "3", 0.0, step=1, index=1)  # the writer was not disturbed
    assert "> model: 3" in shown(run, capsys)


def _open_session() -> Session:
    return Session(
        id="ses-open",
        key="isk-open",
        base_url="",
        task_id="1+1",
        group_id="g",
        index=9,
        attempt=0,
        purpose="train",
        sampling=Sampling(),
    )


def test_worst_and_best_samples_are_by_reward_with_one_per_task_first(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        run.add("a", f"a{index}", 0.0, index=index)
        run.add("b", f"b{index}", 0.0 if index < 2 else 1.0, index=index)
    worst = shown(run, capsys, "--worst", "-n", "2")
    assert "> model: a0" in worst
    assert "> model: b0" in worst
    best = shown(run, capsys, "--best", "--limit=1")
    assert "> model: b2" in best
    assert "1 of 6 shown" in best


def test_task_of_a_later_epoch_is_the_same_task(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("10", "no idea", 0.0, step=1, group="g0")
    run.add("10@1", "even", 1.0, step=2, group="g5", version=1)
    run.add("me@1", "a name with a number", 0.0, step=2, group="g6", version=1)
    both = shown(run, capsys, "--task", "10")
    assert "no idea" in both
    assert "even" in both
    assert "no idea" not in shown(run, capsys, "--task", "10@1")
    assert "a name with a number" in shown(run, capsys, "--task", "me@1")


def test_untrained_rollouts_are_counted_and_shown_on_request(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "trained one", 0.5)
    run.add("b", "same as ever", 1.0, step=None, drop=DropReason.ZERO_VARIANCE)
    assert "1 more were not trained: --step all" in shown(run, capsys)
    out = shown(run, capsys, "--step", "all")
    assert "same as ever" in out
    assert "dropped: zero_variance" in out


def test_failed_samples_are_shown_with_their_message(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "fine", 0.5)
    run.add(
        "b",
        "the last words",
        0.0,
        step=None,
        failure=FailureReason.EXCEPTION,
        detail="Traceback ...\n  File \"my_agent.py\", line 3\nKeyError: 'labl'\x1b[2J",
    )
    out = shown(run, capsys, "--failed")
    assert "failed 1 (1 exception)" in out
    assert "failed: exception" in out
    assert "KeyError: 'labl'\\x1b[2J" in out
    assert "the last words" in out
    assert "fine" not in out


def test_control_characters_of_the_model_never_reach_the_terminal(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2Jred\r\x9bK\u202egnirts\u2028\ttab\nline two"
    calls = (ToolCall("c1", "run\x1b[1m", '{"a": "\x08"}'),)
    run.add("t\x1b[31m", evil, 1.0)
    run.add("u", Message("assistant", "", "hidden\x1b", calls), 1.0)
    out = shown(run, capsys, "--full")
    assert {c for c in out if not c.isprintable()} <= {"\n", "\t"}
    assert r"\x1b]0;title\x07\x1b[2Jred\r\x9bK\u202egnirts\u2028" in out
    # not at the margin, where it could be taken for another message
    assert "    line two\n" in out
    assert r"<think>hidden\x1b</think>" in out
    assert r'run\x1b[1m({"a": "\x08"})' in out
    assert {c for c in shown(run, capsys, "--json") if not c.isprintable()} <= {"\n"}


def test_long_texts_are_trimmed_in_the_middle_unless_full_text_is_requested(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "begin " + "x" * 50_000 + " end"
    run.add("a", text, 1.0)
    out = shown(run, capsys)
    assert len(out) < 2_000
    assert "> model: begin xxx" in out
    assert "xxx end" in out
    assert "characters ...]" in out
    assert text in shown(run, capsys, "--full")


def test_json_output_of_samples_is_complete(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "y" * 10_000
    name = run.add("a", ["one", text], 0.5, ending="length")
    (row,) = json.loads(shown(run, capsys, "--json"))
    wanted = {
        "rollout_id": name,
        "task_id": "a",
        "step": 1,
        "reward": 0.5,
        "cut": True,
        "state": "trained",
    }
    assert wanted.items() <= row.items()
    assert [turn["reply"]["content"] for turn in row["turns"]] == ["one", text]
    assert [turn["finish_reason"] for turn in row["turns"]] == ["length", "length"]
    assert row["turns"][0]["prompt"][0]["content"] == "What is a?"


def test_unknown_step_or_task_is_refused_with_the_existing_ones(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        run.add("sum-of-two", "x", 0.5, step=step)
    run.add("held", "x", 0.5, step=0, purpose="eval")
    refusal = refused(run, capsys, "--step", "7")
    assert "the run has trained steps 1 to 3 and was evaluated after step 0" in refusal
    assert "did you mean sum-of-two?" in refused(run, capsys, "--task", "sum-of-tow")
    assert "evaluation after step 0" in shown(run, capsys, "--step", "0")
    assert "evaluation after step 0" in shown(run, capsys, "--eval")
    assert "task held, all held-out rollouts" in shown(run, capsys, "--task", "held")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--worst", "--best"), "they exclude each other"),
        (("--step", "first"), "give a number, last or all"),
        (("-n", "some"), "give --limit N"),
        (("--wrost",), "did you mean --worst?"),
        (("--eval",), "no held-out rollout has ended"),
        (("--failed",), "there is no rollout that failed"),
    ],
)
def test_senseless_flags_of_samples_are_refused(
    run: RecordedRun,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    told: str,
) -> None:
    run.add("a", "x", 0.5)
    assert told in refused(run, capsys, *flags)


def test_samples_of_a_run_without_finished_rollouts_print_a_message(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no rollout of this run has ended yet" in refused(run, capsys)


def test_rollouts_trained_by_a_lost_incarnation_are_not_shown(run: RecordedRun) -> None:
    run.add("a", "lost", 0.0, step=1, group="g0")
    run.ledger.begin(parent=1, step=0, sequence=0)
    run.sequence = 100
    again = run.add("a", "again", 1.0, step=1, group="g0")
    first, second = read_samples(run.folder.store_path, {})
    assert first.state == "lost"
    assert first.step is None
    assert second.identity.session_id == again
    assert second.state == "trained"
    assert second.step == 1


def test_failed_rollout_that_counts_is_shown_with_its_assigned_reward(
    run: RecordedRun,
) -> None:
    run.add("a", "x", 0.5)
    with_partial = FailedRollout(
        session_id="ses-late",
        task_id="a",
        group_id="g",
        index=0,
        attempt=0,
        reason=FailureReason.TIMEOUT,
        detail="late",
        partial=run.summary(_open_session(), 0.0, 1, 0, cut=False),
    )
    record = StoredSession(session=_open_session(), key_hash=b"hash", opened_at=7.0)
    run.writer.open_sessions([record]).result(60)
    run.writer.close_session(
        "ses-open", "aborted", with_partial, hand_over=True
    ).result(60)
    rules = {FailureReason.TIMEOUT: -1.0}
    assert [sample.reward for sample in read_samples(run.folder.store_path, rules)] == [
        0.5,
        -1.0,
    ]
    assert [sample.reward for sample in read_samples(run.folder.store_path, {})] == [
        0.5,
        None,
    ]


def test_spread_samples_are_even_and_keep_both_ends(run: RecordedRun) -> None:
    for index in range(10):
        run.add("a", "x", 0.0, index=index)
    samples = read_samples(run.folder.store_path, {})
    assert [sample.identity.index for sample in spread(samples, 4)] == [0, 3, 6, 9]
    assert [sample.identity.index for sample in spread(samples, 1)] == [0]
    assert len(spread(samples, 0)) == len(spread(samples, 99)) == 10


def test_the_ledger_lists_the_tasks_and_shows_one_by_its_id(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(25):
        run.add(f"task-{number}", "x", 0.5)
    run.add("task-0", "x", 0.5, index=1, step=None, drop=DropReason.STALE)
    ledger = ["ledger", str(run.folder.path)]
    assert cli.main(ledger) == 0
    out = capsys.readouterr().out
    assert "25 tasks (--task ID shows what became of one):" in out
    assert "  task-0   1 trained, 1 dropped\n" in out
    assert "and 5 more: --tasks lists all" in out
    assert cli.main([*ledger, "--tasks"]) == 0
    assert "task-24" in capsys.readouterr().out
    for choice in (["--task", "task-24"], ["--task=task-24"], ["task-24"]):
        assert cli.main([*ledger, *choice]) == 0
        assert "group g-task-24-1, rollout 0, attempt 0:" in capsys.readouterr().out
    assert cli.main([*ledger, "--task", "nothing-like-it"]) == 2
    assert "use one of: task-0, task-1" in capsys.readouterr().err
    assert cli.main([*ledger, "--tsaks"]) == 2
    assert "did you mean --tasks?" in capsys.readouterr().err


def test_unknown_task_of_many_names_the_command_that_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path / "my runs")
    for number in range(31):
        run.add(f"task-{number}", "x", 0.5)
    folder = str(run.folder.path)
    assert cli.main(["ledger", folder, "--task", "nothing-like-it"]) == 2
    command = capsys.readouterr().err.split("`")[1]
    assert shlex.split(command) == ["invrl", "ledger", folder, "--tasks"]
