"""Samples, every few seconds, the load of engines and gateway and the memory of each
kind of process.

Invariant: a query without an answer leaves its part of the sample out; the run
continues.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import httpx

from invrl.engines.launch.engine_server import EngineServer
from invrl.host.processes.resident_memory import resident_memory
from invrl.observe.sinks.sinks import Sink
from invrl.run.processes.cluster import Cluster
from invrl.run.processes.metrics_sources import read_gateway
from invrl.run.processes.serving import Serving
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import EndedTurns, RunStore
from invrl.store.timeline_file import EngineSample, GatewaySample, Sample
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.fleet import FleetSnapshot

logger = logging.getLogger(__name__)
_ANSWER_S = 2.0
_ACTORS = {"ray::BufferActor": "buffer", "ray::RolloutWorker": "rollout-workers"}
"""Actors whose process ids the driver does not know, by Ray's process names."""


async def sample_processes(
    cluster: Cluster, folder: RunFolder, observer: Sink, interval_s: float | None
) -> None:
    """Give the observer a sample every `interval_s`, until cancelled. None: no
    samples."""
    serving = cluster.serving
    with contextlib.closing(RunStore(folder.store_path)) as store:
        sequence = await asyncio.to_thread(store.last_turn)

        async def take(seconds: float) -> Sample:
            nonlocal sequence
            ended = await asyncio.to_thread(store.ended_turns, sequence)
            sequence = ended.sequence
            lag_s = await asyncio.to_thread(_loop_lag_s, serving)
            memory = await asyncio.to_thread(process_memory, serving, cluster.trainer)
            return Sample(
                time=time.time(),
                engines=engine_samples(serving.fleet.load),
                gateway=replace(gateway_sample(ended, seconds), loop_lag_s=lag_s),
                memory=memory,
            )

        await _sample(take, observer, interval_s)


async def sample_memory(
    trainer: TrainHandle, observer: Sink, interval_s: float | None
) -> None:
    """Sample as `sample_processes` does, for a standalone trainer: its samples have no
    engines and no gateway."""

    async def take(_seconds: float) -> Sample:
        memory = await asyncio.to_thread(process_memory, None, trainer)
        return Sample(time=time.time(), memory=memory)

    await _sample(take, observer, interval_s)


async def _sample(
    take: Callable[[float], Awaitable[Sample]], observer: Sink, interval_s: float | None
) -> None:
    while interval_s:
        await asyncio.sleep(interval_s)
        try:
            observer.sample(await take(interval_s))
        except Exception:
            logger.exception("a sample of the processes failed")


def process_memory(
    serving: Serving | None, trainer: TrainHandle | None
) -> dict[str, int]:
    """Return the resident bytes of the run's processes on this machine: "driver",
    "gateway", each router, engine and rank by its name, "buffer", "rollout-workers"
    with their children, "other". Any thread may call this."""
    return resident_memory(
        _process_kinds(serving, trainer), own="driver", others="other", names=_ACTORS
    )


def _process_kinds(
    serving: Serving | None, trainer: TrainHandle | None
) -> Mapping[int, str]:
    """Return the kinds of processes, by pid. Of Ray's processes only the trainer's
    ranks are included."""
    kinds: dict[int, str] = {}
    if serving is not None:
        kinds[serving.gateway.process.pid] = "gateway"
        for name, router in serving.fleet.routers.items():
            kinds[router.pid] = name
        for name, engine in dict(serving.fleet.engines).items():
            if isinstance(engine.server, EngineServer):
                kinds[engine.server.pid] = name
    if trainer is not None:
        kinds.update({pid: name for name, pid in trainer.local_pids().items()})
    return kinds


def engine_samples(fleet: FleetSnapshot) -> tuple[EngineSample, ...]:
    """Sample the engines that report their load."""
    return tuple(
        EngineSample(
            name=name,
            running=load.running,
            waiting=load.waiting,
            kv_use=load.kv_use,
            cache_hit_rate=load.cache_hit_rate or None,
            tokens_per_s=load.tokens_per_s or None,
        )
        for name, load in fleet.engines.items()
    )


def _loop_lag_s(serving: Serving) -> float | None:
    """Return the longest lag of a worker's event loop in the last minute; None if the
    gateway does not report it."""
    try:
        reply = read_gateway(serving.gateway.url, serving.env_key, _ANSWER_S)
        return float(reply["loop_lag_ms"]["max"]) / 1000
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        logger.info("the gateway does not say its lag: %r", error)
        return None


def gateway_sample(ended: EndedTurns, seconds: float) -> GatewaySample:
    """Sample the turns that ended in these seconds."""
    latencies = sorted(ended.seconds)
    hit_rate = None
    if ended.prompt_tokens:
        hit_rate = ended.cached_tokens / ended.prompt_tokens
    return GatewaySample(
        requests=len(latencies),
        latency_p50_s=_quantile(latencies, 0.5),
        latency_p95_s=_quantile(latencies, 0.95),
        cache_hit_rate=hit_rate,
        tokens_per_s=ended.sampled_tokens / seconds,
    )


def _quantile(ascending: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed; None without
    values."""
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
