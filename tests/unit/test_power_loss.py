"""The machine loses power: what a checkpoint names is on disk, and a store that has
lost some of it all the same costs groups, never the run. A power loss is the log as it
was earlier: commits come off its end."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stored_rollouts import finish_lease

from invrl.buffer.config import BufferConfig
from invrl.buffer.ledger.ledger_store import check_lineage, read_ledger
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.rollout.config import RolloutConfig
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter, abandon_open_sessions
from invrl.types.leases import GroupLease
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


def make_actor(path: Path) -> BufferActor:
    return BufferActor(
        BufferConfig(group_filter="none", max_staleness=3),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        tasks_factory=lambda: (Task(id=f"t{n}", payload={}) for n in itertools.count()),
        run_store_path=path,
        poll_interval_s=0.0,
    )


async def leased(actor: BufferActor) -> GroupLease:
    lease = await actor.lease()
    assert lease is not None
    return lease


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


async def run_until_checkpoint(path: Path) -> tuple[bytes, int]:
    """Groups g0 (trained), g1 and g2 (ready) and their snapshot; the log's length
    before g2's outcomes."""
    actor = make_actor(path)
    writer = RunStoreWriter(path)
    await actor.start()
    leases = [await leased(actor) for _ in range(3)]
    for lease in leases[:2]:
        finish_lease(writer, lease, turns=2)
    batch = await actor.take(120.0)
    assert [group.id for group in batch.groups] == ["g0"]
    await actor.trained(batch.batch_id)
    length = log_of(path).stat().st_size
    finish_lease(writer, leases[2], turns=2)
    while len(actor._buffer.takeable()) < 2:
        await asyncio.sleep(0.001)
    return await actor.snapshot(WeightVersion(1)), length


async def resumed(path: Path, snapshot: bytes) -> BufferActor:
    abandon_open_sessions(path)
    actor = make_actor(path)
    await actor.start(snapshot)
    await actor.advance(WeightVersion(1))
    return actor


def copied(path: Path, to: Path, *, log_length: int | None = None) -> Path:
    """The store as a power loss leaves it: the file, and what of its log was on
    disk."""
    to.mkdir()
    shutil.copy(path, to / path.name)
    log = log_of(path).read_bytes()
    log_of(to / path.name).write_bytes(log[:log_length])
    return to / path.name


async def test_groups_with_lost_turns_are_dropped_and_the_run_continues(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.sqlite"
    snapshot, before_g2 = await run_until_checkpoint(path)
    after = copied(path, tmp_path / "after", log_length=before_g2)
    actor = await resumed(after, snapshot)
    batch = await actor.take(120.0)
    assert [group.id for group in batch.groups] == ["g1"]
    ids = [rollout.session_id for group in batch.groups for rollout in group.rollouts_G]
    store = RunStore(after)
    assert [len(store.rollout(id).trajectories) for id in ids] == [1, 1]
    assert actor._buffer.events.dropped == {"tokens_lost": 1}
    await actor.trained(batch.batch_id)
    await actor.advance(WeightVersion(2))
    writer = RunStoreWriter(after)
    lease = await leased(actor)
    assert lease.group_id == "g3"
    finish_lease(writer, lease, version=2)
    batch = await actor.take(120.0)
    assert [group.id for group in batch.groups] == ["g3"]
    await actor.trained(batch.batch_id)
    await actor.close()
    dropped = [
        record.entry for record in read_ledger(after) if record.entry.reason is not None
    ]
    assert {(entry.place.group_id, str(entry.reason)) for entry in dropped} >= {
        ("g2", "tokens_lost")
    }


async def test_no_group_is_dropped_if_no_turn_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    snapshot, _ = await run_until_checkpoint(path)
    after = copied(path, tmp_path / "after")
    actor = await resumed(after, snapshot)
    for group, version in (("g1", 1), ("g2", 2)):
        batch = await actor.take(120.0)
        assert [taken_group.id for taken_group in batch.groups] == [group]
        await actor.trained(batch.batch_id)
        await actor.advance(WeightVersion(version + 1))
    await actor.close()
    assert actor._buffer.events.dropped == {}
    check_lineage(read_ledger(after), ended=True)


SNAPSHOT = """
import asyncio, sys
from pathlib import Path
from test_power_loss import run_until_checkpoint

async def main():
    snapshot, _ = await run_until_checkpoint(Path(sys.argv[1]))
    Path(sys.argv[2]).write_bytes(snapshot)

asyncio.run(main())
"""


def can_trace() -> bool:
    """strace is there, and a container lets it trace."""
    strace = shutil.which("strace")
    return (
        strace is not None
        and subprocess.run([strace, "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_trace(), reason="strace shows what is flushed to disk")
def test_store_is_flushed_after_its_last_write_and_before_the_snapshot(
    tmp_path: Path,
) -> None:
    """By the system calls of the process itself, which a test within it could not
    see."""
    path = tmp_path / "run.sqlite"
    snapshot = tmp_path / "snapshot"
    trace = tmp_path / "trace"
    tests = Path(__file__).parent
    calls = "trace=fsync,fdatasync,pwrite64,write,openat,rename"
    subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-o",
            trace,
            "-e",
            calls,
            sys.executable,
            "-c",
            SNAPSHOT,
            path,
            snapshot,
        ],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"},
        check=True,
        timeout=300,
    )
    lines = [line for line in trace.read_text().splitlines() if "resumed" not in line]
    appears = next(
        n for n, line in enumerate(lines) if "openat" in line and str(snapshot) in line
    )
    writes = [
        n
        for n, line in enumerate(lines[:appears])
        if "pwrite64" in line and f"{path}-wal>" in line
    ]
    flushes = [
        n
        for n, line in enumerate(lines[:appears])
        if "sync(" in line and f"{path}-wal>" in line
    ]
    assert writes
    assert flushes
    assert flushes[-1] > writes[-1]
