"""`python -m benchmarks.weights`: what an update of the engine's weights costs, beside
one copy of the same bytes.

The same updates run against the weight loader alone (`loader_server.py`) and against a
real engine, idle and with requests in flight. The weight transport `collective` runs
beside plain broadcasts on the loader alone. Imports torch when it is imported.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from transformers import PretrainedConfig

from benchmarks.ratios import Part
from benchmarks.weight_updates.changing_weights import (
    ChangingModel,
    ChangingWeights,
    empty_tensors,
    one_billion_config,
    random_tensors,
    read_model_config,
)
from benchmarks.weight_updates.loader_server import LoaderServer
from benchmarks.weight_updates.weight_broadcasts import measure_broadcasts
from benchmarks.weight_updates.weight_settings import (
    BROADCAST,
    FEW_REQUESTS,
    IN_FLIGHT_MODE,
    MANY_REQUESTS,
    WeightBenchSettings,
)
from benchmarks.weight_updates.weight_updates import (
    UpdatedEngine,
    measure_idle,
    measure_in_flight,
)
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.errors import InvrlError
from invrl.weights.config import ArenaWeights

_MEMORY_RESERVE = 1 << 30
"""Bytes that the loader alone needs besides weights: torch, twice, and the buffers of
the copy."""
_KV_TOKENS = 24_576
"""Enough for all requests in flight, each with its prompt and all of its tokens."""
_LOADER_START_S = 300.0


async def measure_weights(
    settings: WeightBenchSettings, report: Callable[[Part], None]
) -> None:
    """Reports each part as soon as it is measured. One that fails costs none of the
    others."""
    torch.set_num_threads(1)
    model = read_model_config(Path(settings.model_path))
    await report_part("loader", _measure_on_loader("loader", model, settings), report)
    if settings.device == "cpu":
        await report_part(BROADCAST, measure_broadcasts(model, settings), report)
    if settings.with_engine:
        await _measure_on_engine(settings, report)
    if settings.with_1b:
        await report_part(
            "loader_1b",
            _measure_on_loader("loader_1b", one_billion_config(), settings),
            report,
        )


async def report_part(
    name: str, measurement: Awaitable[Part], report: Callable[[Part], None]
) -> None:
    """Report a part once it is measured, or why it could not be."""
    try:
        report(await measurement)
    except InvrlError as error:
        report(failed_part(name, error))


def failed_part(name: str, error: InvrlError) -> Part:
    return Part(
        ratios={}, details={f"{name}_failed": str(error)}, failure=f"{name}: {error}"
    )


async def _measure_on_loader(
    name: str, config: PretrainedConfig, settings: WeightBenchSettings
) -> Part:
    """Two processes: this one is the trainer, the other is the engine's weight loader
    alone."""
    device = None if settings.device == "cpu" else torch.device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.engine_dtype)
    empty = empty_tensors(config, dtype)
    num_bytes = sum(tensor.nbytes for tensor in empty.values())
    # The trainer's tensors, two slots, the engine's parameters.
    needed = 4 * num_bytes + _MEMORY_RESERVE
    available = psutil.virtual_memory().available
    if device is not None:
        available, _ = torch.cuda.mem_get_info(device)
    if needed > available:
        refused = f"it needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available"
        return Part(ratios={}, details={name: {"refused": refused}})
    weights = ChangingWeights(random_tensors(empty, device), device=device)
    with TemporaryDirectory(prefix="invrl-bench-") as folder:
        server = LoaderServer(await weights.layout(), Path(folder), settings.device)
        try:
            await asyncio.to_thread(server.wait_ready, deadline_s=_LOADER_START_S)
            async with server.client() as client:
                engine = UpdatedEngine(
                    weights,
                    ArenaReceiver(
                        "loader",
                        client,
                        _weights(settings),
                    ),
                    canary_prompts=(),
                    dtype=settings.engine_dtype,
                    deadline_s=settings.deadline_s,
                    device=device,
                )
                await engine.warm_up()
                await engine.copy_seconds()  # takes its buffers
                free_before = _free_bytes(device)
                part = await measure_idle(
                    engine, name=name, updates=settings.repetitions
                )
                grown = free_before - _free_bytes(device)
        finally:
            await asyncio.to_thread(server.stop)
    part.details[name]["num_bytes"] = num_bytes
    if device is None:
        return part
    return with_gpu_ratios(part, name, memory_growth=grown)


def with_gpu_ratios(part: Part, name: str, *, memory_growth: int) -> Part:
    """Adds what both ends of the arena take, over a copy of the same bytes, and the
    growth of the memory in use, over those bytes. `memory_growth`: in bytes."""
    details = part.details[name]
    phases = details["phases"]
    ratios = {
        **part.ratios,
        f"{name}_stage_and_load": (phases["stage"] + phases["load"])
        / details["copy_s"],
        f"{name}_memory_growth": memory_growth / details["num_bytes"],
    }
    return replace(part, ratios=ratios)


def _free_bytes(device: torch.device | None) -> int:
    """Bytes of the device's memory in use by all processes; 0 for the host's, where
    others come and go."""
    if device is None:
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free


async def _measure_on_engine(
    settings: WeightBenchSettings, report: Callable[[Part], None]
) -> None:
    with TemporaryDirectory(prefix="invrl-bench-") as folder:
        async with AsyncExitStack() as stack:
            try:
                engine, client = await _start_engine(settings, Path(folder), stack)
            except InvrlError as error:
                report(failed_part("engine", error))
                return

            def in_flight(number: int, updates: int) -> Awaitable[Part]:
                return measure_in_flight(
                    engine,
                    client,
                    number=number,
                    updates=updates,
                    deadline_s=settings.deadline_s,
                )

            idle = measure_idle(
                engine, name="engine_idle", updates=settings.repetitions
            )
            await report_part("engine_idle", idle, report)
            few = in_flight(FEW_REQUESTS, settings.updates)
            await report_part(f"in_flight_{FEW_REQUESTS}", few, report)
            many = in_flight(MANY_REQUESTS, settings.repetitions)
            await report_part(f"in_flight_{MANY_REQUESTS}", many, report)


async def _start_engine(
    settings: WeightBenchSettings, folder: Path, stack: AsyncExitStack
) -> tuple[UpdatedEngine, SglangClient]:
    """One engine behind a router, which `stack` ends, and a client of the router."""
    config = EngineConfig.model_validate(
        {"dtype": settings.engine_dtype, "max_total_tokens": _KV_TOKENS}
    )
    fleet = Fleet(
        config,
        Path(settings.model_path),
        folder,
        sglang={"max-running-requests": str(MANY_REQUESTS + FEW_REQUESTS)},
        weights=_weights(settings),
    )
    stack.push_async_callback(fleet.stop)
    await fleet.start()
    await fleet.admit()
    client = SglangClient(
        fleet.router.url,
        limits=fleet.limits,
        api_key=fleet.router.api_key,
        name="the router",
    )
    await stack.enter_async_context(client)
    dtype: torch.dtype = getattr(torch, settings.engine_dtype)
    engine = UpdatedEngine(
        ChangingModel(Path(settings.model_path), dtype),
        next(iter(fleet.engines.values())).receiver,
        canary_prompts=settings.canary_prompts,
        dtype=settings.engine_dtype,
        deadline_s=settings.deadline_s,
    )
    await engine.warm_up()
    return engine, client


def _weights(settings: WeightBenchSettings) -> ArenaWeights:
    return ArenaWeights.model_validate(
        {
            "arena_mode": settings.weight_arena,
            "inflight": IN_FLIGHT_MODE,
            "timeout_s": settings.deadline_s,
        }
    )
