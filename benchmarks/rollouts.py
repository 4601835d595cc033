"""Tokens per second of the rollout half, each time beside the same turns straight at
the engine.

`gateway_router`: chat requests through gateway and router. `fleet`: whole batches of
the configuration's own rollouts, from the buffer's admission to the batch (dispatcher,
workers, gateway, router, engine, store). The reference of both replays the recorded
turns at the engine itself: the same prompts, the same number of sampled tokens, the
same number of conversations at a time, no agent and no HTTP but the engine's own. The
cache is empty before each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar
from uuid import uuid4

import aiohttp
import numpy as np

from benchmarks.ratios import Speeds
from invrl.algorithms.advantages.advantages import configured_advantage
from invrl.buffer.samples.training_samples import build_batch
from invrl.engines.client.generation import GenerateChunk, GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.gateway.turns.reply_sampling import WHOLE_REPLY_INTERVAL
from invrl.rollout.workers.session_client import SessionClient
from invrl.run.processes.cluster import Cluster, start_cluster
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task
from invrl.types.turns import Turn

T = TypeVar("T")


async def measure_rollouts(
    config: Config, folder: RunFolder, *, repetitions: int, new_tokens: int
) -> tuple[dict[str, Speeds], TrainBatch]:
    """Both speeds, and the last batch, ready to train. `config` is a run without a
    trainer; `new_tokens` is the length of a reply through the gateway."""
    async with start_cluster(config, folder, None) as cluster:
        await cluster.serving.fleet.admit()
        cluster.rollouts.dispatch()
        store = RunStore(folder.store_path)
        try:
            return await cluster.guard(
                _Bench(config, cluster, store, new_tokens).run(repetitions)
            )
        finally:
            store.close()


class _Bench:
    def __init__(
        self, config: Config, cluster: Cluster, store: RunStore, new_tokens: int
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._store = store
        self._new_tokens = new_tokens
        self._at_once = config.rollout.first_concurrency
        [engine] = cluster.serving.fleet.engines.values()
        self._engine: SglangClient = engine.client

    async def run(self, repetitions: int) -> tuple[dict[str, Speeds], TrainBatch]:
        gateway = Speeds()
        fleet = Speeds()
        # what is slow once was slow in this one
        taken = await self._cluster.buffer.take()
        await self._through_gateway("warm-up")
        ids: list[str] = []
        for nth in range(repetitions):
            taken, seconds = await self._batch(taken)
            ids = [
                rollout.session_id
                for group in taken.groups
                for rollout in group.rollouts_G
            ]
            await self._compare(fleet, ids, seconds)
            sessions, seconds = await self._through_gateway(str(nth))
            await self._compare(gateway, [session.id for session in sessions], seconds)
        algorithm = self._config.algorithm
        advantage = configured_advantage(algorithm)
        batch = build_batch(
            taken,
            [self._store.rollout(id) for id in ids],
            advantage,
            algorithm.advantage_std.eps,
        )
        return {"gateway_router": gateway, "fleet": fleet}, batch

    async def _batch(self, before: TakenBatch) -> tuple[TakenBatch, float]:
        """The next batch, and the seconds since the buffer admitted it."""
        buffer = self._cluster.buffer
        await self._engine.flush_cache(idle_within_s=10.0)
        started = time.monotonic()
        await buffer.advance(before.version)
        return await buffer.take(), time.monotonic() - started

    async def _through_gateway(self, name: str) -> tuple[list[Session], float]:
        """One chat request in each of twice as many sessions as run at a time; the
        seconds that took."""
        serving = self._cluster.serving
        client = SessionClient(serving.gateway.url, env_key=serving.env_key)
        members = tuple(
            GroupMember(index=at, attempt=0) for at in range(2 * self._at_once)
        )
        lease = GroupLease(
            group_id=f"bench/{name}", task=Task(id="bench", payload={}), members=members
        )
        sampling = Sampling(max_new_tokens=self._new_tokens)
        sessions = await client.open(lease, purpose="eval", sampling=sampling)
        await self._engine.flush_cache(idle_within_s=10.0)

        async def ask(session: Session) -> None:
            body = {
                "model": serving.settings.model_name,
                "messages": [
                    {
                        "role": "user",
                        "content": f"Tell me about the number {session.index}.",
                    }
                ],
            }
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.post(
                f"{session.base_url}/chat/completions", json=body, headers=headers
            ) as reply:
                reply.raise_for_status()
                await reply.read()

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            seconds = await _timed(ask, sessions, self._at_once)
        ends = (
            client.abort(session, FailureReason.ABORTED, "measured")
            for session in sessions
        )
        await asyncio.gather(*ends)
        await client.close()
        return sessions, seconds

    async def _compare(
        self, speeds: Speeds, session_ids: Sequence[str], seconds: float
    ) -> None:
        """Replays what took `seconds`, and notes the speed of both."""
        conversations = [self._store.turns(id) for id in session_ids]
        tokens = sum(
            len(turn.sampled_ids_T) for turns in conversations for turn in turns
        )
        await self._engine.flush_cache(idle_within_s=10.0)
        speeds.ours.append(tokens / seconds)
        speeds.reference.append(
            tokens / await _timed(self._replay, conversations, self._at_once)
        )

    async def _replay(self, turns: Sequence[Turn]) -> None:
        ids_T = np.zeros(0, np.int32)
        for turn in turns:
            prompt_T = np.concatenate([ids_T, turn.context_ids_T])
            request = GenerateRequest(
                rid=uuid4().hex,
                input_ids_T=prompt_T,
                sampling=Sampling(
                    temperature=turn.temperature, max_new_tokens=len(turn.sampled_ids_T)
                ),
                ignore_eos=True,
                stream_interval=WHOLE_REPLY_INTERVAL,
            )
            ids_T = prompt_T
            async for item in self._engine.stream(request):
                if isinstance(item, GenerateChunk):
                    ids_T = np.concatenate([ids_T, item.ids_T])


async def _timed(
    work: Callable[[T], Awaitable[None]], items: Iterable[T], at_once: int
) -> float:
    """Seconds for all items, `at_once` at a time."""
    left = iter(items)

    async def agent() -> None:
        for item in left:
            await work(item)

    started = time.monotonic()
    await asyncio.gather(*(agent() for _ in range(at_once)))
    return time.monotonic() - started
