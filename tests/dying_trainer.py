"""A trainer in a process of its own, that runs an update up to a phase and waits there
to be killed.

`multiprocessing` starts it, so everything that it takes is pickled. It tells the
checksums of the two versions first, and then the phase that has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weight_faults import (
    RECEIVERS,
    FaultyFleet,
    FaultySender,
    Named,
    TrainerRow,
    at_last_bucket,
    random_weights,
    settings_of,
)

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.interfaces import WeightLayout


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    url: str
    api_key: str
    admin_key: str


START_S = 120.0
"""Until a process that imports torch has said its first word."""
_MEMORY = "memfd:invrl-weights"
_FORKSERVER = multiprocessing.get_context("forkserver")


async def run_trainer_row(
    row: TrainerRow, fleet: FaultyFleet, engine: EngineAddress, folder: Path
) -> None:
    """Kill a trainer of this engine at the phase. The engine, which is the only one of
    the fleet, is as the row says, and takes the fleet's version afterwards. Nothing is
    left of the trainer."""
    layout = fleet.sender.specs
    _FORKSERVER.set_forkserver_preload(["dying_trainer"])
    ours, theirs = _FORKSERVER.Pipe()
    trainer = _FORKSERVER.Process(
        target=run_trainer, args=(theirs, row, engine, layout, folder), daemon=True
    )
    trainer.start()
    theirs.close()
    try:
        old, new, phase = [await asyncio.to_thread(_next_of, ours) for _ in range(3)]
        assert phase == row.phase
        assert trainer.pid is not None
        memory = memory_of(trainer.pid)
        in_shared_memory = open_files(trainer.pid, "/dev/shm/")
    finally:
        trainer.kill()
        await asyncio.to_thread(trainer.join, START_S)
        ours.close()
    assert bool(memory) == (row.transport not in ("disk", "delta"))
    assert [path for path in in_shared_memory if os.path.exists(path)] == []
    left = [path.name for path in (folder / "tmp").iterdir()]
    is_within_request = row.phase == "bucket"
    assert len(left) <= is_within_request, left
    # an empty folder
    assert all(name.startswith("invrl-reply-") for name in left), left
    receiver = fleet.engines[0].inner
    held = await receiver.read_back(layout)
    is_named_new = row.phase == "resume"
    assert held.version == str(NEW if is_named_new else OLD)
    if row.holds is not None:
        assert held.checksums == {"old": old, "new": new}[row.holds]
    await fleet.update()
    await fleet.expect(fleet.sender.checksums())
    assert processes_with(memory) == []


def _next_of(connection: Connection) -> Any:
    assert connection.poll(START_S), "the trainer says nothing"
    return connection.recv()


def memory_of(pid: int) -> set[int]:
    """The inodes of the arenas that a process has open."""
    inodes: set[int] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if _MEMORY in os.readlink(descriptor):
                inodes.add(descriptor.stat().st_ino)
    return inodes


def open_files(pid: int, below: str) -> list[str]:
    paths: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            path = os.readlink(descriptor)
            if path.startswith(below):
                paths.append(path)
    return paths


def processes_with(inodes: set[int]) -> list[str]:
    """Those that map one of these arenas."""
    found: list[str] = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text().splitlines()
            if any(
                _MEMORY in line and int(line.split()[4]) in inodes for line in lines
            ):
                found.append(maps.parent.name)
    return found


OLD = 1
NEW = 2


def run_trainer(
    connection: Connection,
    row: TrainerRow,
    engine: EngineAddress,
    layout: WeightLayout,
    folder: Path,
) -> None:
    """`folder` takes its temporary files and its weights."""
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
    asyncio.run(_train(connection, row, engine, layout, folder / "weights"))


async def _train(
    connection: Connection,
    row: TrainerRow,
    engine: EngineAddress,
    layout: WeightLayout,
    folder: Path,
) -> None:
    limits = EngineLimits(vocab_size=1, context_length=1)
    async with SglangClient(
        engine.url,
        limits=limits,
        api_key=engine.api_key,
        admin_key=engine.admin_key,
        name="engine",
    ) as client:
        receiver = RECEIVERS[row.transport](
            "engine", client, settings_of(row.transport)
        )
        sender = FaultySender(random_weights(layout, 2), row.transport, folder)
        FaultyFleet.next_version = OLD
        fleet = FaultyFleet(sender, [receiver])
        await fleet.update()
        connection.send(sender.checksums())
        sender.change()
        connection.send(sender.checksums())
        sender.change = lambda: None

        def hold() -> None:
            connection.send(row.phase)
            threading.Event().wait()

        async def hold_at(phase: str) -> None:
            if phase == row.phase:
                hold()

        def hold_in_stage(named: Named) -> Named:
            """When all tensors but the last one have been taken by the writer."""

            class Stopping(list[tuple[str, object]]):
                def __iter__(self):
                    yield from named[:-1]
                    hold()

            return Stopping()  # type: ignore[return-value]

        fleet.engines[0].before = hold_at
        if row.phase == "stage":
            sender.given = hold_in_stage
        if row.phase == "bucket":
            with at_last_bucket(hold, times=1):
                await fleet.update()
        else:
            await fleet.update()
        connection.send("the update has ended")
