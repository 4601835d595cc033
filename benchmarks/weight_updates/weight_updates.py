"""Updates of one engine's weights, timed beside copies of as many bytes, with and
without requests in flight.

An update is the transaction of a run (`weights/update/transaction.py`) over the arena.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.ratios import Part
from benchmarks.weight_updates.streams import Streams
from benchmarks.weight_updates.token_times import (
    Window,
    decode_step,
    longest_gap,
    longest_silence,
)
from benchmarks.weight_updates.weight_settings import IN_FLIGHT_MODE
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.client.weight_receiver import EngineReceiver
from invrl.interfaces import StagedWeights, WeightReceiver, WeightSender
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import Load, load_alone
from invrl.weights.update.transaction import WeightTransaction

_WARM_UP_UPDATES = 2
"""The first write into each slot of the arena faults its memory in."""
_COPY_BUFFER_BYTES = 256 << 20
"""More than a processor caches."""
_MAX_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedUpdate:
    """One update, and one copy of the same bytes before it."""

    window: Window
    """From the end of the trainer's step to the end of the update, its canary
    included."""
    resumed_at: float
    """When the engine was told to go on, before its canary: a time of the monotonic
    clock."""
    ready_s: float
    """From the end of the trainer's step until the engine can decode under the new
    version."""
    copy_s: float
    phases: Mapping[str, float]


class ChangingSender(WeightSender, Protocol):
    """A sender that changes its weights on request."""

    async def change(self) -> None: ...

    async def checksums(self) -> Mapping[str, str]:
        """Checksums of the weights that an engine holds after an update."""
        ...


class UpdatedEngine:
    """An engine, or the loader alone, and the weights that it gets again and again."""

    def __init__(
        self,
        weights: ChangingSender,
        receiver: EngineReceiver,
        *,
        canary_prompts: Sequence[Sequence[int]],
        dtype: str,
        deadline_s: float,
        version: int = 0,
        device: torch.device | None = None,
        load: Load = load_alone,
    ) -> None:
        """`version`: what the engine holds. `device`: the GPU that has the weights;
        None for the host."""
        self._device = device or torch.device("cpu")
        self._weights = weights
        self.receiver = receiver
        self._version = version
        self._num_bytes = 0

        async def receivers() -> Sequence[WeightReceiver]:
            return [receiver]

        self._transaction = WeightTransaction(
            weights,
            receivers,
            canary_prompts=canary_prompts,
            bound=CanaryBound.for_dtypes(dtype),
            deadline_s=deadline_s,
            load=load,
        )

    async def warm_up(self) -> int:
        """Returns the number of updates. Raises WeightSyncError, as every update
        does."""
        for _ in range(_WARM_UP_UPDATES):
            await self.change_weights()
            await self.update(copy_s=0.0)
        return _WARM_UP_UPDATES

    async def change_weights(self) -> None:
        await self._weights.change()

    async def update(self, *, copy_s: float) -> TimedUpdate:
        self._version += 1
        start = time.monotonic()
        update = await self._transaction.run(WeightVersion(self._version))
        end = time.monotonic()
        self._num_bytes = update.num_bytes
        canary_s = update.seconds.get("canary", 0.0)
        return TimedUpdate(
            window=Window(start=start, end=end),
            resumed_at=end - canary_s,
            ready_s=end - start - canary_s,
            copy_s=copy_s,
            phases=update.seconds,
        )

    async def copy_seconds(self) -> float:
        """Of a copy of as many bytes as an update has, within this process."""
        return await asyncio.to_thread(copy_seconds, self._num_bytes, self._device)

    async def unequal_tensors(self) -> int:
        """How many tensors of the engine differ from the trainer's. Generation must be
        paused."""
        staged = StagedWeights(
            version=WeightVersion(self._version), handle="", checksums={}, num_bytes=0
        )
        held = await self.receiver.checksums(staged)
        expected = await self._weights.checksums()
        return sum(held.get(name) != checksum for name, checksum in expected.items())


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """The median of three copies of so many bytes within the device's memory, by one
    thread, through buffers that are faulted in."""
    size = min(num_bytes, _COPY_BUFFER_BYTES)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    _wait_for(device)
    seconds: list[float] = []
    for _ in range(3):
        start = time.monotonic()
        for first_byte in range(0, num_bytes, size):
            count = min(size, num_bytes - first_byte)
            target[:count].copy_(source[:count])
        _wait_for(device)
        seconds.append(time.monotonic() - start)
    return median(seconds)


def _wait_for(device: torch.device) -> None:
    """Until it has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def measure_idle(engine: UpdatedEngine, *, name: str, updates: int) -> Part:
    """An engine that nobody asks for tokens. The ratio is `name`."""
    measured: list[TimedUpdate] = []
    unequal = 0
    for _ in range(updates):
        await engine.change_weights()
        copy_s = await engine.copy_seconds()
        measured.append(await engine.update(copy_s=copy_s))
        unequal += await engine.unequal_tensors()
    ratio = median(update.ready_s / update.copy_s for update in measured)
    details = summarize(measured) | {"unequal_tensors": unequal}
    failure = (
        f"{name}: {unequal} tensors are not what the trainer has" if unequal else ""
    )
    return Part(ratios={name: ratio}, details={name: details}, failure=failure)


async def measure_in_flight(
    engine: UpdatedEngine,
    client: SglangClient,
    *,
    number: int,
    updates: int,
    deadline_s: float,
) -> Part:
    """The same engine with a number of requests in flight. `client` samples, through
    the router or not."""
    measured: list[TimedUpdate] = []
    quiet: list[Window] = []
    unequal = 0
    async with Streams(
        client, number=number, max_new_tokens=_MAX_NEW_TOKENS, deadline_s=deadline_s
    ) as streams:
        await streams.wait_for_tokens(1)
        for _ in range(updates):
            # While generation is paused, the copy is not slowed down by it.
            await engine.receiver.pause()
            if measured:
                unequal += await engine.unequal_tensors()
            copy_s = await engine.copy_seconds()
            await engine.change_weights()
            await engine.receiver.resume()
            await streams.wait_for_tokens(2)
            quiet_from = time.monotonic()
            await streams.wait_for_tokens(4)
            update = await engine.update(copy_s=copy_s)
            quiet.append(Window(start=quiet_from, end=update.window.start))
            measured.append(update)
            await streams.wait_for_tokens(1)
        await engine.receiver.pause()
        unequal += await engine.unequal_tensors()
        await engine.receiver.resume()
    return part_in_flight(measured, streams, quiet, number=number, unequal=unequal)


# ------------------------------------------------- what follows from measured updates


def summarize(updates: Sequence[TimedUpdate]) -> dict[str, Any]:
    """Medians, in seconds. `phases` has those that the transaction times, and
    "paused"."""
    names = updates[0].phases.keys()
    return {
        "updates": len(updates),
        "ready_s": median(update.ready_s for update in updates),
        "copy_s": median(update.copy_s for update in updates),
        "phases": {
            name: median(update.phases[name] for update in updates) for name in names
        },
    }


def part_in_flight(
    updates: Sequence[TimedUpdate],
    streams: Streams,
    quiet: Sequence[Window],
    *,
    number: int,
    unequal: int,
) -> Part:
    """`quiet`: time in which every request decodes and nothing else happens."""
    step_s = decode_step(streams.times, quiet)
    gaps: list[float] = []
    load_gaps: list[float] = []
    silences: list[float] = []
    for update in updates:
        gaps.append(longest_gap(streams.times, update.window))
        before_canary = Window(start=update.window.start, end=update.resumed_at)
        load_gaps.append(longest_gap(streams.times, before_canary))
        silences.append(longest_silence(streams.times, update.window))
    num_failed = len(streams.failures)
    details = summarize(updates) | {
        "mode": IN_FLIGHT_MODE,
        "decode_step_s": step_s,
        "gap_s": {"median": median(gaps), "longest": max(gaps)},
        "load_gap_s": {"median": median(load_gaps), "longest": max(load_gaps)},
        "silence_s": {"median": median(silences), "longest": max(silences)},
        "finished_requests": streams.finished,
        "failures": streams.failures[:10],
    }
    reasons: list[str] = []
    if num_failed:
        reasons.append(
            f"{num_failed} requests failed, the first with: {streams.failures[0]}"
        )
    if unequal:
        reasons.append(f"{unequal} tensors are not what the trainer has")
    name = f"in_flight_{number}"
    return Part(
        ratios={
            f"gap_{number}_{IN_FLIGHT_MODE}": _in_copies(gaps, step_s, updates),
            f"load_gap_{number}_{IN_FLIGHT_MODE}": _in_copies(
                load_gaps, step_s, updates
            ),
            f"failed_requests_{number}": num_failed,
            f"unequal_tensors_{number}": unequal,
        },
        details={name: details},
        failure=f"{name}: {', '.join(reasons)}" if reasons else "",
    )


def _in_copies(
    gaps: Sequence[float], step_s: float, updates: Sequence[TimedUpdate]
) -> float:
    """The median of what a gap has beyond a decode step, over the copy of its
    update."""
    pairs = zip(gaps, updates, strict=True)
    return median(max(gap_s - step_s, 0.0) / update.copy_s for gap_s, update in pairs)
