"""`invrl export-data`: the best rollouts of a run as a file to train on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from recorded_run import RecordedRun, record_run
from test_chat_tools import CALC, PARSERS, SHELL, say
from test_gateway_turns import Running, running
from test_samples import rows_of
from tiny_model import make_tiny_model

from invrl.buffer.training_samples import rows_of as training_rows
from invrl.cli import main as cli
from invrl.datasets.config import Kind
from invrl.datasets.rows import load_rows
from invrl.datasets.samples import RowTokenizer
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Message
from invrl.reasons import DropReason, FailureReason
from invrl.store.run_store import RunStore
from invrl.types import TrainSample

ASK = {"role": "user", "content": "What is 12*13?"}
MORE = {"role": "user", "content": "Sure? ünïcödé 🙂"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return load_renderer(str(model), 512)


@pytest.fixture
def run(tmp_path: Path, model: Path, renderer: Renderer) -> RecordedRun:
    return record_run(tmp_path, model=model, renderer=renderer)


def export(run: RecordedRun, *flags: str) -> int:
    out = run.folder.path.parent / "data.jsonl"
    return cli.main(["export-data", str(run.folder.path), "--out", str(out), *flags])


def rows(run: RecordedRun) -> list[dict]:
    return [json.loads(line) for line in (run.folder.path.parent / "data.jsonl").read_text().splitlines()]


def replies(run: RecordedRun) -> list[str]:
    """The last message of each row."""
    return [row["messages"][-1]["content"] for row in rows(run)]


def samples_of_file(run: RecordedRun, renderer: Renderer, kind: Kind) -> list[TrainSample]:
    """What `invrl train --data-path` trains of the file."""
    tokenizer = RowTokenizer(renderer=renderer, kind=kind, max_tokens=4096, overlong="refuse")
    file = str(run.folder.path.parent / "data.jsonl")
    return [sample for row in load_rows("data.data_path", file, kind) for sample in tokenizer.samples(row)]


def recorded_samples(run: RecordedRun, rollout_id: str) -> list[TrainSample]:
    """What the run trains of the rollout."""
    store = RunStore(run.folder.store_path)
    try:
        return training_rows(store.rollout(rollout_id))
    finally:
        store.close()


def assert_same_tokens(written: list[TrainSample], recorded: list[TrainSample]) -> None:
    for of_file, of_run in zip(written, recorded, strict=True):
        assert of_file.tokens_T.tolist() == of_run.tokens_T.tolist()
        assert of_file.loss_mask_T.tolist() == of_run.loss_mask_T.tolist()
        assert of_run.loss_mask_T.any()


# ------------------------------------------------------------------ which rollouts


def test_the_best_rollout_of_each_task_is_written_and_all_are_counted(
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
    assert "2 conversations of 2 rollouts of 2 tasks, rewards 0.5 to 1, mean 0.750" in out
    assert "2  exactly the ids that were sampled" in out
    assert "left out: 3 rollouts" in out
    for reason in ("not among the best of its task", "it failed", "held out or served, not of training"):
        assert f"1  {reason}" in out
    first = rows(run)[0]
    assert (first["task_id"], first["rollout_id"], first["reward"], first["step"]) == ("1+1", best, 1.0, 1)
    assert_same_tokens(samples_of_file(run, renderer, "conversations")[:1], recorded_samples(run, best))


def test_epochs_of_a_task_are_one_task_and_newer_weights_come_first(run: RecordedRun) -> None:
    run.add("a", "old", 1.0, step=1)
    run.add("a@1", "new", 1.0, step=2)
    run.add("a@2", "worse", 0.5, step=3)
    assert export(run) == 0
    assert replies(run) == ["new"]
    assert export(run, "--best", "2", "--overwrite") == 0
    assert replies(run) == ["new", "old"]
    assert export(run, "--best=0", "--overwrite") == 0
    assert replies(run) == ["new", "old", "worse"]


def test_a_conversation_is_written_once_however_often_it_was_sampled(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        run.add("a", "same", 1.0, index=index)
    run.add("a", "other", 0.5, index=3)
    assert export(run, "--best", "2") == 0
    assert replies(run) == ["same", "other"]
    assert "2  the same tokens as another rollout of its task" in capsys.readouterr().out


def test_rewards_and_steps_limit_what_is_written(
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


def test_the_next_best_rollout_takes_the_place_of_one_that_cannot_be_written(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "cut off", 1.0, index=0, ending="length")
    run.add("a", "whole", 0.5, index=1)
    assert export(run) == 0
    assert replies(run) == ["whole"]
    assert "1  a reply was cut at its token limit" in capsys.readouterr().out


def test_what_a_lost_incarnation_did_is_left_out(
    run: RecordedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add("a", "kept", 0.5, step=1)
    kept = run.sequence
    run.add("b", "lost", 1.0, step=2)
    run.ledger.begin(parent=1, step=1, sequence=kept)
    assert export(run) == 0
    assert replies(run) == ["kept"]
    assert "1  a later incarnation of the run resumed from before it" in capsys.readouterr().out


# ------------------------------------------------------------------ pairs


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
    assert [message["content"] for message in row["chosen"]] == ["hm", "Go on.", "right"]
    assert row["rejected"] == [{"role": "assistant", "content": "wrong"}]
    assert (row["rollout_id"], row["rejected_rollout_id"]) == (good, bad)
    assert (row["reward"], row["rejected_reward"]) == (1.0, 0.0)
    assert "1 pair of 2 rollouts of 1 task" in out
    assert "1  neither the best nor the worst of its group" in out
    assert "2  all rewards of its group are equal" in out
    assert "1  no other rollout of its group finished" in out
    assert "left out: 4 rollouts" in out
    recorded = [*recorded_samples(run, good), *recorded_samples(run, bad)]
    assert_same_tokens(samples_of_file(run, renderer, "pairs"), recorded)


def test_of_the_groups_of_a_task_the_one_with_the_largest_difference_comes_first(run: RecordedRun) -> None:
    for name, rewards in (("a", (0.5, 0.0)), ("a@1", (1.0, 0.0)), ("a@2", (1.0, 0.5))):
        for index, reward in enumerate(rewards):
            run.add(name, f"{name} {index}", reward, index=index)
    assert export(run, "--pairs") == 0
    assert [row["task_id"] for row in rows(run)] == ["a@1"]
    assert export(run, "--pairs", "--best", "0", "--overwrite") == 0
    assert [row["task_id"] for row in rows(run)] == ["a@1", "a", "a@2"] or [
        row["task_id"] for row in rows(run)
    ] == ["a@1", "a@2", "a"]
    assert export(run, "--pairs", "--best", "0", "--min-reward", "0.75", "--overwrite") == 0
    assert {row["task_id"] for row in rows(run)} == {"a@1", "a@2"}


def test_a_side_that_cannot_be_written_gives_its_place_to_the_next(
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


# ------------------------------------------------------------------ bad input


def refused(run: RecordedRun, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert export(run, *flags) == 2
    assert not (run.folder.path.parent / "data.jsonl.partial").exists()
    return capsys.readouterr().err


def test_bad_input_is_named_and_nothing_is_written(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no rollout of this run has ended yet" in refused(run, capsys)
    run.add("a", "x", 0.0, failure=FailureReason.TIMEOUT)
    assert "nothing to write: 1 rollouts: it failed" in refused(run, capsys)
    run.add("a", "equal", 1.0, index=1, group="g")
    run.add("a", "equal too", 1.0, index=2, group="g")
    assert "2 rollouts: all rewards of its group are equal" in refused(run, capsys, "--pairs")
    assert "2 rollouts: its reward is too low" in refused(run, capsys, "--min-reward", "2")
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
    assert cli.main(["export-data", str(tmp_path), "--out", str(tmp_path / "f.jsonl")]) == 2
    assert "not a run folder" in capsys.readouterr().err
    run.folder.store_path.rename(tmp_path / "away.sqlite")
    assert export(run) == 1
    assert "it is missing" in capsys.readouterr().err


def test_a_file_that_exists_is_replaced_only_if_told(
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


def test_a_model_that_has_moved_can_be_named(
    tmp_path: Path, model: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path, model=tmp_path / "moved", renderer=renderer)
    run.add("a", "x", 1.0)
    assert "the run's model is not there any more" in refused(run, capsys)
    assert export(run, "--model-path", str(model)) == 0
    assert replies(run) == ["x"]


def test_a_run_that_goes_on_is_read_and_not_changed(run: RecordedRun) -> None:
    run.add("a", "first", 1.0, step=None)
    before = rows_of(run.folder.store_path)
    assert export(run) == 0
    assert rows_of(run.folder.store_path) == before
    run.add("b", "second", 1.0)  # the writer was not disturbed
    assert export(run, "--overwrite") == 0
    assert replies(run) == ["first", "second"]


def test_messages_that_were_not_recorded_or_are_no_text_of_the_ids_are_counted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record_run(tmp_path, model=model)  # its ids are of no text
    run.add("a", "x", 1.0)
    err = refused(run, capsys)
    assert "1 rollouts: a reply does not end with the template's end of turn" in err
    assert "--inexact" in err
    assert export(run, "--inexact") == 0
    assert replies(run) == ["x"]
    assert "1  a reply does not end with the template's end of turn" in capsys.readouterr().out


# ------------------------------------------------------------------ what a gateway recorded


async def recorded_by_gateway(run: RecordedRun, tmp_path: Path, renderer: Renderer, work) -> None:
    """Runs `work(gateway)` with a gateway that writes into the run's store."""
    run.writer.close()
    folder = tmp_path / "gateway"
    folder.mkdir()
    changes = {"max_new_tokens": 256, "constrained": "skip", "store_path": str(run.folder.store_path)}
    model = Path(json.loads(json.dumps(str(tmp_path))))
    del model
    async with running(folder, MODEL_OF[renderer], renderer, PARSERS, **changes) as gateway:
        await work(gateway)


MODEL_OF: dict[Renderer, Path] = {}


@pytest.fixture(autouse=True)
def _model_of(model: Path, renderer: Renderer) -> None:
    MODEL_OF[renderer] = model


async def talk(gateway: Running, session, *asked: Mapping, **options) -> list[dict]:
    """Asks the messages one after the other, with the replies between them."""
    client = gateway.client(session)
    messages: list = []
    for message in asked:
        messages.append(message)
        answer = await client.chat.completions.create(model="tiny", messages=messages, **options)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return messages


async def test_what_a_gateway_recorded_comes_back_with_the_ids_that_were_sampled(
    run: RecordedRun, tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    ids: list[str] = []
    call = '<tool_call>\n{"name": "calc", "arguments": {"a": 12}}\n</tool_call>'

    async def work(gateway: Running) -> None:
        [session] = await gateway.open(task_id="loop")
        say(gateway, renderer, "Let me see." + call, "It is 156.", "Yes, ünïcödé.")
        client = gateway.client(session)
        messages: list = [{"role": "system", "content": "Be brief."}, ASK]
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[CALC, SHELL])
        reply = answer.choices[0].message
        assert reply.tool_calls, reply
        messages += [
            reply.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "156"},
        ]
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[CALC, SHELL])
        messages += [answer.choices[0].message.model_dump(exclude_none=True), MORE]
        await client.chat.completions.create(model="tiny", messages=messages, tools=[CALC, SHELL])
        await gateway.finish(session)
        ids.append(session.id)

    await recorded_by_gateway(run, tmp_path, renderer, work)
    assert await asyncio.to_thread(export, run) == 0
    out = capsys.readouterr().out
    assert "1  exactly the ids that were sampled" in out
    [row] = rows(run)
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    [made] = row["messages"][2]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 12}
    assert row["messages"][3]["tool_call_id"] == made["id"]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calc", "shell"]
    written = samples_of_file(run, renderer, "conversations")
    assert_same_tokens(written, recorded_samples(run, ids[0]))
    sampled = [int(mask.sum()) for mask in (written[0].loss_mask_T,)]
    assert sampled == [len(np.concatenate([t.sampled_ids_T for t in turns_of(run, ids[0])]))]


def turns_of(run: RecordedRun, session_id: str):
    store = RunStore(run.folder.store_path)
    try:
        return store.turns(session_id)
    finally:
        store.close()
