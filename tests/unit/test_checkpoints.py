"""Checkpoints appear whole; batches on disk are exact; a run folder goes on where its
checkpoint is."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from crash_at import CrashAt
from run_config import config

from invrl.errors import ConfigError
from invrl.run.checkpoints.checkpoint import Checkpoint, first_checkpoint
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.folder import make_run_folder
from invrl.store.batch_file import batch_path, load_batch, save_batch, saved_steps
from invrl.store.manifest import check_manifest
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.file_entry import FileEntries
from invrl.types.weights import WeightVersion


def fill(checkpoint: Checkpoint, text: str) -> None:
    checkpoint.megatron.mkdir()
    (checkpoint.megatron / "weights").write_text(text)
    checkpoint.buffer.write_text(text)


def write(checkpoints: Checkpoints, step: int, text: str = "x") -> None:
    filling = checkpoints.begin(step)
    fill(filling, text)
    checkpoints.commit(filling, {})


def test_newest_checkpoints_are_kept_and_listed_in_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (2, 4, 10):
        write(checkpoints, step)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [4, 10]


def test_uncommitted_checkpoint_does_not_count_and_the_next_save_removes_it(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 2)
    fill(checkpoints.begin(4), "half")  # the crash
    again = Checkpoints(tmp_path)
    assert [checkpoint.step for checkpoint in again.all()] == [2]
    write(again, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000002",
        "step-000003",
    ]


@pytest.mark.parametrize("crash_at", range(1, 14))
def test_crash_at_any_call_of_the_commit_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """Step 4 is written over a step 4 of a lost incarnation; the crash comes at the
    n-th flush or rename."""
    write(Checkpoints(tmp_path), 2, "two")
    write(Checkpoints(tmp_path), 4, "old four")
    crash = CrashAt(crash_at)
    monkeypatch.setattr("os.fsync", crash.within(os.fsync))
    monkeypatch.setattr(Path, "rename", crash.within(Path.rename))
    try:
        write(Checkpoints(tmp_path), 4, "new four")
    except KeyboardInterrupt:
        pass
    else:
        assert crash.calls < crash_at
    latest = Checkpoints(tmp_path).latest()
    assert latest is not None
    texts = {latest.buffer.read_text(), (latest.megatron / "weights").read_text()}
    assert texts in ({"two"}, {"old four"}, {"new four"})
    check_manifest(latest.path)  # every file is what was written


async def test_save_touches_the_disk_only_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop watches the run's processes, while old folders go and files are
    written."""
    (tmp_path / "step-000002.partial").mkdir()
    touched: dict[str, int] = {}

    def noted(name: str, real):
        def call(*arguments, **named):
            touched[name] = threading.get_ident()
            return real(*arguments, **named)

        return call

    monkeypatch.setattr("shutil.rmtree", noted("rmtree", shutil.rmtree))
    monkeypatch.setattr(Path, "mkdir", noted("mkdir", Path.mkdir))
    monkeypatch.setattr(Path, "write_bytes", noted("write_bytes", Path.write_bytes))
    monkeypatch.setattr("os.fsync", noted("fsync", os.fsync))

    class Trainer:
        async def save_checkpoint(self, path: str) -> FileEntries:
            os.mkdir(path)
            return {}

        async def export_hugging_face(self, path: str) -> FileEntries:
            os.mkdir(path)
            return {}

    saved = await Checkpoints(tmp_path).save(cast(Any, Trainer()), 4, b"the buffer")
    assert saved.buffer.read_bytes() == b"the buffer"
    assert touched.keys() == {"rmtree", "mkdir", "write_bytes", "fsync"}
    assert threading.get_ident() not in touched.values()


@pytest.mark.parametrize("given", ["nowhere", "step-000004.partial", "other"])
def test_folder_that_is_not_a_checkpoint_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / given).mkdir()
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        first_checkpoint(str(tmp_path / given))


def random_training_batch(seed: int) -> TrainBatch:
    draw = np.random.default_rng(seed)

    def sample(length: int) -> TrainSample:
        mask_T = draw.random(length) < 0.5
        mask_T[0] = False
        return TrainSample(
            tokens_T=draw.integers(0, 9, length).astype(np.int32),
            loss_mask_T=mask_T,
            rollout_logprobs_T=np.where(mask_T, draw.normal(size=length), 0).astype(
                np.float32
            ),
            versions_T=np.where(mask_T, 3, -1).astype(np.int32),
            reward=0.1,
            temperature=0.7,
            group_id="g é",
            rollout_id="r",
            attempt=1,
            turn_ids=("a", "b"),
            experts_TLK=draw.integers(0, 255, (length, 3, 2)).astype(np.uint8)
            if length % 2
            else None,
        )

    samples = tuple(sample(length) for length in draw.integers(1, 9, 4))
    return TrainBatch(
        batch_id=1,
        version=WeightVersion(2),
        samples=samples,
        advantages=tuple(
            draw.normal(size=len(sample.tokens_T)).astype(np.float32)
            for sample in samples
        ),
    )


@pytest.mark.parametrize("seed", range(5))
def test_saved_batch_is_read_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    batch = random_training_batch(seed)
    save_batch(batch_path(tmp_path, 1), batch)
    again = load_batch(batch_path(tmp_path, 1))
    for field in ("batch_id", "version", "trained"):
        assert getattr(again, field) == getattr(batch, field)
    for sample, other in zip(batch.samples, again.samples, strict=True):
        for field in TrainSample.__slots__:
            mine = getattr(sample, field)
            read = getattr(other, field)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == read.dtype
                assert mine.shape == read.shape
                assert mine.tobytes() == read.tobytes()
            else:
                assert mine == read
    for mine, read in zip(batch.advantages, again.advantages, strict=True):
        assert mine.dtype == read.dtype
        assert mine.tobytes() == read.tobytes()


def test_truncated_batch_file_is_refused(tmp_path: Path) -> None:
    path = batch_path(tmp_path, 1)
    save_batch(path, random_training_batch(0))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="not a whole batch file"):
        load_batch(path)


def test_saved_steps_must_follow_the_checkpoint(tmp_path: Path) -> None:
    for step in (3, 4, 6):
        save_batch(batch_path(tmp_path, step), random_training_batch(0))
    with pytest.raises(ConfigError, match="the next batch must be that of step 1"):
        saved_steps(tmp_path, after_step=0)
    with pytest.raises(ConfigError, match="the next batch must be that of step 3"):
        saved_steps(tmp_path, after_step=2)
    (tmp_path / "step-000006.batch").unlink()
    assert saved_steps(tmp_path, after_step=2) == [3, 4]


class TestRunFolderGoesOn:
    def test_metrics_of_lost_steps_are_removed(self, tmp_path: Path) -> None:
        folder = make_run_folder(config(tmp_path, "one"))
        rows = [json.dumps({"step": step, "time": 1.0}) for step in range(6)]
        folder.metrics_path.write_text("\n".join([*rows, '{"step": 6, "ti']))
        folder.rewind_metrics(3)
        steps = [
            json.loads(line)["step"]
            for line in folder.metrics_path.read_text().splitlines()
        ]
        assert steps == [0, 1, 2, 3]

    def test_second_driver_of_a_run_folder_is_refused(self, tmp_path: Path) -> None:
        folder = make_run_folder(config(tmp_path, "one"))
        with (
            folder.held("a"),
            pytest.raises(ConfigError, match=r"\(invrl a\) works"),
            folder.held("b"),
        ):
            pass
        with folder.held("c"):
            pass
