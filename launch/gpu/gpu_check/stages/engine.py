"""A real engine and a real trainer rank on one card: the same log-probs, then twenty
weight updates while 32 requests are in flight all the time.

Each update is the transaction of a run, by an arena in the card's memory, after a
training step. The engine reads its weights back after each: they must be the bytes that
were sent. No request may fail, most tensors must change, and the memory of the card
must not grow. Then a few updates by SGLang's buckets.
"""

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import psutil
import torch

from benchmarks.weight_updates.streams import Streams
from benchmarks.weight_updates.token_times import longest_gap
from benchmarks.weight_updates.weight_updates import TimedUpdate, UpdatedEngine
from gpu_check.log_tails import print_tails
from gpu_check.random_model import random_model
from gpu_check.rank_sender import RankSender
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.engines.client.weight_receivers import RECEIVERS
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_launcher import Engine
from invrl.weights.config import ArenaWeights
from invrl.weights.transports.bucket_loads import BucketLoads
from invrl.weights.update.committed import load_alone

_LARGEST_MEAN_GAP = 0.02
"""In nats, of bfloat16 on both sides."""
_PROMPTS = 4
_PROMPT_TOKENS = 64
_MAX_NEW_TOKENS = 256
_DEADLINE_S = 60.0
"""Of a phase of an update, and of a wait for tokens."""
_SMOKE_DEADLINE_S = 300.0
_MOST_GROWTH = 0.25e9
"""Bytes that the memory in use may grow by, from the first update to the last."""


def run(settings: CheckSettings) -> None:
    asyncio.run(_run(settings))


async def _run(settings: CheckSettings) -> None:
    model = random_model(settings, settings.model)
    with TemporaryDirectory(prefix="gpu-check-") as folder:
        started = time.monotonic()
        fleet = Fleet(
            EngineConfig.model_validate({"max_total_tokens": 32_768}),
            model,
            Path(folder),
            sglang={**settings.sglang_flags, "max_running_requests": "40"},
            weights=_weights(settings),
        )
        sender = RankSender()
        try:
            await fleet.start()
            emit(model=model.name, engine_start_s=time.monotonic() - started)
            started = time.monotonic()
            await sender.start(model, arena_on_gpu=not settings.smoke)
            emit(trainer_start_s=time.monotonic() - started)
            [engine] = fleet.engines.values()
            prompts = await _compare_logprobs(sender, engine)
            updates = _Updates(settings, sender, engine, prompts)
            faults = await updates.measure("arena", 3 if settings.smoke else 20)
            faults += await updates.measure("bucket", 2 if settings.smoke else 5)
            assert not faults, "; ".join(faults)
        except BaseException:
            print_tails(Path(folder))
            raise
        finally:
            await fleet.stop()
            sender.close()
            for log in Path(folder).rglob("*.log"):
                shutil.copy(log, settings.out / f"engine-stage-{log.name}")


async def _compare_logprobs(sender: RankSender, engine: Engine) -> list[list[int]]:
    """Returns the prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 500, _PROMPT_TOKENS).tolist() for _ in range(_PROMPTS)]
    started = time.monotonic()
    trained = np.concatenate(await sender.logprobs(prompts))
    first_pass_s = time.monotonic() - started
    served = np.concatenate(await engine.receiver.logprobs(prompts))
    gaps = np.abs(served - trained)
    emit(
        mean_gap=float(gaps.mean()),
        max_gap=float(gaps.max()),
        spread_of_logprobs=float(trained.std()),
        trainer_first_pass_s=first_pass_s,
    )
    assert gaps.mean() <= _LARGEST_MEAN_GAP, (
        f"engine and trainer differ by {gaps.mean():.3g} nats on average"
    )
    return prompts


def _weights(settings: CheckSettings) -> ArenaWeights:
    return ArenaWeights.model_validate(
        {
            "arena_device": settings.device,
            "timeout_s": _SMOKE_DEADLINE_S if settings.smoke else _DEADLINE_S,
        }
    )


class _Updates:
    """Updates of the engine under load, by one transport after the other."""

    def __init__(
        self,
        settings: CheckSettings,
        sender: RankSender,
        engine: Engine,
        prompts: list[list[int]],
    ) -> None:
        self._settings = settings
        self._sender = sender
        self._engine = engine
        self._prompts = prompts
        self._streams = 4 if settings.smoke else 32
        self._version = 0

    async def measure(
        self, transport: Literal["arena", "bucket"], number: int
    ) -> list[str]:
        """Reports the figures, and returns what must not be."""
        updated = await self._updated_engine(transport)
        self._sender.changed_tensors.clear()
        updates: list[TimedUpdate] = []
        unequal: list[int] = []
        memory = [_memory_in_use(self._settings)]
        deadline_s = _SMOKE_DEADLINE_S if self._settings.smoke else _DEADLINE_S
        async with Streams(
            self._engine.client,
            number=self._streams,
            max_new_tokens=_MAX_NEW_TOKENS,
            deadline_s=deadline_s,
        ) as streams:
            await streams.wait_for_tokens(1)
            for _ in range(number):
                await updated.change_weights()
                copy_s = await updated.copy_seconds()
                updates.append(await updated.update(copy_s=copy_s))
                await streams.wait_for_tokens(2)
                await updated.receiver.pause()
                unequal.append(await updated.unequal_tensors())
                await updated.receiver.resume()
                await streams.wait_for_tokens(1)
                memory.append(_memory_in_use(self._settings))
        self._version += number
        self._report(transport, updates, streams, unequal, memory)
        return [
            f"{transport}: {fault}" for fault in self._faults(streams, unequal, memory)
        ]

    async def _updated_engine(
        self, transport: Literal["arena", "bucket"]
    ) -> UpdatedEngine:
        """After the updates that warm it up."""
        sync = _weights(self._settings)
        await self._sender.use_transport(transport)
        load = load_alone
        if transport == "bucket":
            load = BucketLoads(self._sender, timeout_s=sync.bucket_timeout_s).load
        # The watch of the engine asks its receiver whether it is paused.
        self._engine.receiver = RECEIVERS[transport](
            "engine-0", self._engine.client, sync
        )
        updated = UpdatedEngine(
            self._sender,
            self._engine.receiver,
            canary_prompts=self._prompts,
            dtype="bfloat16",
            deadline_s=sync.timeout_s,
            version=self._version,
            device=None if self._settings.smoke else torch.device("cuda"),
            load=load,
        )
        self._version += await updated.warm_up()
        await updated.copy_seconds()  # has its buffers from now on
        return updated

    def _report(
        self,
        transport: str,
        updates: list[TimedUpdate],
        streams: Streams,
        unequal: list[int],
        memory: list[float],
    ) -> None:
        gaps = [longest_gap(streams.times, update.window) for update in updates]
        pauses = [update.phases["paused"] for update in updates]
        sync_in_copies = [update.ready_s / update.copy_s for update in updates]
        phases = updates[0].phases.keys()
        staged = self._sender.staged
        assert staged is not None
        emit(
            transport=transport,
            updates=len(updates),
            streams_in_flight=self._streams,
            finished_streams=streams.finished,
            failed_streams=len(streams.failures),
            first_failures=streams.failures[:3],
            unequal_tensors=sum(unequal),
            tensors=len(staged.checksums),
            least_changed_tensors=min(self._sender.changed_tensors),
            num_bytes=staged.num_bytes,
            longest_gap_between_tokens_s={"median": median(gaps), "max": max(gaps)},
            pause_of_transaction_s={"median": median(pauses), "max": max(pauses)},
            phases_s={
                name: median(update.phases[name] for update in updates)
                for name in phases
            },
            copy_s=median(update.copy_s for update in updates),
            sync_in_copies=median(sync_in_copies),
            memory_gb={
                "before": memory[0] / 1e9,
                "first": memory[1] / 1e9,
                "last": memory[-1] / 1e9,
            },
        )

    def _faults(
        self, streams: Streams, unequal: list[int], memory: list[float]
    ) -> Iterator[str]:
        staged = self._sender.staged
        assert staged is not None
        if streams.failures:
            yield f"{len(streams.failures)} requests failed, the first with: {streams.failures[0]}"
        if any(unequal):
            yield f"after an update {max(unequal)} tensors were not what was sent"
        least = min(self._sender.changed_tensors)
        if least <= len(staged.checksums) / 2:
            yield f"a training step changed only {least} of {len(staged.checksums)} tensors"
        growth = memory[-1] - memory[1]
        if growth > _MOST_GROWTH and not self._settings.smoke:
            yield f"the memory in use grew by {growth / 1e9:.2f} GB"


def _memory_in_use(settings: CheckSettings) -> float:
    """Bytes of the card, by all processes; in a smoke run of the machine."""
    if settings.smoke:
        return float(psutil.virtual_memory().used)
    free, total = torch.cuda.mem_get_info()
    return float(total - free)
