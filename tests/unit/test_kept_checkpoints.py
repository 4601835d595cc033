"""Which checkpoints stay: the newest, the best, and every model whose path a user was
told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from crash_at import CrashAt
from folder_trainer import NO_MODEL, names, trainer
from hypothesis import given
from hypothesis import strategies as st

from invrl.errors import ConfigError
from invrl.run.checkpoints.checkpoint import Checkpoint, check_served, keep_model
from invrl.run.checkpoints.checkpoint_scores import kept_steps, read_scores
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.config import Source, resolve

SCORES = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.9}


@pytest.mark.parametrize(
    ("newest", "best", "kept"),
    [
        (0, 1, {1, 2, 3, 4, 5}),
        (1, 0, {5}),
        (2, 1, {2, 4, 5}),
        (1, 1, {4, 5}),
        (1, 2, {2, 4, 5}),
        (1, 9, {1, 2, 3, 4, 5}),
        (9, 1, {1, 2, 3, 4, 5}),
    ],
)
def test_newest_checkpoints_and_the_best_of_the_older_ones_are_kept(
    newest: int, best: int, kept: set[int]
) -> None:
    assert kept_steps([3, 1, 5, 2, 4], newest=newest, best=best, scores=SCORES) == kept


def test_checkpoint_without_a_score_is_not_kept_as_best() -> None:
    assert kept_steps([1, 2, 3], newest=1, best=2, scores={2: -1.0}) == {2, 3}


def test_checkpoint_whose_evaluation_still_runs_is_kept_for_its_score() -> None:
    steps = [1, 2, 3, 4]
    scores = {1: 0.9}
    assert kept_steps(steps, newest=1, best=1, scores=scores, in_evaluation=2) == {
        1,
        2,
        4,
    }
    assert kept_steps(steps, newest=1, best=0, in_evaluation=2) == {4}
    assert kept_steps(steps, newest=1, best=1, scores=scores, in_evaluation=9) == {1, 4}


@given(
    st.sets(st.integers(0, 50), min_size=1),
    st.integers(1, 5),
    st.integers(0, 5),
    st.dictionaries(st.integers(0, 50), st.floats(allow_nan=False)),
)
def test_newest_checkpoint_is_always_kept(
    steps: set[int], newest: int, best: int, scores: dict[int, float]
) -> None:
    kept = kept_steps(steps, newest=newest, best=best, scores=scores)
    assert max(steps) in kept
    assert kept <= steps
    assert len(kept) <= newest + best
    removed = {scores[step] for step in steps - kept if step in scores}
    kept_for_their_scores = sorted(kept)[: -newest or None]
    if best and removed and kept_for_their_scores:
        assert min(scores[step] for step in kept_for_their_scores) >= max(removed)


def test_scores_are_read_from_the_metrics(tmp_path: Path) -> None:
    rows = [{"step": step, "rollout/reward_mean": float(step)} for step in range(1, 12)]
    rows[3] |= {
        "eval/sampled/accuracy": 0.2,
        "eval/hard/greedy/accuracy": 0.6,
        "eval/sampled/accuracy_low": 0,
    }
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12, "rollo'
    )
    assert read_scores(path, "held_out") == {4: pytest.approx(0.4)}
    rewards = read_scores(path, "reward")
    assert rewards[1] == 1.0
    assert rewards[3] == 2.0
    assert rewards[11] == sum(range(4, 12)) / 8
    assert read_scores(tmp_path / "none", "reward") == {}


def best_by(**tables: dict[str, str | int]) -> str:
    return resolve(Source(name="test", tables=tables)).best_checkpoints_by


def test_held_out_score_decides_by_default() -> None:
    assert best_by() == "reward"
    evaluated: dict[str, str | int] = {"interval": 1, "tasks": 2}
    assert best_by(eval=evaluated) == "held_out"
    assert best_by(eval=evaluated, checkpoints={"keep_best_by": "reward"}) == "reward"
    with pytest.raises(
        ConfigError, match="no checkpoint is evaluated on held-out tasks"
    ):
        best_by(checkpoints={"keep_best_by": "held_out"})


async def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        await checkpoints.save(trainer(f"weights {step}"), step, b"the buffer")


async def test_best_checkpoint_is_kept_with_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1, read_scores=lambda: SCORES)
    await save(checkpoints, 1, 2, 3)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    await save(checkpoints, 4, 5)
    assert names(tmp_path) == ["step-000004", "step-000005"]


async def test_checkpoint_is_judged_once_its_evaluation_has_ended(
    tmp_path: Path,
) -> None:
    scores = {1: 0.5}
    in_evaluation: list[int | None] = [2]
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1, read_scores=lambda: scores)
    checkpoints.step_in_evaluation = lambda: in_evaluation[-1]
    await save(checkpoints, 1, 2, 3, 4)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000004"]
    scores[2] = 0.8
    in_evaluation.append(None)
    await save(checkpoints, 5)
    assert names(tmp_path) == ["step-000002", "step-000005"]


async def test_model_in_use_is_kept_without_its_optimizer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    await save(checkpoints, 2)
    stripped = Checkpoint(step=2, path=tmp_path / "step-000002")
    keep_model(stripped.hugging_face)
    assert checkpoints.latest() == stripped
    await save(checkpoints, 4, 6)
    assert names(tmp_path) == ["step-000002", "step-000006"]
    assert names(stripped.path) == ["hugging_face", "keep-model", "manifest.json"]
    assert (stripped.hugging_face / "model.safetensors").read_text() == "weights 2"
    check_served(stripped.hugging_face)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [6]
    newest = checkpoints.newest_whole(pytest.fail, NO_MODEL)
    assert newest is not None
    assert newest.step == 6


async def test_saved_model_in_use_is_kept_when_checkpoints_pass_its_step(
    tmp_path: Path,
) -> None:
    """Also where a later incarnation saves that step again."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    model = await checkpoints.save_model(trainer("weights 3"), 3)
    keep_model(model)
    await save(checkpoints, 2, 3, 4)
    assert names(tmp_path) == ["model-000003", "step-000004"]
    check_served(model)
    assert names(tmp_path / "step-000004" / "hugging_face") == ["model.safetensors"]


@pytest.mark.parametrize("crash_at", range(1, 30))
async def test_crash_while_removing_old_checkpoints_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """Steps 1 and 3 go when 5 is saved; the model of step 3 stays."""
    await save(Checkpoints(tmp_path), 1, 2, 3)
    keep_model(tmp_path / "step-000003" / "hugging_face")
    crash = CrashAt(crash_at)
    monkeypatch.setattr("os.fsync", crash.within(os.fsync))
    monkeypatch.setattr("os.unlink", crash.within(os.unlink))
    monkeypatch.setattr("os.rmdir", crash.within(os.rmdir))
    monkeypatch.setattr(Path, "rename", crash.within(Path.rename))
    monkeypatch.setattr("shutil.rmtree", crash.within(shutil.rmtree))
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1, read_scores=lambda: SCORES)
    try:
        await save(checkpoints, 5)
    except KeyboardInterrupt:
        pass
    else:
        assert crash.calls < crash_at
        assert names(tmp_path) == ["step-000002", "step-000003", "step-000005"]
    monkeypatch.undo()
    for checkpoint in Checkpoints(tmp_path).all():
        checkpoint.check(NO_MODEL)
    check_served(tmp_path / "step-000003" / "hugging_face")
    await save(Checkpoints(tmp_path, keep=1), 6)
    assert names(tmp_path) == ["step-000003", "step-000006"]
