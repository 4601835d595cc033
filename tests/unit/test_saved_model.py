"""The weights of a step are saved before its optimizer's state, and stay where that
cannot be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from crash_at import CrashAt
from folder_trainer import NO_MODEL, FolderTrainer, names, trainer

from invrl.errors import ConfigError, TrainError
from invrl.run.checkpoints.checkpoint import check_served, first_checkpoint
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.store.manifest import check_manifest


async def test_failure_while_saving_the_optimizer_leaves_the_saved_model(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TrainError):
        await checkpoints.save(trainer(fails_in="save_checkpoint"), 7, b"the buffer")
    model = tmp_path / "model-000007"
    assert (model / "model.safetensors").read_text() == "weights"
    check_manifest(model)
    check_served(model)
    again = Checkpoints(tmp_path)
    assert again.newest_model() == model
    assert again.latest() is None
    assert again.newest_whole(print, NO_MODEL) is None
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        first_checkpoint(str(model))


async def test_partial_model_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TrainError):
        await checkpoints.save(trainer(fails_in="export_hugging_face"), 7)
    assert checkpoints.newest_model() is None
    await checkpoints.save_model(trainer(), 8)
    assert names(tmp_path) == ["model-000008"]


async def test_finished_checkpoint_takes_over_the_saved_model(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.save_model(trainer("older"), 3)
    saved = await checkpoints.save(trainer(), 7, b"the buffer")
    assert names(tmp_path) == ["step-000007"]
    assert names(saved.path) == [
        "buffer.json",
        "hugging_face",
        "manifest.json",
        "megatron",
    ]
    assert names(saved.hugging_face) == ["model.safetensors"]
    saved.check(NO_MODEL)
    check_served(saved.hugging_face)
    assert checkpoints.newest_model() == saved.hugging_face


async def test_files_are_copied_where_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    saved = await Checkpoints(tmp_path).save(trainer(), 7)
    assert (saved.hugging_face / "model.safetensors").read_text() == "weights"


async def test_model_newer_than_the_last_checkpoint_is_kept_until_passed(
    tmp_path: Path,
) -> None:
    """An incarnation saved its weights at step 7 and ended; the next one went on from
    step 4."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    await checkpoints.save(trainer("four"), 4)
    model = await checkpoints.save_model(trainer("seven"), 7)
    assert checkpoints.newest_model() == model
    await checkpoints.save(trainer("six"), 6)
    assert names(tmp_path) == ["model-000007", "step-000006"]
    await checkpoints.save(trainer("eight"), 8)
    assert names(tmp_path) == ["step-000008"]


async def test_a_model_of_a_lost_incarnation_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.save_model(trainer("lost"), 7)
    model = await checkpoints.save_model(trainer("new"), 7)
    assert (model / "model.safetensors").read_text() == "new"
    assert names(tmp_path) == ["model-000007"]


@pytest.mark.parametrize("crash_at", range(1, 12))
async def test_a_crash_at_any_call_leaves_a_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """The model of step 4 is written over one of a lost incarnation; the crash comes at
    the n-th flush, rename or removal."""
    await Checkpoints(tmp_path).save_model(trainer("two"), 2)
    await Checkpoints(tmp_path).save_model(trainer("old four"), 4)
    await Checkpoints(tmp_path).save_model(trainer("five"), 5)
    crash = CrashAt(crash_at)
    monkeypatch.setattr("os.fsync", crash.within(os.fsync))
    monkeypatch.setattr(Path, "rename", crash.within(Path.rename))
    monkeypatch.setattr("shutil.rmtree", crash.within(shutil.rmtree))
    try:
        await Checkpoints(tmp_path).save_model(trainer("new four"), 4)
    except KeyboardInterrupt:
        pass
    else:
        assert crash.calls < crash_at
    assert Checkpoints(tmp_path).newest_model() == tmp_path / "model-000005"
    for model in Checkpoints(tmp_path).models():
        check_served(model)


async def test_a_damaged_model_is_not_served(tmp_path: Path) -> None:
    model = await Checkpoints(tmp_path).save_model(trainer(), 7)
    (model / "model.safetensors").write_text("weighty")
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_served(model)


def test_foreign_manifest_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "downloaded").mkdir()
    (tmp_path / "downloaded" / "manifest.json").write_text("[]")
    check_served(tmp_path / "downloaded")


async def test_model_is_written_before_the_checkpoint(tmp_path: Path) -> None:
    writes = FolderTrainer()
    await Checkpoints(tmp_path).save(cast(Any, writes), 1)
    assert writes.calls == ["export_hugging_face", "save_checkpoint"]
