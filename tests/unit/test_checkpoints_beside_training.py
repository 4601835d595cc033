"""A checkpoint that is written while the run trains on: one at a time, whole or not
there, failures told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from folder_trainer import NO_MODEL, FolderTrainer, names

from invrl.errors import TrainError
from invrl.run.checkpoints.checkpoints import Checkpoints, CopyingTrainer
from invrl.run.checkpoints.unsaved_weights import save_unsaved_weights
from invrl.types.file_entry import FileEntries


class SlowTrainer(FolderTrainer):
    """Copies at once, and writes when it is let."""

    def __init__(self, *, fails_in: str = "") -> None:
        super().__init__(fails_in=fails_in)
        self.may_write = asyncio.Event()
        self.weights = 0
        self._copied = 0
        self._model = Path()
        self._state = Path()

    async def copy_model(self, path: str) -> None:
        self._copied = self.weights
        self._model = Path(path)
        self._model.mkdir()

    async def copy_checkpoint(self, path: str) -> None:
        self._state = Path(path)
        self._state.mkdir()

    async def model_written(self) -> FileEntries:
        await self.may_write.wait()
        self._weights = f"weights {self._copied}"
        return self._write("model_written", self._model / "model.safetensors")

    async def checkpoint_written(self) -> None:
        self._entries = self._write("checkpoint_written", self._state / "state")

    async def finish_checkpoint(self) -> FileEntries:
        self.calls.append("finish_checkpoint")
        return self._entries

    async def batches_trained(self) -> int:
        return self.weights


def begin(
    checkpoints: Checkpoints, trainer: SlowTrainer, step: int
) -> asyncio.Task[None]:
    saving = checkpoints.save_beside_training(
        cast(CopyingTrainer, trainer), step, b"the buffer"
    )
    return asyncio.create_task(cast(Any, saving))


async def test_checkpoint_written_during_training_holds_the_copied_weights(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    trainer = SlowTrainer()
    trainer.weights = 4
    await begin(checkpoints, trainer, 4)
    assert checkpoints.latest() is None, "it is not whole yet"
    trainer.weights = 5
    trainer.may_write.set()
    await checkpoints.wait_until_saved()
    saved = checkpoints.newest_whole(pytest.fail, NO_MODEL)
    assert saved is not None
    assert (saved.hugging_face / "model.safetensors").read_text() == "weights 4"
    assert names(saved.path) == [
        "buffer.json",
        "hugging_face",
        "manifest.json",
        "megatron",
    ]
    assert names(tmp_path) == ["step-000004"]


async def test_second_save_waits_until_the_first_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    trainer = SlowTrainer()
    await begin(checkpoints, trainer, 4)
    trainer.weights = 8
    second = begin(checkpoints, trainer, 8)
    await asyncio.sleep(0)
    assert trainer._copied == 0, "no second copy yet"
    trainer.may_write.set()
    await second
    await checkpoints.wait_until_saved()
    written = ["model_written", "checkpoint_written", "finish_checkpoint"]
    assert trainer.calls == written * 2
    assert names(tmp_path) == ["step-000008"]


@pytest.mark.parametrize("fails_in", ["model_written", "checkpoint_written"])
async def test_failed_save_raises_in_every_waiter_and_keeps_the_previous_checkpoint(
    tmp_path: Path, fails_in: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.save(cast(Any, FolderTrainer()), 2, b"the buffer")
    watch = asyncio.create_task(checkpoints.watch())
    trainer = SlowTrainer(fails_in=fails_in)
    await begin(checkpoints, trainer, 4)
    assert not watch.done()
    trainer.may_write.set()
    for waiting in (
        watch,
        checkpoints.wait_until_saved(),
        begin(checkpoints, trainer, 6),
    ):
        with pytest.raises(TrainError, match="no memory is left"):
            await waiting
    newest = Checkpoints(tmp_path).newest_whole(pytest.fail, NO_MODEL)
    assert newest is not None
    assert newest.step == 2
    saved_models = [path.name for path in Checkpoints(tmp_path).models()]
    assert saved_models == (
        ["model-000004"] if fails_in == "checkpoint_written" else []
    )


async def test_interrupted_run_finishes_the_running_save_before_saving_newer_weights(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    trainer = SlowTrainer()
    await begin(checkpoints, trainer, 4)
    trainer.weights = 5
    asyncio.get_running_loop().call_soon(trainer.may_write.set)
    notes: list[str] = []
    await save_unsaved_weights(
        cast(Any, trainer),
        checkpoints,
        first_step=0,
        timeout_s=120.0,
        note=notes.append,
    )
    assert trainer.calls == [
        *("model_written", "checkpoint_written", "finish_checkpoint"),
        "export_hugging_face",
    ]
    assert names(tmp_path) == ["model-000005", "step-000004"]


async def test_kill_during_a_save_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    await Checkpoints(tmp_path).save(cast(Any, FolderTrainer()), 2, b"the buffer")
    checkpoints = Checkpoints(tmp_path)
    await begin(checkpoints, SlowTrainer(), 4)
    again = Checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in again.all()] == [2]
    await again.save(cast(Any, FolderTrainer()), 3, b"the buffer")
    assert names(tmp_path) == ["step-000002", "step-000003"]
