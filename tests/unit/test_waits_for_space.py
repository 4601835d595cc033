"""Whatever a run writes waits for space on a full disk: nothing is lost, nothing is
written twice, and the console has one line."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from folder_trainer import FolderTrainer, names
from small_buffer import started_on_held_ledger
from stored_rollouts import finish_lease

from invrl.buffer.ledger.ledger_store import check_lineage, read_ledger
from invrl.errors import DiskFullError, TrainError
from invrl.host.files import disk_waits
from invrl.host.files.disk import is_full, write_atomically
from invrl.host.files.disk_waits import DiskWait, until_written
from invrl.host.output.incidents import incidents_shown
from invrl.observe.sinks import token_recorder
from invrl.observe.sinks.sinks import JsonlSink, RunObserver
from invrl.observe.sinks.token_recorder import TokenRecorder
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.store.growing_file import GrowingFile
from invrl.store.metrics_file import read_metrics
from invrl.store.run_store_writer import RunStoreWriter
from invrl.store.timeline_file import Span, TimelineWriter, read_timeline
from invrl.store.trained_tokens import TrainedTurn, read_trained_tokens
from invrl.train.ranks.rank_calls import RankCalls
from invrl.types.file_entry import FileEntries
from invrl.types.weights import WeightVersion

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the console shows."""
    monkeypatch.setattr(disk_waits, "_POLL_S", 0.01)
    monkeypatch.setattr(disk_waits, "_full_disks", {})
    shown: list[str] = []
    with incidents_shown(shown.append):
        yield shown


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leaves no byte free."""
    filling = folder / "filling"
    with filling.open("wb", buffering=0) as file:
        for size in (1_000_000, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filling


class WritesThatFail:
    """`os.write` on a disk that takes `room` bytes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, content: bytes) -> int:
        if self.room <= 0:
            raise FULL
        count = self._write(descriptor, content[: self.room])
        self.room -= count
        return count


def test_a_file_on_a_full_disk_has_no_half_record_and_later_all_of_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"earlier\n")
    file = GrowingFile(path)
    disk = WritesThatFail(monkeypatch, room=6)
    file.append(b"one\n")
    file.append(b"two\n")
    file.append(b"three\n")
    assert path.read_bytes() == b"earlier\none\n"
    disk.room = 10**6
    file.append(b"four\n")
    assert path.read_bytes() == b"earlier\none\ntwo\nthree\nfour\n"
    disk.room = 0
    file.append(b"five\n")
    disk.room = 10**6
    file.close()
    assert path.read_bytes().endswith(b"four\nfive\n")
    assert ["waits for space (what belongs into rows)" in line for line in lines] == [
        True,
        False,
    ] * 2


def test_another_error_of_a_growing_file_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GrowingFile(tmp_path / "rows")

    def broken(descriptor: int, content: bytes) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="broken"):
        file.append(b"one\n")


def test_metrics_and_timeline_of_the_time_without_space_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = RunObserver([JsonlSink(tmp_path / "metrics.jsonl")])
    timeline = TimelineWriter(tmp_path)
    disk = WritesThatFail(monkeypatch, room=10**6)
    for step in range(1, 6):
        disk.room = 3 if step in (2, 3) else 10**6
        observer.step(step, {"train/loss": float(step)})
        timeline.write(
            Span(name="train", lane="trainer", step=step, start=1.0, end=2.0)
        )
    observer.close()
    timeline.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [span.step for span in read_timeline(tmp_path).spans] == [1, 2, 3, 4, 5]
    assert "logs nothing" not in capsys.readouterr().out


def test_tokens_of_the_time_without_space_are_written_with_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trained_tokens"
    turn = TrainedTurn(
        turn_id="t",
        trained_N=np.ones(1, np.bool_),
        advantages_N=np.ones(1, np.float32),
        logprobs_N=np.zeros(1, np.float32),
    )
    monkeypatch.setattr(token_recorder, "trained_turns", lambda *_: [turn])
    recorder = TokenRecorder(folder, done=0)
    full_steps = {2, 3}
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if full_steps:
            raise FULL
        replace(source, target)

    records = cast(Any, [object()])
    batch = cast(Any, None)
    monkeypatch.setattr(os, "replace", refuse)
    for step in (2, 3):
        assert recorder.record(step, batch, records) == ""
    assert names(folder) == [], "no half file"
    full_steps.clear()
    recorder.record(4, batch, records)
    assert [len(read_trained_tokens(folder, step)) for step in (2, 3, 4)] == [1, 1, 1]


def test_a_file_that_is_replaced_is_the_old_one_where_there_is_no_space(
    small_disk: Path,
) -> None:
    path = small_disk / "phase.json"
    write_atomically(path, "old")
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new" * 10_000)
    assert path.read_text(encoding="utf-8") == "old"
    assert names(small_disk) == ["filling", "phase.json"]


async def test_the_ledger_waits_for_space_and_has_every_entry_once(
    small_disk: Path,
) -> None:
    """On a real disk, with the gateway's turns in the same file."""
    path = small_disk / "run.sqlite"
    actor, held = await started_on_held_ledger(path)
    held.let_through.set()
    store = RunStoreWriter(path)
    lease = await actor.lease()
    assert lease is not None
    finish_lease(store, lease)
    batch = await actor.take(60.0)
    filling = fill(small_disk)
    with suppress(DiskFullError):
        await actor.trained(batch.batch_id)
    with suppress(DiskFullError):
        for _ in range(100):  # each of them grows the log by a page
            await actor.snapshot(WeightVersion(1))
    with pytest.raises(DiskFullError, match=f"the disk at {small_disk} is full"):
        await actor.snapshot(WeightVersion(1))
    await asyncio.sleep(0.2)
    assert await actor.metrics(), "the poller has not failed"
    actor._check_poller()
    filling.unlink()
    await actor.write_ledger()
    await actor.snapshot(WeightVersion(1))
    await actor.close()
    store.close()
    kept = read_ledger(path)
    check_lineage(kept, ended=True)
    numbers = [entry.entry.sequence for entry in kept]
    assert numbers == list(range(len(numbers)))


class FullDiskTrainer(FolderTrainer):
    """Finds no space for the optimizer's state while `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = True
        self.in_flight: dict[str, str] = {}

    async def save_checkpoint(self, path: str) -> FileEntries:
        if not self.is_full:
            return await super().save_checkpoint(path)
        Path(path).mkdir()
        (Path(path) / "state").write_bytes(b"half")
        raise DiskFullError("trainer rank 0 found no space in save_checkpoint")

    async def copy_model(self, path: str) -> None:
        self.in_flight["model"] = path

    async def copy_checkpoint(self, path: str) -> None:
        self.in_flight["state"] = path

    async def model_written(self) -> FileEntries:
        return await self.export_hugging_face(self.in_flight["model"])

    async def checkpoint_written(self) -> None: ...

    async def finish_checkpoint(self) -> FileEntries:
        return await self.save_checkpoint(self.in_flight["state"])


@pytest.mark.parametrize("beside_training", [False, True])
async def test_a_checkpoint_that_finds_no_space_leaves_nothing_and_the_next_is_tried(
    tmp_path: Path, beside_training: bool
) -> None:
    checkpoints = Checkpoints(tmp_path)
    trainer = FullDiskTrainer()
    notes: list[str] = []
    saves = CheckpointSaves(
        checkpoints,
        cast(Any, trainer),
        beside_training=beside_training,
        note=notes.append,
    )
    watch = asyncio.create_task(checkpoints.watch())
    await saves.save(1, b"the buffer")
    await saves.save(2, b"the buffer")
    await saves._end_earlier()
    trainer.is_full = False
    assert not watch.done(), "a full disk ends no run"
    assert not [name for name in names(tmp_path) if "partial" in name]
    assert checkpoints.latest() is None
    assert [note.split(" is not written")[0] for note in notes] == [
        "warning: the checkpoint of step 1",
        "warning: the checkpoint of step 2",
    ]
    await saves.save(3, b"the buffer")
    await saves.finish()
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 3
    assert names(tmp_path) == ["step-000003"]
    assert len(notes) == 2
    watch.cancel()


@pytest.mark.parametrize("beside_training", [False, True])
async def test_the_last_checkpoint_waits_for_space(
    tmp_path: Path, lines: list[str], beside_training: bool
) -> None:
    checkpoints = Checkpoints(tmp_path)
    trainer = FullDiskTrainer()
    saves = CheckpointSaves(
        checkpoints,
        cast(Any, trainer),
        beside_training=beside_training,
        note=lambda _: None,
    )
    await saves.save(4, b"the buffer")
    finishing = asyncio.create_task(saves.finish())
    done, _ = await asyncio.wait([finishing], timeout=0.3)
    assert not done
    assert sum("the checkpoint of step 4" in line for line in lines) == 1
    trainer.is_full = False
    await finishing
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.buffer.read_bytes() == b"the buffer"
    assert lines[-1] == "warning: there is space again: the run goes on"


async def test_a_checkpoint_that_cannot_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    trainer = FullDiskTrainer()
    trainer.is_full = False
    notes: list[str] = []
    saves = CheckpointSaves(
        checkpoints, cast(Any, trainer), beside_training=False, note=notes.append
    )
    await saves.save(1)
    trainer.calls.clear()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3))
    await saves.save(2)
    assert trainer.calls == [], "the ranks are not asked"
    assert "are to be written" in notes[0]


async def test_another_failure_of_a_checkpoint_ends_the_run(tmp_path: Path) -> None:
    trainer = FolderTrainer(fails_in="save_checkpoint")
    saves = CheckpointSaves(
        Checkpoints(tmp_path),
        cast(Any, trainer),
        beside_training=False,
        note=lambda _: None,
    )
    with pytest.raises(TrainError):
        await saves.save(1)


class Rank:
    name = "trainer rank 0"

    def __init__(self) -> None:
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


async def test_ranks_live_on_if_all_of_them_end_a_call_on_a_full_disk() -> None:
    ranks = [Rank(), Rank()]
    calls = RankCalls(cast(Any, ranks), heartbeat_timeout_s=30.0)

    async def fails(error: Exception) -> None:
        raise error

    with pytest.raises(DiskFullError, match="found no space in save"):
        await calls.wait("save", {0: fails(FULL), 1: fails(DiskFullError("full"))}, 9)
    assert not any(rank.is_killed for rank in ranks)
    with pytest.raises(TrainError):
        await calls.wait("save", {0: fails(FULL), 1: fails(ValueError("no"))}, 9)
    assert all(rank.is_killed for rank in ranks)


async def test_a_wait_has_one_line_repeats_it_rarely_and_ends_at_an_interrupt(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused() -> None:
        raise FULL

    waits = [
        asyncio.create_task(until_written(tmp_path, what, refused))
        for what in ("the ledger", "a batch")
    ]
    await asyncio.sleep(0.2)
    [line] = lines
    assert "; the run waits for space (the ledger)" in line
    monkeypatch.setattr(disk_waits, "_REPEAT_S", 0.0)
    DiskWait(tmp_path, "the ledger").goes_on()
    assert "(a batch, the ledger)" in lines[1]
    for wait in waits:
        wait.cancel()
    done, _ = await asyncio.wait(waits, timeout=5)
    assert len(done) == 2


async def test_what_fails_for_another_reason_waits_for_nothing(tmp_path: Path) -> None:
    async def fails() -> None:
        raise PermissionError(errno.EACCES, "not yours")

    with pytest.raises(PermissionError):
        await until_written(tmp_path, "a file", fails)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_by_its_error_or_the_cause_of_it(number: int) -> None:
    error = TrainError("rank 0 failed")
    assert not is_full(error)
    error.__cause__ = OSError(number, "full")
    assert is_full(error)
    assert not is_full(OSError(errno.EIO, "broken"))
