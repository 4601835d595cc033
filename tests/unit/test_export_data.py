"""`invrl export-data`: the best rollouts of a run as a file to train on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from recorded_run import RecordedRun, database_rows, record_run
from running_gateway import Running, running
from tool_replies import CALC, PARSERS, SHELL, say

from invrl.buffer.samples.training_samples import rollout_samples as training_rows
from invrl.cli import main as cli
from invrl.datasets.config import Kind
from invrl.datasets.rows import load_rows
from invrl.datasets.samples import RowTokenizer
from invrl.gateway.rendering.renderer import Renderer
from invrl.store.row_checksums import delivered_item
from invrl.store.run_store import RunStore
from invrl.types.batches import TrainSample
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.sessions import Session
from invrl.types.turns import Turn

ASK = {"role": "user", "content": "What is 12*13?"}
MORE = {"role": "user", "content": "Sure? ünïcödé 🙂"}
TOOLS = [CALC, SHELL]


@pytest.fixture
def run(tmp_path: Path, model: Path, renderer: Renderer) -> RecordedRun:
    return record_run(tmp_path, model=model, renderer=renderer)


def export(run: RecordedRun, *flags: str) -> int:
    out = run.folder.path.parent / "data.jsonl"
    return cli.main(["export-data", str(run.folder.path), "--out", str(out), *flags])


def rows(run: RecordedRun) -> list[dict]:
    return [
        json.loads(line)
        for line in (run.folder.path.parent / "data.jsonl").read_text().splitlines()
    ]


def replies(run: RecordedRun) -> list[str]:
    """The last message of each row."""
    return [row["messages"][-1]["content"] for row in rows(run)]


def samples_of_file(
    run: RecordedRun, renderer: Renderer, kind: Kind
) -> list[TrainSample]:
    """What `invrl train --data-path` trains of the file."""
    tokenizer = RowTokenizer(
        renderer=renderer, kind=kind, max_tokens=4096, overlong="refuse"
    )
    file = str(run.folder.path.parent / "data.jsonl")
    return [
        sample
        for row in load_rows("data.data_path", file, kind)
        for sample in tokenizer.samples(row)
    ]


def recorded_samples(run: RecordedRun, rollout_id: str) -> list[TrainSample]:
    """What the run trains of the rollout."""
    with contextlib.closing(RunStore(run.folder.store_path)) as store:
        return training_rows(store.rollout(rollout_id))


def assert_same_tokens(written: list[TrainSample], recorded: list[TrainSample]) -> None:
    for of_file, of_run in zip(written, recorded, strict=True):
        assert of_file.tokens_T.tolist() == of_run.tokens_T.tolist()
        assert of_file.loss_mask_T.tolist() == of_run.loss_mask_T.tolist()
        assert of_run.loss_mask_T.any()


# ----------------------------------------------------------------- which rollouts


def test_best_rollout_of_each_task_is_written_and_all_rollouts_are_counted(
    run: RecordedRun, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "three", 0.0, index=0)
    best = run.add("1+1", ["hm", "two"], 1.0, index=1)
    run.add("2+2", "five", 0.5, drop=DropReason.FILTERED)
    run.add("3+3", "six", 1.0, failure=FailureReason.TIMEOUT)
    run.add("4+4", "eight", 1.0, purpose="eval")
    assert export(run) == 0
    out = capsys.readouterr().out
    assert replies(run) == ["two", "five"]
    assert (
        "2 conversations of 2 rollouts of 2 tasks, rewards 0.5 to 1, mean 0.750" in out
    )
    assert "2  exactly the ids that were sampled" in out
    assert "left out: 3 rollouts" in out
    for reason in (
        "not among the best of its task",
        "it failed",
        "held out or served, not of training",
    ):
        assert f"1  {reason}" in out
    first = rows(run)[0]
    assert first["task_id"] == "1+1"
    assert first["rollout_id"] == best
    assert first["reward"] == 1.0
    assert first["step"] == 1
    assert_same_tokens(
        samples_of_file(run, renderer, "conversations")[:1], recorded_samples(run, best)
    )


def test_next_command_names_the_written_file(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "two", 1.0)
    out = tmp_path / "my rows.jsonl"
    assert cli.main(["export-data", str(run.folder.path), "--out", str(out)]) == 0
    command = shlex.split(capsys.readouterr().out.partition("next: ")[2])
    assert command[:4] == ["invrl", "train", "--objective", "sft"]
    assert command[4:6] == ["--data-path", str(out)]


def test_rollouts_are_labelled_by_their_reward(
    run: RecordedRun, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "three", 0.0, index=0)
    run.add("1+1", "two", 1.0, index=1)
    run.add("2+2", "five", 0.5)
    assert export(run, "--labels", "0.5") == 0
    labels = {row["messages"][-1]["content"]: row["label"] for row in rows(run)}
    assert labels == {"three": False, "two": True, "five": True}
    out = capsys.readouterr().out
    assert "2  with the label true" in out
    assert "1  with the label false" in out
    assert "--objective kto" in out
    of_file = samples_of_file(run, renderer, "labels")
    assert [sample.numbers["desirable"] for sample in of_file] == [
        float(row["label"]) for row in rows(run)
    ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--labels", "x"], "not a reward"),
        (["--labels", "1", "--pairs"], "a pair or"),
    ],
)
def test_impossible_label_thresholds_are_refused(
    run: RecordedRun, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("1+1", "two", 1.0)
    assert export(run, *flags) != 0
    error = capsys.readouterr().err
    assert "--labels" in error
    assert reason in error


def test_epochs_of_a_task_count_as_one_task_and_newer_weights_are_preferred(
    run: RecordedRun,
) -> None:
    run.add("a", "old", 1.0, step=1)
    run.add("a@1", "new", 1.0, step=2)
    run.add("a@2", "worse", 0.5, step=3)
    assert export(run) == 0
    assert replies(run) == ["new"]
    assert export(run, "--best", "2", "--overwrite") == 0
    assert replies(run) == ["new", "old"]
    assert export(run, "--best=0", "--overwrite") == 0
    assert replies(run) == ["new", "old", "worse"]


def test_equal_conversations_are_written_once(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        run.add("a", "same", 1.0, index=index)
    run.add("a", "other", 0.5, index=3)
    assert export(run, "--best", "2") == 0
    assert replies(run) == ["same", "other"]
    assert (
        "2  the same tokens as another rollout of its task" in capsys.readouterr().out
    )


def test_exported_rollouts_are_limited_by_reward_and_step(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        run.add(f"t{step}", f"reply {step}", step / 4, step=step)
    run.add("t4", "reply 4", 1.0, step=None)
    assert export(run, "--min-reward", "0.5") == 0
    assert replies(run) == ["reply 2", "reply 3", "reply 4"]
    assert "1  its reward is too low" in capsys.readouterr().out
    assert export(run, "--steps", "2:3", "--overwrite") == 0
    assert replies(run) == ["reply 2", "reply 3"]
    assert "2  trained in none of these steps" in capsys.readouterr().out
    assert export(run, "--steps", ":1", "--overwrite") == 0
    assert replies(run) == ["reply 1"]
    assert export(run, "--steps=3", "--overwrite") == 0
    assert replies(run) == ["reply 3"]


def test_next_best_rollout_replaces_a_rollout_that_cannot_be_written(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "cut off", 1.0, index=0, ending="length")
    run.add("a", "whole", 0.5, index=1)
    assert export(run) == 0
    assert replies(run) == ["whole"]
    assert "1  a reply was cut at its token limit" in capsys.readouterr().out


def test_rollouts_of_a_lost_incarnation_are_not_exported(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "kept", 0.5, step=1)
    kept = run.sequence
    run.add("b", "lost", 1.0, step=2)
    run.ledger.begin(parent=1, step=1, sequence=kept)
    assert export(run) == 0
    assert replies(run) == ["kept"]
    assert (
        "1  a later incarnation of the run resumed from before it"
        in capsys.readouterr().out
    )


# ----------------------------------------------------------------- pairs


def test_pairs_are_the_best_and_the_worst_of_a_group(
    run: RecordedRun, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    good = run.add("a", ["hm", "right"], 1.0, index=0, group="g1")
    run.add("a", "nearly", 0.5, index=1, group="g1")
    bad = run.add("a", "wrong", 0.0, index=2, group="g1")
    for index in range(2):
        run.add("b", f"equal {index}", 1.0, index=index, group="g2")
    run.add("c", "alone", 1.0, group="g3")
    assert export(run, "--pairs") == 0
    out = capsys.readouterr().out
    [row] = rows(run)
    assert row["prompt"] == [{"role": "user", "content": "What is a?"}]
    assert [message["content"] for message in row["chosen"]] == [
        "hm",
        "Go on.",
        "right",
    ]
    assert row["rejected"] == [{"role": "assistant", "content": "wrong"}]
    assert row["rollout_id"] == good
    assert row["rejected_rollout_id"] == bad
    assert row["reward"] == 1.0
    assert row["rejected_reward"] == 0.0
    assert "1 pair of 2 rollouts of 1 task" in out
    assert "1  neither the best nor the worst of its group" in out
    assert "2  all rewards of its group are equal" in out
    assert "1  no other rollout of its group finished" in out
    assert "left out: 4 rollouts" in out
    recorded = [*recorded_samples(run, good), *recorded_samples(run, bad)]
    assert_same_tokens(samples_of_file(run, renderer, "pairs"), recorded)


def test_pair_comes_from_the_group_with_the_largest_reward_difference(
    run: RecordedRun,
) -> None:
    rewards = {
        "a": (0.5, 0.0),
        "a@1": (1.0, 0.0),
        "a@2": (1.0, 0.5),
    }
    for step, (name, of_group) in enumerate(rewards.items(), start=1):
        for index, reward in enumerate(of_group):
            run.add(name, f"{name} {index}", reward, index=index, step=step)
    assert export(run, "--pairs") == 0
    assert [row["task_id"] for row in rows(run)] == ["a@1"]
    assert export(run, "--pairs", "--best", "0", "--overwrite") == 0
    # Of equal differences, that of the newer weights.
    assert [row["task_id"] for row in rows(run)] == ["a@1", "a@2", "a"]
    assert (
        export(run, "--pairs", "--best", "0", "--min-reward", "0.75", "--overwrite")
        == 0
    )
    assert {row["task_id"] for row in rows(run)} == {"a@1", "a@2"}


def test_unwritable_side_of_a_pair_is_replaced_by_the_next_rollout(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, (reply, reward) in enumerate(
        (("best", 1.0), ("good", 0.75), ("poor", 0.25), ("worst", 0.0))
    ):
        ending = "length" if reply in ("best", "worst") else "stop"
        run.add("a", reply, reward, index=index, group="g", ending=ending)
    assert export(run, "--pairs") == 0
    [row] = rows(run)
    assert row["chosen"][0]["content"] == "good"
    assert row["rejected"][0]["content"] == "poor"
    assert "2  a reply was cut at its token limit" in capsys.readouterr().out


# ----------------------------------------------------------------- bad input


def refused(run: RecordedRun, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert export(run, *flags) == 2
    assert not (run.folder.path.parent / "data.jsonl.partial").exists()
    return capsys.readouterr().err


def test_export_data_names_bad_input_and_writes_nothing(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no rollout of this run has ended yet" in refused(run, capsys)
    run.add("a", "x", 0.0, failure=FailureReason.TIMEOUT)
    assert "nothing to write: 1 rollouts: it failed" in refused(run, capsys)
    run.add("a", "equal", 1.0, index=1, group="g")
    run.add("a", "equal too", 1.0, index=2, group="g")
    assert "2 rollouts: all rewards of its group are equal" in refused(
        run, capsys, "--pairs"
    )
    assert "2 rollouts: its reward is too low" in refused(
        run, capsys, "--min-reward", "2"
    )
    assert not (tmp_path / "data.jsonl").exists()
    for flags, text in (
        (("--best", "x"), "not a number"),
        (("--min-reward", "nan"), "not a reward"),
        (("--steps", "3:2"), "it ends before it begins"),
        (("--steps", "a:b"), "not a range of steps"),
        (("--steps", ":"), "not a range of steps"),
        (("--pears",), "no such flag"),
        (("--out", str(tmp_path)), "it is a folder"),
        (("--out", str(tmp_path / "no" / "f.jsonl")), "its folder does not exist"),
        (("--out", str(tmp_path / "f.parquet")), "not Parquet"),
        (("--model-path", str(tmp_path / "no")), "no such folder"),
    ):
        assert text in refused(run, capsys, *flags), flags
    assert cli.main(["export-data", str(run.folder.path)]) == 2
    assert "say which file to write" in capsys.readouterr().err
    assert (
        cli.main(["export-data", str(tmp_path), "--out", str(tmp_path / "f.jsonl")])
        == 2
    )
    assert "not a run folder" in capsys.readouterr().err
    run.folder.store_path.rename(tmp_path / "away.sqlite")
    assert export(run) == 1
    assert "it is missing" in capsys.readouterr().err


def test_existing_file_is_replaced_only_on_request(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "x", 1.0)
    (tmp_path / "data.jsonl").write_text("mine")
    assert "--overwrite" in refused(run, capsys)
    assert (tmp_path / "data.jsonl").read_text() == "mine"
    # With nothing to write it stays, too.
    assert "too low" in refused(run, capsys, "--overwrite", "--min-reward", "2")
    assert (tmp_path / "data.jsonl").read_text() == "mine"
    assert export(run, "--overwrite") == 0
    assert replies(run) == ["x"]


def test_path_of_a_moved_model_can_be_given(
    tmp_path: Path, model: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path, model=tmp_path / "moved", renderer=renderer)
    run.add("a", "x", 1.0)
    assert "the run's model is not there any more" in refused(run, capsys)
    assert export(run, "--model-path", str(model)) == 0
    assert replies(run) == ["x"]


def test_live_run_is_exported_without_changing_its_folder(run: RecordedRun) -> None:
    run.add("a", "first", 1.0, step=None)
    before = database_rows(run.folder.store_path)
    assert export(run) == 0
    assert database_rows(run.folder.store_path) == before
    run.add("b", "second", 1.0)  # the writer was not disturbed
    assert export(run, "--overwrite") == 0
    assert replies(run) == ["first", "second"]


def test_messages_missing_or_different_from_the_ids_are_counted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path, model=model)  # its ids are of no text
    run.add("a", "x", 1.0)
    err = refused(run, capsys)
    assert "1 rollouts: the template writes it in another way" in err
    assert "--inexact" in err
    assert export(run, "--inexact") == 0
    assert replies(run) == ["x"]
    assert "1  the template writes it in another way" in capsys.readouterr().out


# ------------------------------------------------------------ what a gateway recorded


@pytest.fixture
async def gateway(
    run: RecordedRun, tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    """It writes into the run's store."""
    run.writer.close()
    folder = tmp_path / "gateway"
    folder.mkdir()
    changes = {
        "max_new_tokens": 256,
        "constrained": "skip",
        "store_path": str(run.folder.store_path),
    }
    async with running(folder, model, renderer, PARSERS, **changes) as gateway_of_run:
        yield gateway_of_run


async def ask(
    gateway: Running, session: Session, messages: list, **options: object
) -> list:
    """The messages with the reply to them."""
    client = gateway.client(session)
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, **options
    )  # type: ignore[call-overload]
    return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]


async def exported(run: RecordedRun, *flags: str) -> int:
    return await asyncio.to_thread(export, run, *flags)


CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 12}}\n</tool_call>'


async def test_exported_tool_loop_is_read_back_with_the_sampled_ids(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    say(gateway, renderer, "Let me see." + CALL, "It is 156.", "Yes, ünïcödé.")
    messages = await ask(
        gateway, session, [{"role": "system", "content": "Be brief."}, ASK], tools=TOOLS
    )
    [call] = messages[-1]["tool_calls"]
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "156",
    }
    messages = await ask(gateway, session, [*messages, result], tools=TOOLS)
    await ask(gateway, session, [*messages, MORE], tools=TOOLS)
    await gateway.finish(session)
    assert await exported(run) == 0
    assert "1  exactly the ids that were sampled" in capsys.readouterr().out
    [row] = rows(run)
    roles = [message["role"] for message in row["messages"]]
    assert roles == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    [written_call] = row["messages"][2]["tool_calls"]
    assert json.loads(written_call["function"]["arguments"]) == {"a": 12}
    assert row["messages"][3]["tool_call_id"] == written_call["id"]
    assert row["tools"] == TOOLS
    [written] = samples_of_file(run, renderer, "conversations")
    assert_same_tokens([written], recorded_samples(run, session.id))
    turns = turns_of(run, session)
    assert len(turns) == 3
    sampled_T = np.concatenate([turn.sampled_ids_T for turn in turns])
    assert written.tokens_T[written.loss_mask_T].tolist() == sampled_T.tolist()


async def test_call_that_the_template_writes_differently_is_left_out(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for task, reply in (
        ("a", "\n" + CALL.replace(": 12", ":12")),
        ("b", "Sure." + CALL),
    ):
        [session] = await gateway.open(task_id=task, group_id=task)
        say(gateway, renderer, reply)
        assert (await ask(gateway, session, [ASK], tools=TOOLS))[-1]["tool_calls"]
        await gateway.finish(session)
    assert await exported(run) == 0
    assert [row["task_id"] for row in rows(run)] == ["b"]
    reason = "1  the template writes it in another way than it was sampled"
    assert reason in capsys.readouterr().out
    assert await exported(run, "--inexact", "--overwrite") == 0
    assert [row["task_id"] for row in rows(run)] == ["a", "b"]
    assert reason in capsys.readouterr().out


async def test_thinking_that_the_template_does_not_write_is_left_out(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    say(gateway, renderer, "<think>hm</think>\n\nYes.")
    await ask(gateway, session, [ASK])
    await gateway.finish(session)
    assert await exported(run) == 2
    assert (
        "the template writes it in another way than it was sampled"
        in capsys.readouterr().err
    )


async def test_text_with_other_ids_is_written_and_reported(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    spelt = [token for letter in "assistant" for token in renderer.encode(letter)]
    assert spelt != renderer.encode("assistant")
    gateway.engine.script = lambda _: [*spelt, 2]
    await ask(gateway, session, [ASK])
    await gateway.finish(session)
    assert await exported(run) == 0
    assert replies(run) == ["assistant"]
    assert "1  the text that was sampled, in other ids" in capsys.readouterr().out


async def test_exported_samples_train_only_sampled_and_delivered_tokens(
    gateway: Running, run: RecordedRun, renderer: Renderer
) -> None:
    [session] = await gateway.open()
    shots = [
        ASK,
        {"role": "assistant", "content": "144?"},
        {"role": "user", "content": "No."},
    ]
    say(gateway, renderer, "156.", "A title")
    messages = await ask(gateway, session, shots)
    # auxiliary
    await ask(gateway, session, [{"role": "user", "content": "A title for it?"}])
    say(gateway, renderer, "Yes.")
    await ask(gateway, session, [*messages, MORE])
    await gateway.finish(session)
    assert await exported(run) == 0
    [row] = rows(run)
    assert replies(run) == ["Yes."]
    weights = [
        message.get("weight")
        for message in row["messages"]
        if message["role"] == "assistant"
    ]
    assert weights == [0, None, None]
    written = samples_of_file(run, renderer, "conversations")
    main, auxiliary = recorded_samples(run, session.id)
    if len(main.turn_ids) < len(auxiliary.turn_ids):
        main = auxiliary
    assert_same_tokens(written, [main])


async def test_trajectories_become_samples_and_shared_turns_are_trained_once(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    say(gateway, renderer, "156.", "Yes.", "No.")
    messages = await ask(gateway, session, [ASK])
    await ask(gateway, session, [*messages, MORE])
    await ask(gateway, session, [*messages, {"role": "user", "content": "Wrong?"}])
    await gateway.finish(session)
    assert await exported(run) == 0
    assert "2 conversations of 1 rollout of 1 task" in capsys.readouterr().out
    assert replies(run) == ["Yes.", "No."]
    assert [row["messages"][1].get("weight") for row in rows(run)] == [None, 0]
    written = samples_of_file(run, renderer, "conversations")
    assert_same_tokens(written, recorded_samples(run, session.id))


async def test_rollout_with_an_undelivered_last_reply_is_left_out(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    say(gateway, renderer, "156.", "Yes.")
    messages = await ask(gateway, session, [ASK])
    await ask(gateway, session, [*messages, MORE])
    await gateway.finish(session)
    last = turns_of(run, session)[-1]
    with contextlib.closing(sqlite3.connect(run.folder.store_path)) as db, db:
        db.execute("UPDATE turns SET delivered=0 WHERE id=?", (last.id,))
        db.execute("DELETE FROM checksums WHERE item=?", (delivered_item(last.id),))
    assert await exported(run) == 2
    assert (
        "its last reply did not reach the agent, or may not be trained"
        in capsys.readouterr().err
    )


async def test_raw_completions_are_left_out(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [session] = await gateway.open()
    say(gateway, renderer, "156.")
    await gateway.client(session).completions.create(model="tiny", prompt="12*13 =")
    await gateway.finish(session)
    assert await exported(run) == 2
    assert (
        "its prompt is text that no template wraps (completions)"
        in capsys.readouterr().err
    )


async def test_rollout_of_several_trajectories_is_not_used_in_pairs(
    gateway: Running,
    run: RecordedRun,
    renderer: Renderer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sessions = await gateway.open(members=3)
    say(gateway, renderer, "156.", "Yes.", "No.", "157.", "158.")
    messages = await ask(gateway, sessions[0], [ASK])
    await ask(gateway, sessions[0], [*messages, MORE])
    await ask(gateway, sessions[0], [*messages, {"role": "user", "content": "Wrong?"}])
    for session in sessions[1:]:
        await ask(gateway, session, [ASK])
    for session, reward in zip(sessions, (1.0, 0.5, 0.0), strict=True):
        await gateway.finish(session, reward)
    assert await exported(run, "--pairs") == 0
    [row] = rows(run)
    assert row["chosen"][0]["content"] == "157."
    assert row["rejected"][0]["content"] == "158."
    assert (
        "1  it has several trajectories, or replies that are not trained"
        in capsys.readouterr().out
    )


def turns_of(run: RecordedRun, session: Session) -> list[Turn]:
    with contextlib.closing(RunStore(run.folder.store_path)) as store:
        return store.turns(session.id)
