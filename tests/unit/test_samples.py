"""`invrl samples`: what the model said in a run, from its store alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_run_folder import config

from invrl import cli
from invrl.buffer.ledger import LedgerEntry
from invrl.buffer.ledger_store import LedgerStore
from invrl.buffer.open_group import Place, RolloutState
from invrl.gateway.message import Message, ToolCall
from invrl.run_folder import RunFolder, make_run_folder
from invrl.run_store import RunStoreWriter
from invrl.samples import likeness, read_samples, spread
from invrl.types import (
    DropReason,
    FailedRollout,
    FailureReason,
    FinishReason,
    Outcome,
    Purpose,
    RolloutSummary,
    Sampling,
    Session,
    Turn,
    VersionSpan,
    WeightVersion,
)

ENDS = {"trained": RolloutState.TRAINED, "dropped": RolloutState.DROPPED}


@dataclass
class Run:
    """A run folder that is filled rollout by rollout, as gateway and buffer would."""

    folder: RunFolder
    writer: RunStoreWriter
    ledger: LedgerStore
    sequence: int = 0
    opened: float = 100.0

    def add(
        self,
        task: str,
        reply: str | Sequence[str] | Message,
        reward: float,
        *,
        step: int | None = 1,
        index: int = 0,
        group: str = "",
        purpose: Purpose = "train",
        mode: str = "greedy",
        drop: DropReason | None = None,
        failure: FailureReason | None = None,
        detail: str = "",
        ending: FinishReason = "stop",
        version: int | None = None,
    ) -> str:
        """A rollout of the step; its session's id."""
        name = f"ses-{self.sequence:04d}{index}"
        group = group or f"g-{task}-{step}"
        if purpose == "eval":
            group = f"eval/{step}/{mode}/{task}"
        version = version if version is not None else (step or 0) - (purpose == "train")
        session = Session(
            id=name,
            key=f"isk-{name}",
            base_url="",
            task_id=task,
            group_id=group,
            index=index,
            attempt=0,
            purpose=purpose,
            sampling=Sampling(),
        )
        self.opened += 1
        self.writer.open_sessions([session], [hashlib.sha256(name.encode()).digest()], self.opened).result(60)
        replies = [reply] if isinstance(reply, str | Message) else list(reply)
        parent: str | None = None
        for number, text in enumerate(replies):
            asked = Message("user", f"What is {task}?") if not number else Message("user", "Go on.")
            said = text if isinstance(text, Message) else Message("assistant", text)
            turn = self._turn(f"{name}/{number}", name, parent, said, version, ending)
            self.writer.add_turn(turn, msgspec.json.encode([asked, said])).result(60)
            self.writer.mark_delivered(turn.id).result(60)
            parent = turn.id
        summary = self._summary(session, reward, len(replies), version, cut=ending == "length")
        outcome: Outcome = summary
        if failure is not None:
            place = {each: getattr(summary, each) for each in ("session_id", "task_id", "group_id")}
            outcome = FailedRollout(**place, index=index, attempt=0, reason=failure, detail=detail)
        state = "aborted" if failure else "finished"
        self.writer.close_session(name, state, outcome, hand_over=purpose == "train").result(60)
        if purpose == "train":
            self._account(task, Place(group, index, 0), name, step, drop, failure)
        self.sequence += 10
        return name

    def _turn(
        self, name: str, session: str, parent: str | None, said: Message, version: int, ending: FinishReason
    ) -> Turn:
        ids_T = np.frombuffer(repr(said).encode(), np.uint8).astype(np.int32)
        return Turn(
            id=name,
            session_id=session,
            parent_id=parent,
            context_ids_T=np.array([1, 2], np.int32),
            sampled_ids_T=ids_T,
            logprobs_T=np.zeros(len(ids_T), np.float32),
            spans=(VersionSpan(version=WeightVersion(version), start=0, end=len(ids_T)),),
            finish_reason=ending,
            request_digest="",
            delivered=False,
            temperature=1.0,
            prompt_tokens=2,
            cached_tokens=0,
            fork_reason="",
            started_at=self.opened,
            finished_at=self.opened + len(name) / 100,
        )

    def _summary(
        self, session: Session, reward: float, turns: int, version: int, *, cut: bool
    ) -> RolloutSummary:
        return RolloutSummary(
            session_id=session.id,
            task_id=session.task_id,
            group_id=session.group_id,
            index=session.index,
            attempt=0,
            reward=reward,
            num_turns=turns,
            prompt_tokens=2,
            cached_tokens=0,
            later_prompt_tokens=0,
            later_cached_tokens=0,
            sampled_tokens=9,
            trained_tokens=9,
            truncated=cut,
            oldest_version=WeightVersion(version),
            newest_version=WeightVersion(version),
            forks=0,
            started_at=0.0,
            finished_at=1.0,
        )

    def _account(
        self,
        task: str,
        place: Place,
        session: str,
        step: int | None,
        drop: DropReason | None,
        failure: FailureReason | None,
    ) -> None:
        """The ledger's entries, from the lease to the end."""
        entries: list[LedgerEntry] = []

        def move(state: RolloutState, **facts: object) -> None:
            values = {"sequence": self.sequence + len(entries), "place": place, "task_id": task}
            entries.append(msgspec.convert({**values, "state": state, **facts}, LedgerEntry))

        move(RolloutState.IN_FLIGHT)
        if failure is not None:
            move(RolloutState.DROPPED, reason=DropReason.REPLACED, failure=failure, session_id=session)
        else:
            move(RolloutState.FINISHED, session_id=session)
            if drop is not None:
                move(RolloutState.DROPPED, reason=drop)
            elif step is not None:
                move(RolloutState.GROUPED)
                move(RolloutState.TAKEN, batch_id=step - 1)
                move(RolloutState.TRAINED, batch_id=step - 1)
        self.ledger.write(entries)

    def samples(self, *flags: str) -> int:
        return cli.main(["samples", str(self.folder.path), *flags])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = make_run_folder(config(tmp_path, "run"))
    writer = RunStoreWriter(folder.store_path)
    ledger = LedgerStore(folder.store_path)
    ledger.begin(parent=0, step=0, sequence=0)
    return Run(folder, writer, ledger)


def shown(run: Run, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run.samples(*flags) == 0
    return capsys.readouterr().out


def refused(run: Run, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run.samples(*flags) == 2
    return capsys.readouterr().err


def test_the_last_step_is_shown_with_prompt_reply_reward_and_what_else_is_known(
    run: Run, capsys: pytest.CaptureFixture[str]
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
    assert "== task 2+2, rollout 0 of group g-2+2-2: reward 0.250, step 2, weights 1, " in out
    assert "user: What is 2+2?\n> model: let me think\nuser: Go on.\n> model: four\n" in out
    assert "CUT" in out
    assert "(the prompt above)\n> model [length: cut]: 5\n" in out


def test_a_run_that_goes_on_is_shown_too_and_nothing_of_it_is_changed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "2", 1.0, step=None)  # finished, its group is not complete
    run.writer.open_sessions([_open_session()], [b"hash"], 7.0).result(60)
    before = rows_of(run.folder.store_path)
    out = shown(run, capsys)
    assert "no step has been made of them so far" in out
    assert "reward 1.000, finished" in out
    assert rows_of(run.folder.store_path) == before
    run.add("1+1", "3", 0.0, step=1, index=1)  # the writer was not disturbed
    assert "> model: 3" in shown(run, capsys)


def rows_of(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


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


def test_worst_and_best_go_by_reward_and_take_one_of_each_task_first(
    run: Run, capsys: pytest.CaptureFixture[str]
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


def test_a_held_out_task_that_changed_is_shown_before_and_after(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, steady, learnt, reworded in ((0, "6", "9", "it is 7"), (4, "6", "8", "seven")):
        run.add("3+3", steady, 1.0, step=step, purpose="eval")
        run.add("4+4", learnt, float(learnt == "8"), step=step, purpose="eval")
        run.add("3+4", reworded, 1.0, step=step, purpose="eval")
    run.add("4+4", "8", 1.0, step=4, purpose="eval", mode="sampled")
    out = shown(run, capsys, "--changed")
    assert out.startswith("2 tasks changed")
    assert out.index("task 4+4, held out (greedy): reward 0.000 -> 1.000 (+1.000)") < out.index("task 3+4")
    assert "reward 1.000 -> 1.000 (+0.000)" in out
    assert "3+3" not in out
    assert "before: reward 0.000, evaluated after step 0 (greedy)" in out
    rows = json.loads(shown(run, capsys, "--changed", "--json", "-n", "1"))
    assert [row["task_id"] for row in rows] == ["4+4"]
    assert rows[0]["gain"] == 1.0
    assert rows[0]["after"]["turns"][0]["reply"]["content"] == "8"


def test_a_training_task_changed_between_its_first_group_and_its_last_one_also_if_that_was_dropped(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        run.add("solved", "no idea", float(index == 1), step=1, index=index, group="g0")
        run.add(
            "solved", "42", 1.0, step=None, index=index, group="g7", version=6, drop=DropReason.ZERO_VARIANCE
        )
        run.add("once", "1", 0.0, step=1, index=index, group="g1")
    out = shown(run, capsys, "--changed")
    assert "task solved, training: reward 0.500 -> 1.000 (+0.500)" in out
    assert "dropped: zero_variance" in out
    assert "once" not in out


def test_what_was_not_trained_is_counted_and_shown_when_asked_for(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "trained one", 0.5)
    run.add("b", "same as ever", 1.0, step=None, drop=DropReason.ZERO_VARIANCE)
    assert "1 more were not trained: --step all" in shown(run, capsys)
    out = shown(run, capsys, "--step", "all")
    assert "same as ever" in out
    assert "dropped: zero_variance" in out


def test_failures_are_shown_with_what_they_say(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
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
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2Jred\r\x9bK\u202egnirts\u2028\ttab\nline two"
    calls = (ToolCall("c1", "run\x1b[1m", '{"a": "\x08"}'),)
    run.add("t\x1b[31m", evil, 1.0)
    run.add("u", Message("assistant", "", "hidden\x1b", calls), 1.0)
    out = shown(run, capsys, "--full")
    assert {c for c in out if not c.isprintable()} <= {"\n", "\t"}
    assert r"\x1b]0;title\x07\x1b[2Jred\r\x9bK\u202egnirts\u2028" in out
    assert "    line two\n" in out  # not at the margin, where it could be taken for another message
    assert r"<think>hidden\x1b</think>" in out
    assert r'run\x1b[1m({"a": "\x08"})' in out
    assert {c for c in shown(run, capsys, "--json") if not c.isprintable()} <= {"\n"}


def test_long_texts_are_trimmed_in_their_middle_unless_all_is_wanted(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "begin " + "x" * 50_000 + " end"
    run.add("a", text, 1.0)
    out = shown(run, capsys)
    assert len(out) < 2_000
    assert "> model: begin xxx" in out
    assert "xxx end" in out
    assert "characters ...]" in out
    assert text in shown(run, capsys, "--full")


def test_json_has_every_fact_and_every_word(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = "y" * 10_000
    name = run.add("a", ["one", text], 0.5, ending="length")
    (row,) = json.loads(shown(run, capsys, "--json"))
    wanted = {"rollout_id": name, "task_id": "a", "step": 1, "reward": 0.5, "cut": True, "state": "trained"}
    assert wanted.items() <= row.items()
    assert [turn["reply"]["content"] for turn in row["turns"]] == ["one", text]
    assert [turn["finish_reason"] for turn in row["turns"]] == ["length", "length"]
    assert row["turns"][0]["prompt"][0]["content"] == "What is a?"


def test_an_unknown_step_or_task_is_told_what_there_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        run.add("sum-of-two", "x", 0.5, step=step)
    run.add("held", "x", 0.5, step=0, purpose="eval")
    told = refused(run, capsys, "--step", "7")
    assert "the run has trained steps 1 to 3 and was evaluated after step 0" in told
    assert "did you mean sum-of-two?" in refused(run, capsys, "--task", "sum-of-tow")
    assert "evaluation after step 0" in shown(run, capsys, "--step", "0")
    assert "evaluation after step 0" in shown(run, capsys, "--eval")
    assert "task held, all held-out rollouts" in shown(run, capsys, "--task", "held")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--worst", "--best"), "they exclude each other"),
        (("--changed", "--step", "1"), "leave --step out"),
        (("--step", "first"), "give a number, last or all"),
        (("-n", "some"), "give --limit N"),
        (("--wrost",), "did you mean --worst?"),
        (("--eval",), "no held-out rollout has ended"),
        (("--failed",), "there is no rollout that failed"),
        (("--changed",), "--eval-tasks measures held-out tasks before and after"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    run: Run, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    run.add("a", "x", 0.5)
    assert told in refused(run, capsys, *flags)


def test_a_run_in_which_nothing_has_ended_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no rollout has ended in it so far" in refused(run, capsys)


def test_what_a_lost_life_trained_is_not_of_the_step(run: Run) -> None:
    run.add("a", "lost", 0.0, step=1, group="g0")
    run.ledger.begin(parent=1, step=0, sequence=0)
    run.sequence = 100
    again = run.add("a", "again", 1.0, step=1, group="g0")
    first, second = read_samples(run.folder.store_path, {})
    assert (first.state, first.step) == ("lost", None)
    assert (second.rollout_id, second.state, second.step) == (again, "trained", 1)


def test_a_failure_that_counts_has_the_reward_of_the_run(run: Run) -> None:
    run.add("a", "x", 0.5)
    with_partial = FailedRollout(
        session_id="ses-late",
        task_id="a",
        group_id="g",
        index=0,
        attempt=0,
        reason=FailureReason.TIMEOUT,
        detail="late",
        partial=run._summary(_open_session(), 0.0, 1, 0, cut=False),
    )
    run.writer.open_sessions([_open_session()], [b"hash"], 7.0).result(60)
    run.writer.close_session("ses-open", "aborted", with_partial, hand_over=True).result(60)
    rules = {FailureReason.TIMEOUT: -1.0}
    assert [one.reward for one in read_samples(run.folder.store_path, rules)] == [0.5, -1.0]
    assert [one.reward for one in read_samples(run.folder.store_path, {})] == [0.5, None]


def test_spread_is_even_and_keeps_both_ends(run: Run) -> None:
    for index in range(10):
        run.add("a", "x", 0.0, index=index)
    samples = read_samples(run.folder.store_path, {})
    assert [one.index for one in spread(samples, 4)] == [0, 3, 6, 9]
    assert [one.index for one in spread(samples, 1)] == [0]
    assert len(spread(samples, 0)) == len(spread(samples, 99)) == 10


def test_likeness_is_1_for_equal_texts_alone() -> None:
    assert likeness("", "") == 1.0
    assert likeness("x" * 9_000, "x" * 9_000) == 1.0
    assert likeness("x" * 9_000, "x" * 9_001) < 1.0
    assert likeness("abc", "xyz") == 0.0


def test_the_ledger_lists_the_tasks_and_shows_one_by_its_id(
    run: Run, capsys: pytest.CaptureFixture[str]
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
