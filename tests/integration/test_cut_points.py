"""A run that is cut off at any moment of a checkpoint goes on as if it had never been
stopped, bit for bit.

The checkpoint of step 4 is written once. At every cut point (a byte of a file that a
rank writes, or a call with which the driver publishes and removes folders) the folder
is copied as kill -9 would leave it; then a new trainer resumes from copies. The ways to
save have much the same cut points, so each resumes from every other of its copies; the
rest must hold, byte for byte, one of the same checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rank_pool import RankPool, Trainer, take_image
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.run.checkpoints.checkpoints import Checkpoints, CopyingTrainer
from invrl.store.manifest import read_entries
from invrl.train.config import TrainConfig
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import resolve

BATCHES = [random_batch(seed, groups=2) for seed in range(1, 7)]
TRAIN = TrainConfig(
    train_dtype="float32", lr=1e-3, lr_decay_style="cosine", lr_decay_steps=8
)
CUT_OFFSETS = (0, 4_099, 300_001)
"""Bytes of every file at which the writing rank is cut off, as far as the file is so
long."""


class PoolTrainer:
    """The driver's end of ranks in the pool, while it saves. `images`: where copies of
    `folder` are put at the cut points; None: nowhere."""

    def __init__(self, trainer: Trainer, folder: Path, images: Path | None) -> None:
        self._trainer = trainer
        self._folder = folder
        self._images = images
        self._model = ""

    async def save_checkpoint(self, path: str) -> FileEntries:
        return self._write("save", path)

    async def export_hugging_face(self, path: str) -> FileEntries:
        return self._write("export", path)

    async def copy_model(self, path: str) -> None:
        self._model = path

    async def copy_checkpoint(self, path: str) -> None:
        """Nothing is written until the driver waits for it; by then the trainer has
        trained on."""
        self._trainer.each("hold_writer")
        self._trainer.each("copy", (self._model, path))

    async def model_written(self) -> FileEntries:
        return self._write("write_model", "")

    async def checkpoint_written(self) -> None:
        pass

    async def finish_checkpoint(self) -> FileEntries:
        return self._write("write_state", "")

    def _write(self, method: str, path: str) -> FileEntries:
        if self._images is None:
            return self._trainer.each(method, path)[0]
        given = (method, path, str(self._folder), str(self._images), CUT_OFFSETS)
        return self._trainer.each("write_imaged", given)[0]


@contextmanager
def driver_imaged(
    monkeypatch: pytest.MonkeyPatch, folder: Path, images: Path
) -> Iterator[None]:
    """Takes an image before each call with which the driver changes the folder, in the
    middle of each text that it writes, and at the end."""

    def before(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            take_image(folder, images, f"before-{name}")
            return real(*arguments, **named)

        return call

    write_text = Path.write_text

    def write_text_in_two(path: Path, text: str, *rest: Any, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], *rest, **options)
        take_image(folder, images, f"half-{path.name}")
        return write_text(path, text, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", before(Path.rename, "rename"))
        patched.setattr(Path, "write_bytes", before(Path.write_bytes, "snapshot"))
        patched.setattr(Path, "write_text", write_text_in_two)
        patched.setattr(os, "rmdir", before(os.rmdir, "rmdir"))
        yield
    take_image(folder, images, "end")


def state_of(trainer: Trainer) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    moments = {
        name: trainer.optimizer_state(name) for name in ("exp_avg", "exp_avg_sq")
    }
    return {"weights": trainer.weights(), **moments}


@pytest.mark.slow
@pytest.mark.parametrize("beside_training", [False, True])
async def test_run_resumes_bit_for_bit_from_a_crash_at_any_call_of_a_save(
    pool: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beside_training: bool,
) -> None:
    model = make_tiny_model(tmp_path / "model")
    folder = tmp_path / "checkpoints"
    images = tmp_path / "images"
    folder.mkdir()
    images.mkdir()
    trainer = pool.build(model, train=TRAIN)
    checkpoints = Checkpoints(folder, keep=1)

    def saving(to: Path | None) -> CopyingTrainer:
        return cast(Any, PoolTrainer(trainer, folder, to))

    for batch in BATCHES[:2]:
        trainer.train(batch)
    await checkpoints.save(saving(None), 2, b"buffer of step 2")
    for batch in BATCHES[2:4]:
        trainer.train(batch)
    with driver_imaged(monkeypatch, folder, images):
        if beside_training:
            await checkpoints.save_beside_training(
                saving(images), 4, b"buffer of step 4"
            )
        else:
            await checkpoints.save(saving(images), 4, b"buffer of step 4")
        numbers = [resolve(trainer.train(batch)) for batch in BATCHES[4:]]
        await checkpoints.wait_until_saved()
    expected = state_of(trainer)

    steps: list[int] = []
    resumed_steps: list[int] = []
    entries: dict[int, FileEntries] = {}
    for number, image in enumerate(sorted(images.iterdir())):
        checkpoint = Checkpoints(image).newest_whole(pytest.fail, model)
        assert checkpoint is not None, image.name
        assert checkpoint.buffer.read_text() == f"buffer of step {checkpoint.step}"
        steps.append(checkpoint.step)
        found_entries = read_entries(checkpoint.path)
        assert found_entries == entries.setdefault(checkpoint.step, found_entries), (
            image.name
        )
        if number % 2 != beside_training:
            continue
        resumed_steps.append(checkpoint.step)
        resumed = pool.build(model, train=TRAIN)
        resumed.each("load", str(checkpoint.megatron))
        repeated = [
            resolve(resumed.train(batch)) for batch in BATCHES[checkpoint.step :]
        ]
        for found_numbers, expected_numbers in zip(repeated[-2:], numbers, strict=True):
            for name in ("loss", "grad_norm", "lr"):
                assert found_numbers[name] == expected_numbers[name], (image.name, name)
        for kind, found in state_of(resumed).items():
            for name, tensor in found.items():
                assert tensor.tobytes() == expected[kind][name].tobytes(), (
                    image.name,
                    kind,
                    name,
                )
    assert len(steps) >= 20
    assert len(resumed_steps) >= 10
    assert set(steps) == set(resumed_steps) == {2, 4}
    assert steps == sorted(steps), "once the checkpoint of step 4 is there, it stays"
