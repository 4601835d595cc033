"""What the weight transport `collective` costs beside a plain gloo broadcast of the
same bytes, in turns.

Three processes: this one is the trainer; one is the engine's weight loader alone; one
receives the plain broadcasts.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PretrainedConfig

from benchmarks.ratios import Part
from benchmarks.weight_updates.changing_weights import (
    BroadcastWeights,
    empty_tensors,
    random_tensors,
)
from benchmarks.weight_updates.loader_server import LoaderServer
from benchmarks.weight_updates.raw_broadcasts import RawBroadcasts
from benchmarks.weight_updates.weight_settings import BROADCAST, WeightBenchSettings
from benchmarks.weight_updates.weight_updates import UpdatedEngine, summarize
from invrl.engines.client.weight_receiver import BroadcastReceiver
from invrl.weights.config import CollectiveWeights
from invrl.weights.transports.broadcast_loads import BroadcastLoads

_START_S = 300.0


async def measure_broadcasts(
    config: PretrainedConfig, settings: WeightBenchSettings
) -> Part:
    """The ratio: seconds of an update's load, in which the engine receives the weights
    and reads them back, over seconds of a plain broadcast. Raises InvrlError."""
    collective = CollectiveWeights.model_validate({"timeout_s": settings.deadline_s})
    timeout_s = collective.bucket_timeout_s
    dtype: torch.dtype = getattr(torch, settings.engine_dtype)
    tensors = random_tensors(empty_tensors(config, dtype))
    weights = BroadcastWeights(tensors, timeout_s=timeout_s)
    layout = await weights.layout()
    with TemporaryDirectory(prefix="invrl-bench-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            loader = LoaderServer(layout, folder)
            stack.push_async_callback(asyncio.to_thread, loader.stop)
            raw = RawBroadcasts(
                weights.num_bytes,
                count=settings.repetitions + 1,
                deadline_s=settings.deadline_s,
                folder=folder,
            )
            stack.push_async_callback(asyncio.to_thread, raw.stop)
            await asyncio.to_thread(loader.wait_ready, deadline_s=_START_S)
            await asyncio.to_thread(raw.join)
            client = await stack.enter_async_context(loader.client())
            engine = UpdatedEngine(
                weights,
                BroadcastReceiver("loader", client, collective),
                canary_prompts=(),
                dtype=settings.engine_dtype,
                deadline_s=settings.deadline_s,
                load=BroadcastLoads(weights, timeout_s=timeout_s).load,
            )
            await engine.warm_up()
            return await _measure(engine, raw, settings.repetitions)


async def _measure(engine: UpdatedEngine, raw: RawBroadcasts, repetitions: int) -> Part:
    await asyncio.to_thread(raw.seconds)  # faults its memory in
    updates = []
    raw_seconds: list[float] = []
    unequal = 0
    for _ in range(repetitions):
        await engine.change_weights()
        copy_s = await engine.copy_seconds()
        raw_seconds.append(await asyncio.to_thread(raw.seconds))
        updates.append(await engine.update(copy_s=copy_s))
        unequal += await engine.unequal_tensors()
    pairs = zip(updates, raw_seconds, strict=True)
    ratio = median(update.phases["load"] / raw_s for update, raw_s in pairs)
    details = summarize(updates) | {
        "raw_s": median(raw_seconds),
        "unequal_tensors": unequal,
    }
    failure = (
        f"{BROADCAST}: {unequal} tensors are not what the trainer has"
        if unequal
        else ""
    )
    return Part(
        ratios={BROADCAST: ratio}, details={BROADCAST: details}, failure=failure
    )
