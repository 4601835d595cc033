"""The faults of weight updates in one table, and how each of them is made.

`unit/test_weight_faults.py` runs the table against processes with the engine's weight
loader and without SGLang, `integration/test_weight_faults_engine.py` against SGLang. A
row says what goes wrong, with which transport, and what the engine must hold
afterwards: the old version whole, or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from invrl.engines.client.weight_receiver import (
    ArenaReceiver,
    BroadcastReceiver,
    DeltaReceiver,
    EngineReceiver,
    FolderReceiver,
)
from invrl.errors import ChecksumError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.weights.delta_staging import DeltaFolders
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightUpdate, WeightVersion
from invrl.weights.config import ArenaWeights
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter
from invrl.weights.transports.broadcast import BUCKET_BYTES, WeightGroup
from invrl.weights.transports.broadcast_loads import BroadcastLoads
from invrl.weights.transports.broadcaster import Broadcaster
from invrl.weights.transports.delta_folder import DELTA_NAME, DeltaHandle
from invrl.weights.transports.weight_folder import WEIGHTS_NAME
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import load_alone
from invrl.weights.update.transaction import WeightTransaction

Transport = Literal["arena copy", "arena alias", "disk", "delta", "collective"]
Holds = Literal["old", "new"]
Named = list[tuple[str, torch.Tensor]]
Error = type[WeightSyncError]


@dataclass(frozen=True, kw_only=True)
class WeightsRow:
    """What is wrong with the weights. `error`: what the trainer's update raises, None
    if it succeeds; `says`: a pattern in it."""

    fault: str
    transport: Transport
    holds: Holds
    error: Error | None = None
    says: str = ""

    def __str__(self) -> str:
        return f"{self.fault}, {self.transport}"


def refused(
    error: Error, says: str, fault: str, *transports: Transport
) -> list[WeightsRow]:
    return [
        WeightsRow(
            fault=fault, transport=transport, holds="old", error=error, says=says
        )
        for transport in transports
    ]


def taken(fault: str, *transports: Transport) -> list[WeightsRow]:
    return [
        WeightsRow(fault=fault, transport=transport, holds="new")
        for transport in transports
    ]


STAGED = "not staged|not those of the layout"
PLACES = "not in the layout|the layout says"
WEIGHTS_ROWS = [
    *refused(
        ChecksumError,
        "1 of",
        "a bit flips",
        "arena copy",
        "arena alias",
        "disk",
        "collective",
    ),
    *refused(
        WeightSyncError, "cannot be read|does not lead to", "a bit flips", "delta"
    ),
    *refused(ChecksumError, "1 of", "a bucket is cut", "arena copy", "arena alias"),
    *refused(
        WeightSyncError,
        "cannot be read|does not lead to",
        "a bucket is cut",
        "disk",
        "delta",
    ),
    *refused(WeightSyncError, "broke twice", "a bucket is cut", "collective"),
    *taken("a bucket is cut once", "collective"),
    *refused(
        LayoutError,
        "does not fit",
        "the layout has another shape",
        "arena copy",
        "arena alias",
    ),
    *refused(
        LayoutError,
        "does not fit",
        "the layout has another shape",
        "disk",
        "delta",
        "collective",
    ),
    *refused(
        LayoutError,
        "does not fit",
        "the layout has another dtype",
        "arena copy",
        "arena alias",
    ),
    *refused(
        LayoutError,
        "does not fit",
        "the layout has another dtype",
        "disk",
        "delta",
        "collective",
    ),
    *refused(
        LayoutError,
        "is not covered",
        "the layout lacks a tensor",
        "arena copy",
        "disk",
        "collective",
    ),
    *refused(
        LayoutError,
        STAGED,
        "a tensor is missing",
        "arena copy",
        "disk",
        "delta",
        "collective",
    ),
    *refused(
        LayoutError,
        "layout",
        "a tensor has another dtype",
        "arena copy",
        "disk",
        "delta",
    ),
    *refused(LayoutError, "layout", "a tensor has another dtype", "collective"),
    *refused(
        LayoutError,
        "layout|staged twice",
        "a tensor comes twice",
        "arena copy",
        "disk",
        "delta",
    ),
    *refused(LayoutError, "staged twice", "a tensor comes twice", "collective"),
    *taken("tensors come in another order", "arena copy", "arena alias", "collective"),
    *refused(LayoutError, "layout", "tensors come in another order", "disk", "delta"),
    *refused(LayoutError, "the layout says", "the file lacks a tensor", "disk"),
    *refused(LayoutError, "the layout says", "the file has another dtype", "disk"),
    *refused(
        ChecksumError,
        "of",
        "a push is lost",
        "arena copy",
        "arena alias",
        "disk",
        "delta",
    ),
    *taken("a push comes twice", "arena copy", "arena alias", "disk", "delta"),
    *refused(
        ChecksumError,
        "of",
        "the push before comes last",
        "arena copy",
        "arena alias",
        "disk",
    ),
    *refused(ChecksumError, "of", "the push before comes last", "delta"),
    *taken("the version is pushed again", "arena copy", "disk", "delta", "collective"),
    *refused(ChecksumError, "of", "differences are swapped", "delta"),
    *refused(
        WeightSyncError,
        "--weights.folder",
        "the trainer's disk is full",
        "disk",
        "delta",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """What happens to one of two engines, at the beginning of a phase. It is lost; the
    other one holds the new version.

    "request": of the load, when the engine has begun an update and is about to be
    asked; "bucket": in the middle of a broadcast.
    """

    fault: Literal["killed", "stopped", "disk full"]
    transport: Transport
    phase: str

    def __str__(self) -> str:
        return f"engine {self.fault} at {self.phase}, {self.transport}"


def engine_faults(
    fault: Literal["killed", "stopped", "disk full"], transport: Transport, *phases: str
) -> list[EngineRow]:
    return [
        EngineRow(fault=fault, transport=transport, phase=phase) for phase in phases
    ]


PHASES = ("stage", "prepare", "pause", "load", "commit", "resume")
ENGINE_ROWS = [
    *engine_faults("killed", "arena copy", *PHASES),
    *engine_faults("stopped", "arena copy", *PHASES, "request"),
    *engine_faults("disk full", "arena copy", "load"),
    *engine_faults("killed", "arena alias", "load", "resume"),
    *engine_faults("stopped", "arena alias", "load"),
    *engine_faults("killed", "disk", "load"),
    *engine_faults("killed", "delta", "load"),
    *engine_faults("killed", "collective", "load", "bucket"),
    *engine_faults("stopped", "collective", "load", "bucket"),
]


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    """The trainer is killed at a phase. "loaded": when the engine has loaded, before
    its checksums are asked.

    `holds` is None where the engine holds a part of what was sent, and stays paused for
    the next trainer.
    """

    transport: Transport
    phase: str
    holds: Holds | None

    def __str__(self) -> str:
        return f"trainer killed at {self.phase}, {self.transport}"


TRAINER_ROWS = [
    TrainerRow(transport="arena copy", phase="stage", holds="old"),
    TrainerRow(transport="arena copy", phase="prepare", holds="old"),
    TrainerRow(transport="arena copy", phase="pause", holds="old"),
    TrainerRow(transport="arena copy", phase="load", holds="old"),
    TrainerRow(transport="arena copy", phase="loaded", holds="new"),
    TrainerRow(transport="arena copy", phase="commit", holds="new"),
    TrainerRow(transport="arena copy", phase="resume", holds="new"),
    TrainerRow(transport="arena alias", phase="stage", holds="old"),
    TrainerRow(transport="arena alias", phase="loaded", holds="new"),
    TrainerRow(transport="disk", phase="stage", holds="old"),
    TrainerRow(transport="disk", phase="loaded", holds="new"),
    TrainerRow(transport="delta", phase="stage", holds="old"),
    TrainerRow(transport="delta", phase="loaded", holds="new"),
    TrainerRow(transport="collective", phase="load", holds="old"),
    TrainerRow(transport="collective", phase="bucket", holds=None),
    TrainerRow(transport="collective", phase="loaded", holds="new"),
]


def quick_by_transport(
    rows: Sequence[WeightsRow] | Sequence[EngineRow] | Sequence[TrainerRow],
) -> list[pytest.ParameterSet]:
    """The rows as cases of a test; all are slow but the first of each transport."""
    first = {row.transport: row for row in reversed(rows)}
    return [
        pytest.param(row, marks=() if row is first[row.transport] else pytest.mark.slow)
        for row in rows
    ]


BUCKET_TIMEOUT_S = 3.0
STOPPED_DEADLINE_S = 3.0
"""Of a phase in which an engine does not answer. Without a fault it takes a hundredth
of that."""
DEADLINE_S = 60.0
RECEIVERS: Mapping[Transport, type[EngineReceiver]] = {
    "arena copy": ArenaReceiver,
    "arena alias": ArenaReceiver,
    "disk": FolderReceiver,
    "delta": DeltaReceiver,
    "collective": BroadcastReceiver,
}


def settings_of(transport: Transport) -> ArenaWeights:
    arena = "alias" if transport == "arena alias" else "copy"
    return ArenaWeights.model_validate({"arena_mode": arena})


def random_weights(layout: WeightLayout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for spec in layout:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        tensors[spec.name] = torch.rand(spec.shape, generator=generator).to(dtype)
    return tensors


class FaultySender:
    """A trainer's end with the real writer of a transport, whose tensors, layout and
    staged bytes a fault may change on their way."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], transport: Transport, folder: Path
    ) -> None:
        self.tensors = tensors
        self.transport: Transport = transport
        self.specs = tuple(
            TensorSpec(
                name=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
            )
            for name, t in tensors.items()
        )
        self._writer: ArenaWriter | WeightFolders | DeltaFolders | Broadcaster
        if transport == "disk":
            self._writer = WeightFolders(self.specs, folder)
        elif transport == "delta":
            self._writer = DeltaFolders(self.specs, folder, full_every=1000)
        elif transport == "collective":
            self._writer = Broadcaster(
                self.specs, host="127.0.0.1", timeout_s=BUCKET_TIMEOUT_S
            )
        else:
            self._writer = ArenaWriter(self.specs)
        self.answer_logprobs: (
            Callable[[Sequence[Sequence[int]]], list[NDArray[np.float32]]] | None
        ) = None
        self.repair()

    def repair(self) -> None:
        """End every fault."""
        self.announced: WeightLayout = self.specs
        self.given: Callable[[Named], Named] = lambda named: named
        self.spoil: Callable[[StagedWeights], StagedWeights] = lambda staged: staged
        self.has_room = True

    def change(self) -> None:
        """A step of training: each value becomes another one, the least that a
        difference can be."""
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.mul_(1.01)

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}

    async def layout(self) -> WeightLayout:
        return self.announced

    async def stage(self, version: WeightVersion) -> StagedWeights:
        named = self.given(list(self.tensors.items()))
        with contextlib.ExitStack() as stack:
            if not self.has_room:
                stack.enter_context(no_room(os.getpid()))
            staged = self._writer.stage(version, iter(named))
        return self.spoil(staged)

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        assert isinstance(self._writer, Broadcaster)
        return self._writer.offer(version, engines)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        assert self.answer_logprobs is not None
        return self.answer_logprobs(prompts)

    def damage(
        self, staged: StagedWeights, change: Callable[[torch.Tensor], None]
    ) -> None:
        """Change the bytes of one tensor where they were staged in memory."""
        writer = self._writer
        arena = writer._arena if isinstance(writer, Broadcaster) else writer
        assert isinstance(arena, ArenaWriter)
        number = arena._slot
        if isinstance(writer, ArenaWriter):
            number = msgspec.json.decode(staged.handle, type=ArenaHandle).slot
        slot = arena._slots[number]
        largest = max(slot.values(), key=torch.Tensor.nelement)
        change(largest.view(-1).view(torch.uint8))

    def file(self, staged: StagedWeights) -> Path:
        """The file that was written for this version alone."""
        if self.transport == "disk":
            return Path(staged.handle) / WEIGHTS_NAME
        last = Path(msgspec.json.decode(staged.handle, type=DeltaHandle).chain[-1])
        difference = last / DELTA_NAME
        return difference if difference.exists() else last / WEIGHTS_NAME


class FaultyReceiver:
    """An engine's receiver, and what happens to its calls."""

    def __init__(self, inner: EngineReceiver) -> None:
        self.inner = inner
        self.name = inner.name
        self.repair()

    def repair(self) -> None:
        self.before: Callable[[str], Awaitable[None]] = pass_by
        """Called when a phase begins for this engine."""
        self.push: Callable[[StagedWeights], Awaitable[None]] = self.inner.load

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        await self.before("prepare")
        await self.inner.check(layout, staged)

    async def pause(self) -> None:
        await self.before("pause")
        await self.inner.pause()

    async def load(self, staged: StagedWeights) -> None:
        await self.before("load")
        await self.push(staged)
        await self.before("loaded")

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        return await self.inner.checksums(staged)

    async def commit(self, version: WeightVersion) -> None:
        await self.before("commit")
        await self.inner.commit(version)

    async def sleep(self) -> None:
        await self.before("sleep")
        await self.inner.sleep()

    async def wake(self) -> None:
        await self.before("wake")
        await self.inner.wake()

    async def resume(self) -> None:
        await self.before("resume")
        await self.inner.resume()

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        await self.before("canary")
        return await self.inner.logprobs(prompts)


async def pass_by(phase: str) -> None: ...


class FaultyFleet:
    """Engines, and one transaction over them."""

    next_version = 1
    """Of all fleets. An update that failed is tried again under its version, as the
    trainer does it."""

    def __init__(
        self,
        sender: FaultySender,
        engines: Sequence[EngineReceiver],
        *,
        deadline_s: float = DEADLINE_S,
        canary_prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sender = sender
        self.engines = [FaultyReceiver(engine) for engine in engines]
        load = load_alone
        if sender.transport == "collective":
            load = BroadcastLoads(sender, timeout_s=BUCKET_TIMEOUT_S).load
        self.transaction = WeightTransaction(
            sender,
            self._receivers,
            canary_prompts=canary_prompts,
            bound=CanaryBound.for_dtypes("float32", "float32"),
            deadline_s=deadline_s,
            load=load,
        )
        self.version = WeightVersion(0)

    async def _receivers(self) -> Sequence[FaultyReceiver]:
        return self.engines

    async def update(self) -> WeightUpdate:
        """Train, and give the result to the engines, under the next version."""
        self.sender.change()
        outcome = await self.run(WeightVersion(FaultyFleet.next_version))
        FaultyFleet.next_version += 1
        return outcome

    async def run(self, version: WeightVersion) -> WeightUpdate:
        update = await self.transaction.run(version)
        self.version = version
        self.engines = [
            engine for engine in self.engines if engine.name not in update.lost_engines
        ]
        return update

    async def expect(self, checksums: Mapping[str, str]) -> None:
        """Every engine holds these weights, as it reads them back now, under the
        version given last."""
        for engine in self.engines:
            held = await engine.inner.read_back(self.sender.specs)
            assert held.checksums == checksums, engine.name
            assert held.version == str(self.version), engine.name

    def repair(self) -> None:
        self.sender.repair()
        for engine in self.engines:
            engine.repair()


@contextlib.contextmanager
def repaired(fleet: FaultyFleet) -> Iterator[None]:
    """The fleet's sender serves further tests, also if this one fails."""
    try:
        yield
    finally:
        fleet.repair()


async def run_weights_row(row: WeightsRow, fleet: FaultyFleet) -> None:
    """One fault of the weights against engines of which at least one version is known.
    They hold a version whole, serve it by its name, and take the next one."""
    sender = fleet.sender
    old = sender.checksums()
    fault = WEIGHTS_FAULTS[row.fault]
    with repaired(fleet), fault(fleet):
        update = fleet.update()
        if row.error is None:
            done = await update
            assert done.lost_engines == {}
        else:
            error = await error_of(update)
            assert type(error) is row.error, repr(error)
            assert contains(row.says, str(error)), error
            assert error.unrestored == ()
    new = sender.checksums()
    assert set(old.values()).isdisjoint(new.values())
    await fleet.expect({"old": old, "new": new}[row.holds])
    done = await fleet.update()
    assert done.lost_engines == {}
    await fleet.expect(sender.checksums())


def contains(pattern: str, text: str) -> bool:
    return any(words in text for words in pattern.split("|"))


async def error_of(update: Awaitable[WeightUpdate]) -> WeightSyncError:
    try:
        done = await update
    except WeightSyncError as error:
        return error
    raise AssertionError(f"the update succeeded: {done}")


async def run_engine_row(
    row: EngineRow,
    fleet: FaultyFleet,
    victims: Sequence[int],
    end_victim: Callable[[], None],
) -> None:
    """The last engine of the fleet has these processes. It is lost, and the others go
    on. `end_victim` ends what is left of it, as the fleet ends what it has lost."""
    sender = fleet.sender
    victim = fleet.engines[-1]

    def strike() -> None:
        for pid in victims:
            if row.fault == "disk full":
                resource.prlimit(
                    pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY)
                )
            else:
                number = signal.SIGKILL if row.fault == "killed" else signal.SIGSTOP
                with contextlib.suppress(ProcessLookupError):  # struck before
                    os.kill(pid, number)

    async def strike_at(phase: str) -> None:
        if phase == row.phase:
            strike()

    def strike_in_stage(named: Named) -> Named:
        strike()
        return named

    old = sender.checksums()
    with repaired(fleet), contextlib.ExitStack() as stack:
        if row.phase == "stage":
            sender.given = strike_in_stage
        elif row.phase == "request":
            send = victim.inner._send

            async def strike_and_send(
                payloads: Sequence[str], load_format: str
            ) -> None:
                strike()
                await send(payloads, load_format)

            victim.inner._send = strike_and_send  # type: ignore[method-assign]
        elif row.phase == "bucket":
            stack.enter_context(at_last_bucket(strike, times=1))
        else:
            victim.before = strike_at
        update = await fleet.update()
    end_victim()
    assert list(update.lost_engines) == [victim.name], update.lost_engines
    assert set(old.values()).isdisjoint(sender.checksums().values())
    await fleet.expect(sender.checksums())
    outcome = await fleet.update()
    assert outcome.lost_engines == {}
    await fleet.expect(sender.checksums())


@contextlib.contextmanager
def no_room(pid: int) -> Iterator[None]:
    """No file that this process writes may grow: as on a full disk. Nothing may be
    printed in here."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def at_last_bucket(strike: Callable[[], None], *, times: int) -> Iterator[None]:
    """Call `strike` when the last bucket of a broadcast is about to be sent."""
    begin = WeightGroup._begin
    remaining = iter(range(times))

    def begin_or_strike(group: WeightGroup, bucket: torch.Tensor):
        if bucket.numel() < BUCKET_BYTES["gloo"] and next(remaining, None) is not None:
            strike()
        return begin(group, bucket)

    with mock.patch.object(WeightGroup, "_begin", begin_or_strike):
        yield


def flip(raw_bytes: torch.Tensor) -> None:
    raw_bytes[len(raw_bytes) // 2] ^= 4


def zero_second_half(raw_bytes: torch.Tensor) -> None:
    raw_bytes[len(raw_bytes) // 2 :] = 0


@contextlib.contextmanager
def bit_flips(fleet: FaultyFleet) -> Iterator[None]:
    def spoil(staged: StagedWeights) -> StagedWeights:
        if fleet.sender.transport in ("disk", "delta"):
            path = fleet.sender.file(staged)
            body = bytearray(path.read_bytes())
            body[-100] ^= 4
            path.write_bytes(body)
        else:
            fleet.sender.damage(staged, flip)
        return staged

    fleet.sender.spoil = spoil
    yield


@contextlib.contextmanager
def bucket_is_cut(fleet: FaultyFleet, times: int = 2) -> Iterator[None]:
    """In memory: what should have come last is zero. A file ends early. A broadcast
    ends before its last bucket."""

    def spoil(staged: StagedWeights) -> StagedWeights:
        if fleet.sender.transport in ("disk", "delta"):
            path = fleet.sender.file(staged)
            body = path.read_bytes()
            path.write_bytes(body[: len(body) // 2])
        else:
            fleet.sender.damage(staged, zero_second_half)
        return staged

    def cut_cable() -> None:
        raise RuntimeError("the cable is cut")

    if fleet.sender.transport == "collective":
        with at_last_bucket(cut_cable, times=times):
            yield
        return
    fleet.sender.spoil = spoil
    yield


@contextlib.contextmanager
def bucket_is_cut_once(fleet: FaultyFleet) -> Iterator[None]:
    with bucket_is_cut(fleet, times=1):
        yield


def with_first_matrix(layout: WeightLayout, **changes: object) -> WeightLayout:
    """The layout with another spec for its first tensor of two dimensions."""
    number = next(index for index, spec in enumerate(layout) if len(spec.shape) == 2)
    changed = dataclasses.replace(layout[number], **changes)  # type: ignore[arg-type]
    return (*layout[:number], changed, *layout[number + 1 :])


@contextlib.contextmanager
def layout_has_another_shape(fleet: FaultyFleet) -> Iterator[None]:
    specs = fleet.sender.specs
    shape = next(spec.shape for spec in specs if len(spec.shape) == 2)
    fleet.sender.announced = with_first_matrix(specs, shape=(shape[0], shape[1] // 2))
    yield


@contextlib.contextmanager
def layout_has_another_dtype(fleet: FaultyFleet) -> Iterator[None]:
    fleet.sender.announced = with_first_matrix(fleet.sender.specs, dtype="bfloat16")
    yield


@contextlib.contextmanager
def layout_lacks_a_tensor(fleet: FaultyFleet) -> Iterator[None]:
    *kept, lacking = fleet.sender.specs

    def spoil(staged: StagedWeights) -> StagedWeights:
        checksums = {
            name: value
            for name, value in staged.checksums.items()
            if name != lacking.name
        }
        return dataclasses.replace(staged, checksums=checksums)

    fleet.sender.announced = tuple(kept)
    fleet.sender.spoil = spoil
    yield


def given_as(change: Callable[[Named], Named]):
    """A fault of the tensors that the trainer stages."""

    @contextlib.contextmanager
    def fault(fleet: FaultyFleet) -> Iterator[None]:
        fleet.sender.given = change
        yield

    return fault


def last_in_half_precision(named: Named) -> Named:
    name, tensor = named[-1]
    return [*named[:-1], (name, tensor.to(torch.float16))]


def file_has(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]):
    """A fault of the file that is written again by somebody else."""

    @contextlib.contextmanager
    def fault(fleet: FaultyFleet) -> Iterator[None]:
        def spoil(staged: StagedWeights) -> StagedWeights:
            path = fleet.sender.file(staged)
            tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
            save_file(change(tensors), path)
            return staged

        fleet.sender.spoil = spoil
        yield

    return fault


def without_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    return {name: tensor for name, tensor in tensors.items() if name != first}


def first_in_half_precision(
    tensors: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    return {**tensors, first: tensors[first].to(torch.float16)}


@contextlib.contextmanager
def push_is_lost(fleet: FaultyFleet) -> Iterator[None]:
    """The new version's alone: going back to the old one works."""
    old = fleet.transaction.committed
    assert old is not None

    def losing(engine: FaultyReceiver) -> Callable[[StagedWeights], Awaitable[None]]:
        async def push(staged: StagedWeights) -> None:
            if staged.version == old.staged.version:
                await engine.inner.load(staged)

        return push

    for engine in fleet.engines:
        engine.push = losing(engine)
    yield


@contextlib.contextmanager
def push_comes_twice(fleet: FaultyFleet) -> Iterator[None]:
    def repeating(engine: FaultyReceiver) -> Callable[[StagedWeights], Awaitable[None]]:
        async def push(staged: StagedWeights) -> None:
            await engine.inner.load(staged)
            await engine.inner.load(staged)

        return push

    for engine in fleet.engines:
        engine.push = repeating(engine)
    yield


@contextlib.contextmanager
def push_before_comes_last(fleet: FaultyFleet) -> Iterator[None]:
    """A late repetition of the last update's push."""
    old = fleet.transaction.committed
    assert old is not None

    def late(engine: FaultyReceiver) -> Callable[[StagedWeights], Awaitable[None]]:
        async def push(staged: StagedWeights) -> None:
            await engine.inner.load(staged)
            await engine.inner.load(old.staged)

        return push

    for engine in fleet.engines:
        engine.push = late(engine)
    yield


@contextlib.contextmanager
def version_is_pushed_again(fleet: FaultyFleet) -> Iterator[None]:
    """An update that has succeeded is run once more, under the same version."""
    run = fleet.run

    async def twice(version: WeightVersion) -> WeightUpdate:
        await run(version)
        return await run(version)

    fleet.run = twice  # type: ignore[method-assign]
    try:
        yield
    finally:
        fleet.run = run  # type: ignore[method-assign]


@contextlib.contextmanager
def differences_are_swapped(fleet: FaultyFleet) -> Iterator[None]:
    """The two newest links of the chain change places."""

    def spoil(staged: StagedWeights) -> StagedWeights:
        chain = list(msgspec.json.decode(staged.handle, type=DeltaHandle).chain)
        assert len(chain) >= 2, "the version was written whole"
        chain[-2:] = reversed(chain[-2:])
        return dataclasses.replace(
            staged, handle=msgspec.json.encode(DeltaHandle(chain=tuple(chain))).decode()
        )

    fleet.sender.spoil = spoil
    yield


@contextlib.contextmanager
def trainers_disk_is_full(fleet: FaultyFleet) -> Iterator[None]:
    fleet.sender.has_room = False
    yield


WEIGHTS_FAULTS: Mapping[
    str, Callable[[FaultyFleet], contextlib.AbstractContextManager[None]]
] = {
    "a bit flips": bit_flips,
    "a bucket is cut": bucket_is_cut,
    "a bucket is cut once": bucket_is_cut_once,
    "the layout has another shape": layout_has_another_shape,
    "the layout has another dtype": layout_has_another_dtype,
    "the layout lacks a tensor": layout_lacks_a_tensor,
    "a tensor is missing": given_as(lambda named: named[:-1]),
    "a tensor has another dtype": given_as(last_in_half_precision),
    "a tensor comes twice": given_as(lambda named: [*named, named[0]]),
    "tensors come in another order": given_as(lambda named: named[::-1]),
    "the file lacks a tensor": file_has(without_first),
    "the file has another dtype": file_has(first_in_half_precision),
    "a push is lost": push_is_lost,
    "a push comes twice": push_comes_twice,
    "the push before comes last": push_before_comes_last,
    "the version is pushed again": version_is_pushed_again,
    "differences are swapped": differences_are_swapped,
    "the trainer's disk is full": trainers_disk_is_full,
}
