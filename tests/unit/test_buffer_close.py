"""The buffer's end while its ledger is being written: nothing is cut off, nothing is
lost, nothing twice."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from small_buffer import started_on_held_ledger
from stored_rollouts import finish_lease

from invrl.buffer.config import BufferConfig
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.ledger_store import LedgerStore, check_lineage, read_ledger
from invrl.buffer.ledger.open_group import RolloutState
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.rollout.config import RolloutConfig
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.leases import Place
from invrl.types.weights import WeightVersion


async def in_thread(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 120)


async def turns_of_the_loop(count: int = 200) -> None:
    """Enough for everything that can go on to have gone on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_close_waits_for_a_ledger_write_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    actor, held = await started_on_held_ledger(path)
    lease = await actor.lease()
    assert lease is not None
    writer = RunStoreWriter(path)
    for summary in finish_lease(writer, lease):
        await actor.record(summary)
    writer.close()
    batch = await actor.take(60.0)
    await in_thread(held.committing)  # the poller's write is under way
    training = asyncio.create_task(actor.trained(batch.batch_id))
    await turns_of_the_loop()
    assert not training.done()
    closing = asyncio.create_task(actor.close())
    await turns_of_the_loop()
    assert not closing.done(), "it did not wait for the write"
    held.let_through.set()
    await asyncio.wait_for(asyncio.gather(training, closing), 120)
    kept = read_ledger(path)
    assert [row.entry.sequence for row in kept] == list(range(len(kept)))
    check_lineage(kept, ended=True)
    assert [str(row.entry.state) for row in kept][-2:] == ["trained", "trained"]


async def test_cancelled_call_leaves_the_ledger_write_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    actor, held = await started_on_held_ledger(path)
    await actor.lease()
    await in_thread(held.committing)
    asked = asyncio.create_task(actor.snapshot(WeightVersion(0)))
    await turns_of_the_loop()
    asked.cancel()
    await asyncio.wait({asked})
    held.let_through.set()
    await asyncio.wait_for(actor.close(), 120)
    kept = read_ledger(path)
    check_lineage(kept, ended=True)
    assert [row.entry.sequence for row in kept] == list(range(len(kept)))


async def test_buffer_may_be_closed_twice_and_before_its_start(tmp_path: Path) -> None:
    actor, held = await started_on_held_ledger(tmp_path / "run.sqlite")
    held.let_through.set()
    await actor.close()
    await actor.close()
    unstarted = BufferActor(
        BufferConfig(),
        RolloutConfig(),
        tasks_factory=lambda: iter([]),
        run_store_path=tmp_path / "other.sqlite",
    )
    await unstarted.close()


@pytest.mark.parametrize("statement", ["INSERT", "COMMIT"])
def test_failed_ledger_write_leaves_no_open_transaction(
    tmp_path: Path, statement: str
) -> None:
    """Of the two faults one is in the rows, one at the commit (a full disk)."""

    def entry(sequence: int) -> LedgerEntry:
        place = Place("g0", sequence, 0)
        return LedgerEntry(
            sequence=sequence, place=place, task_id="t", state=RolloutState.IN_FLIGHT
        )

    path = tmp_path / "run.sqlite"
    store = LedgerStore(path)
    store.begin(parent=0, step=0, sequence=0)
    real = store._db
    if statement == "COMMIT":
        store._db = Failing(real, lambda sql: sql == "COMMIT")  # type: ignore[assignment]
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            store.write([entry(0), entry(1)])
    else:
        with pytest.raises(sqlite3.IntegrityError):
            store.write([entry(0), entry(0)])
    store._db = real
    store.write([entry(0), entry(1)])
    assert [record.entry.sequence for record in read_ledger(path)] == [0, 1]


class Failing:
    """A connection that says that the disk is full."""

    def __init__(self, db: sqlite3.Connection, fails: Callable[[str], bool]) -> None:
        self._db = db
        self._fails = fails

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if self._fails(sql):
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, *values)

    def executemany(self, sql: str, rows: object) -> sqlite3.Cursor:
        return self._db.executemany(sql, rows)  # type: ignore[arg-type]
