"""A run that ends before its last step leaves its newest weights, and says where they
are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from invrl.errors import TrainError
from invrl.run.checkpoints.checkpoint import check_served
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.unsaved_weights import save_unsaved_weights
from invrl.types.file_entry import FileEntries


class EndedTrainer:
    """Has trained so many batches; its weights are their number."""

    def __init__(self, batches: int, *, dead: bool = False) -> None:
        self._batches = batches
        self._dead = dead
        self.busy: asyncio.Event | None = None

    async def batches_trained(self) -> int:
        if self.busy is not None:
            await self.busy.wait()
        if self._dead:
            raise TrainError("trainer rank 0 died\nand a traceback")
        return self._batches

    async def export_hugging_face(self, path: str) -> FileEntries:
        Path(path).mkdir()
        (Path(path) / "model.safetensors").write_text(str(self._batches))
        return {}

    async def save_checkpoint(self, path: str) -> FileEntries:
        Path(path).mkdir()
        (Path(path) / "state").write_text(str(self._batches))
        return {}


async def ended(
    trainer: EndedTrainer,
    checkpoints: Checkpoints,
    *,
    begun_at: int = 0,
    within_s: float = 120.0,
) -> list[str]:
    notes: list[str] = []
    await save_unsaved_weights(
        cast(Any, trainer),
        checkpoints,
        first_step=begun_at,
        timeout_s=within_s,
        note=notes.append,
    )
    return notes


async def test_interrupted_run_saves_weights_newer_than_its_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    *_, where = await ended(EndedTrainer(5), checkpoints)
    model = tmp_path / "model-000005"
    assert (model / "model.safetensors").read_text() == "5"
    check_served(model)
    assert f"model of step 5: {model}" in where
    assert "there is no checkpoint to resume from" in where


async def test_an_interrupted_run_resumes_from_the_step_that_it_had_reached(
    tmp_path: Path,
) -> None:
    """Before its first checkpoint too."""

    async def take_snapshot(step: int) -> bytes:
        return b"after step %d" % step

    notes: list[str] = []
    await save_unsaved_weights(
        cast(Any, EndedTrainer(2)),
        Checkpoints(tmp_path),
        first_step=0,
        timeout_s=120.0,
        note=notes.append,
        take_snapshot=take_snapshot,
    )
    newest = Checkpoints(tmp_path).newest_whole(pytest.fail, tmp_path / "no model")
    assert newest is not None
    assert newest.step == 2
    assert newest.buffer.read_bytes() == b"after step 2"
    assert (newest.megatron / "state").read_text() == "2"
    assert "a run resumes from step 2" in notes[-1]


async def test_the_weights_are_saved_alone_where_the_buffer_has_died(
    tmp_path: Path,
) -> None:
    async def no_answer(_step: int) -> bytes:
        raise TrainError("the buffer died")

    await save_unsaved_weights(
        cast(Any, EndedTrainer(2)),
        Checkpoints(tmp_path),
        first_step=0,
        timeout_s=120.0,
        note=lambda _: None,
        take_snapshot=no_answer,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model-000002"]


async def test_unsaved_steps_count_from_the_incarnations_first_checkpoint(
    tmp_path: Path,
) -> None:
    before = Checkpoints(tmp_path)
    await before.save(cast(Any, EndedTrainer(4)), 4, b"")
    *_, where = await ended(EndedTrainer(3), Checkpoints(tmp_path), begun_at=4)
    assert (tmp_path / "model-000007" / "model.safetensors").read_text() == "3"
    assert "a run resumes from step 4" in where


async def test_weights_that_are_already_saved_are_only_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    saved = await checkpoints.save(cast(Any, EndedTrainer(5)), 5, b"")
    (where,) = await ended(EndedTrainer(5), checkpoints)
    assert str(saved.hugging_face) in where
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005"]


async def test_run_without_a_step_saves_and_prints_nothing(tmp_path: Path) -> None:
    assert await ended(EndedTrainer(0), Checkpoints(tmp_path), begun_at=4) == []
    assert list(tmp_path.iterdir()) == []


async def test_model_of_a_lost_incarnation_at_the_same_step_is_replaced(
    tmp_path: Path,
) -> None:
    await ended(EndedTrainer(6), Checkpoints(tmp_path))
    await ended(EndedTrainer(2), Checkpoints(tmp_path), begun_at=4)
    assert (tmp_path / "model-000006" / "model.safetensors").read_text() == "2"


async def test_dead_trainer_is_reported_in_one_line_with_the_saved_model(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.save_model(cast(Any, EndedTrainer(3)), 3)
    reason, where = await ended(EndedTrainer(4, dead=True), checkpoints)
    assert reason == "the newest weights could not be saved: trainer rank 0 died"
    assert str(tmp_path / "model-000003") in where


async def test_saving_waits_for_the_running_batch(tmp_path: Path) -> None:
    trainer = EndedTrainer(5)
    trainer.busy = asyncio.Event()
    saving = asyncio.create_task(ended(trainer, Checkpoints(tmp_path)))
    await asyncio.sleep(0)
    assert not saving.done()
    trainer.busy.set()
    await saving
    assert (tmp_path / "model-000005").is_dir()


async def test_saving_waits_for_the_running_batch_only_until_its_deadline(
    tmp_path: Path,
) -> None:
    trainer = EndedTrainer(5)
    trainer.busy = asyncio.Event()
    (reason,) = await ended(trainer, Checkpoints(tmp_path), within_s=0.0)
    assert reason == "the newest weights could not be saved: not within 0 s"


async def test_interrupt_during_the_commit_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on: whoever cancelled finds the folder as it will stay."""
    checkpoints = Checkpoints(tmp_path)
    loop = asyncio.get_running_loop()
    commit = checkpoints.commit
    saving: asyncio.Task[object] | None = None

    def interrupted(filled: Any, written: FileEntries) -> Any:
        assert saving is not None
        loop.call_soon_threadsafe(saving.cancel)
        return commit(filled, written)

    monkeypatch.setattr(checkpoints, "commit", interrupted)
    saving = asyncio.create_task(checkpoints.save(cast(Any, EndedTrainer(5)), 5, b""))
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    (where,) = await ended(EndedTrainer(5), checkpoints)
    assert str(tmp_path / "step-000005" / "hugging_face") in where
