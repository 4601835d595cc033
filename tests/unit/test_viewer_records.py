"""What a run records for the page: trained tokens, the timeline, its tokenizer; and
runs that go on."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from indexed_run import closed, notes_of, refreshed, rollout_rows, view_of
from recorded_run import record_run

from invrl.store.rows import TOP_COLUMNS, top_values
from invrl.store.timeline_file import (
    EngineSample,
    GatewaySample,
    IncarnationStart,
    Sample,
    Span,
    TimelineWriter,
)
from invrl.store.trained_tokens import TrainedTurn, tokens_path, write_trained_tokens
from invrl.types.top_logprobs import NO_TOKEN, TopLogprobs
from invrl.types.turns import Segment
from invrl.viewer.conversation_page import rollout_detail
from invrl.viewer.page_server import encoded
from invrl.viewer.rollout_queries import EVERY_ROW
from invrl.viewer.run_pages import (
    configurations_page,
    evaluations_page,
    timeline_page,
)
from invrl.viewer.turn_tokens import turn_tokens
from invrl.viewer.viewed_run import ViewedRun, open_runs


def trained_turn(turn_id: str, length: int) -> TrainedTurn:
    """All tokens but the last are trained, with an advantage of 0.5; the trainer says
    -0.25 everywhere."""
    trained_N = np.ones(length, np.bool_)
    trained_N[-1] = False
    logprobs_N = np.full(length, -0.25, np.float32)
    logprobs_N[-1] = np.nan
    return TrainedTurn(
        turn_id=turn_id,
        trained_N=trained_N,
        advantages_N=np.where(trained_N, 0.5, 0.0).astype(np.float32),
        logprobs_N=logprobs_N,
    )


def test_viewer_shows_advantages_and_gaps_of_trained_tokens(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", ["one", "two"], 1.0, step=3)
    other = recorded.add("b", "x", 1.0, step=3)
    run = view_of(recorded.folder.path, tmp_path / "cache")
    first_id = f"{session}/0"
    tokens = turn_tokens(run, first_id, full=False)
    assert tokens
    assert tokens["sampled"]["advantages"] is None, "nothing is recorded yet"
    length = len(tokens["sampled"]["ids"])

    write_trained_tokens(
        recorded.folder.trained_tokens_path, 3, [trained_turn(first_id, length)]
    )
    refreshed(run)
    by_id = {row["session_id"]: row for row in rollout_rows(run)}
    assert by_id[session]["advantage"] == pytest.approx(0.5)
    assert by_id[session]["gap"] == pytest.approx(0.25), "the engine's log-probs are 0"
    assert by_id[other]["advantage"] is None
    tokens = turn_tokens(run, first_id, full=False)
    assert tokens
    assert tokens["step"] == 3
    assert tokens["sampled"]["trained"] == [True] * (length - 1) + [False]
    assert tokens["sampled"]["advantages"][0] == 0.5
    assert json.loads(encoded(tokens))["sampled"]["trainer_logprobs"][-2:] == [
        -0.25,
        None,
    ]
    detail = rollout_detail(run, session, full=False)
    assert detail
    assert [turn["trained"] for turn in detail["turns"]] == [True, False]
    assert [turn["restarts"] for turn in detail["turns"]] == [True, False]
    assert [entry["state"] for entry in detail["ledger"]][-1] == "trained"
    assert detail["ledger"][-1]["step"] == 3


def test_page_of_a_rollout_has_the_engines_of_its_moved_turns(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    segments = (
        Segment(engine="engine-0.ab", start=0, end=2),
        Segment(engine="engine-1.cd", start=2, end=3),
    )
    moved = recorded.add("a", "one", 1.0, segments=segments)
    stayed = recorded.add("b", "two", 1.0)
    run = view_of(closed(recorded), tmp_path / "cache")
    shown = {}
    for session in (moved, stayed):
        detail = json.loads(encoded(rollout_detail(run, session, full=False)))
        [turn] = detail["turns"]
        shown[session] = turn["segments"]
    assert shown[stayed] == []
    assert shown[moved] == [
        {"engine": "engine-0.ab", "start": 0, "end": 2},
        {"engine": "engine-1.cd", "start": 2, "end": 3},
    ]


def test_damaged_token_record_becomes_a_note(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "one", 1.0, step=1)
    folder = recorded.folder.trained_tokens_path
    folder.mkdir()
    tokens_path(folder, 1).write_bytes(b"torn")
    run = view_of(closed(recorded), tmp_path / "cache")
    tokens = turn_tokens(run, f"{session}/0", full=False)
    assert tokens
    assert tokens["sampled"]["advantages"] is None
    assert any("damaged" in note for note in tokens["notes"])


class NamedTokens:
    """A reader to whom token 7 is "<7>"."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in ids]


def test_viewer_shows_the_top_tokens_of_each_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "one", 1.0)
    without = recorded.add("b", "two", 1.0)
    folder = closed(recorded)
    run = view_of(folder, tmp_path / "cache")
    monkeypatch.setattr(run, "token_reader", NamedTokens)
    turn_id = f"{session}/0"
    sampled = turn_tokens(run, turn_id, full=False)
    assert sampled
    assert sampled["sampled"]["candidates"] is None
    length = len(sampled["sampled"]["ids"])

    ids_TK = np.tile(np.arange(30, dtype=np.int32), (length, 1))
    logprobs_TK = np.tile(-np.arange(30, dtype=np.float32), (length, 1))
    ids_TK[1, 2:] = NO_TOKEN
    logprobs_TK[1, 2:] = -np.inf
    put_top_logprobs(
        folder, turn_id, TopLogprobs(ids_TK=ids_TK, logprobs_TK=logprobs_TK)
    )
    tokens = turn_tokens(run, turn_id, full=True)
    assert tokens
    candidates = json.loads(encoded(tokens))["sampled"]["candidates"]
    assert candidates["ids"][0] == list(range(20))
    assert candidates["logprobs"][0] == [-float(rank) for rank in range(20)]
    assert candidates["ids"][1] == [0, 1]
    assert candidates["logprobs"][1] == [0.0, -1.0]
    assert candidates["texts"]["19"] == "<19>"
    assert candidates["recorded"] == 30
    assert candidates["shown"] == 20
    other = turn_tokens(run, f"{without}/0", full=False)
    assert other
    assert other["sampled"]["candidates"] is None


def test_damaged_record_of_top_tokens_becomes_a_note(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session = recorded.add("a", "one", 1.0)
    turn_id = f"{session}/0"
    folder = closed(recorded)
    put_top_logprobs(folder, turn_id, TopLogprobs.none(1, 2))
    tokens = turn_tokens(view_of(folder, tmp_path / "cache"), turn_id, full=False)
    assert tokens
    assert tokens["sampled"]["candidates"] is None
    assert any("another number of tokens" in note for note in tokens["notes"])
    with contextlib.closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        db.execute("UPDATE top_logprobs SET ids=x'00'")
    tokens = turn_tokens(view_of(folder, tmp_path / "cache"), turn_id, full=False)
    assert tokens
    assert any("cannot be read" in note for note in tokens["notes"])


def put_top_logprobs(folder: Path, turn_id: str, top: TopLogprobs) -> None:
    with contextlib.closing(sqlite3.connect(folder / "run.sqlite")) as db, db:
        sql = f"INSERT INTO top_logprobs ({TOP_COLUMNS}) VALUES (?,?,?,?)"
        db.execute(sql, top_values(turn_id, top))


def test_viewer_shows_timeline_and_process_samples(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    folder = recorded.folder.path
    writer = TimelineWriter(folder)
    writer.write(IncarnationStart(time=1.0, pid=7, step=0, restart=False))
    writer.write(
        Span(
            lane="driver", name="train", step=1, start=2.0, end=4.0, waits_for="trainer"
        )
    )
    writer.write(Span(lane="sync", name="sync", step=1, start=4.0, end=5.0))
    engine = EngineSample(name="engine-0", running=3, waiting=1, kv_use=0.5)
    gateway = GatewaySample(requests=4, loop_lag_s=0.1)
    writer.write(
        Sample(time=6.0, engines=(engine,), gateway=gateway, memory={"driver": 5})
    )
    writer.close()
    run = view_of(folder, tmp_path / "cache")
    page = json.loads(encoded(timeline_page(run)))
    assert [span["lane"] for span in page["spans"]] == ["driver", "sync"]
    assert page["spans"][0]["waits_for"] == "trainer"
    assert page["starts"] == [{"time": 1.0, "pid": 7, "step": 0, "restart": False}]
    assert page["now"] is None
    [sample] = page["samples"]
    assert sample["engines"][0]["kv_use"] == 0.5
    assert sample["memory"] == {"driver": 5}


def test_run_is_live_while_its_folder_is_locked(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.folder.phase_path.write_text(
        '{"pid": 1, "step": 4, "phase": "rollout", "since": 9.5}'
    )
    run = view_of(recorded.folder.path, tmp_path / "cache")
    assert run.overview()["state"] == "interrupted"
    with recorded.folder.held("train"):
        overview = run.overview()
        assert overview["state"] == "running"
        assert overview["phase"] == "rollout"
        assert timeline_page(run)["now"] == {
            "phase": "rollout",
            "step": 4,
        }
        with pytest.raises(Exception, match="works in"):
            recorded.folder.check_free()
    recorded.folder.log_path("driver").write_text(
        "Traceback (most recent call last):\nValueError\n"
    )
    assert run.overview()["state"] == "failed"
    recorded.folder.finished_path.write_text("4")
    assert run.overview()["state"] == "ended"


def test_evaluations_have_intervals_and_tasks(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "x", 0.0, purpose="eval", step=0)
    recorded.add("a", "x", 1.0, purpose="eval", step=4)
    recorded.add("b", "x", 1.0, purpose="eval", step=4)
    row = {
        "step": 4,
        "time": 1.0,
        "eval/greedy/samples": 2,
        "eval/greedy/accuracy": 0.5,
        "eval/greedy/accuracy_low": 0.1,
        "eval/greedy/pass_at_1": 0.5,
        "eval/greedy/pass_at_1_high": 0.9,
        "eval/loss": 3.0,
    }
    recorded.folder.metrics_path.write_text(json.dumps(row) + "\n")
    page = evaluations_page(view_of(closed(recorded), tmp_path / "cache"), EVERY_ROW)
    [score] = page["scores"]
    assert score["name"] == "greedy"
    assert score["samples"] == 2
    assert score["accuracy_low"] == 0.1
    assert score["pass_at"] == {"1": [0.5, None, 0.9]}
    first = page["tasks"]["rows"][0]
    assert first["task_id"] == "a"
    assert first["by_step"] == {"0": [0.0], "4": [1.0]}
    assert first["gain"] == 1.0


def gains_of(run: ViewedRun, steps: Sequence[int]) -> list[dict[str, object]]:
    """From evaluations at these steps, the accuracy rising from 0 to 1."""
    rows = [
        {
            "step": step,
            "time": 1.0,
            "eval/greedy/accuracy": float(step == steps[-1]),
            "eval/greedy/accuracy_low": 0.8,
            "eval/greedy/accuracy_high": 1.0,
        }
        for step in steps
    ]
    run.folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return evaluations_page(refreshed(run), EVERY_ROW)["gains"]


def test_a_gain_is_paired_over_the_same_tasks(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    for number in range(8):
        recorded.add(f"t{number}", "x", 0.0, purpose="eval", step=0)
        recorded.add(f"t{number}", "x", 1.0, purpose="eval", step=4)
    run = view_of(recorded.folder.path, tmp_path / "cache")
    [gain] = gains_of(run, [0, 4])
    assert (gain["gain"], gain["gain_low"], gain["gain_high"]) == (1.0, 1.0, 1.0)
    assert gain["tasks"] == 8
    recorded.add("another", "x", 1.0, purpose="eval", step=4)
    [gain] = gains_of(run, [0, 4])
    assert (gain["gain"], gain["gain_low"]) == (1.0, None), "nothing to pair"
    [gain] = gains_of(run, [4])
    assert gain["gain"] is None, "there is one evaluation"


def test_a_run_without_evaluations_has_none(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    recorded.add("a", "one", 1.0)
    recorded.folder.metrics_path.write_text(
        '{"step": 1, "time": 1.0, "rollout/reward_mean": 0.5}\n'
    )
    run = view_of(closed(recorded), tmp_path / "cache")
    assert evaluations_page(run, EVERY_ROW) == {
        "scores": [],
        "gains": [],
        "tasks": {"total": 0, "rows": []},
    }
    assert not run.overview()["has"]["evaluations"]
    assert run.overview()["notes"] == []


def test_runs_of_the_same_name_have_different_ids_and_named_differences(
    tmp_path: Path,
) -> None:
    first = record_run(tmp_path / "a")
    second = record_run(tmp_path / "b")
    text = second.folder.config_path.read_text().replace("seed = 0", "seed = 5")
    second.folder.config_path.write_text(text)
    runs = open_runs([first.folder.path, second.folder.path], tmp_path / "cache")
    assert [run.id for run in runs] == ["run", "run-2"]
    page = configurations_page(runs)
    differences = {row["key"]: row["values"] for row in page["differences"]}
    assert differences["run.seed"] == {"run": 0, "run-2": 5}
    assert set(differences) == {"run.seed", "run.run_root"}
    assert all(notes_of(refreshed(run)) == "" for run in runs)
