"""Agents on an engine whose KV cache is too small for all of them, on a jumping clock:
the real gate, and an engine that only takes time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np
from streamed import generate
from virtual_run import Setting

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.gateway.gate.gate import Gate, GatedSampler
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.generation import Sampler
from invrl.interfaces import GatePolicy
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.plan.paced_engine import PacedEngine
from invrl.types.fleet import EngineLoad, FleetSnapshot
from invrl.types.sessions import Sampling, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Agents whose context grows by the same number of tokens in each turn, so that 96
    % of their prompt tokens could be cached."""

    slots: int = 64
    """Agents at a time."""
    agents: int = 128
    group_size: int = 8
    turns: int = 43
    tool_tokens: int = 2858
    """Tokens that the environment adds in each turn."""
    sampled_tokens: int = 444
    tool_s: float = 5.0
    """Mean seconds between two turns, exponentially distributed."""
    over_subscription: float = 8.0
    """Mean tokens of the agents that run at a time over the tokens of the KV cache."""
    prefill_tokens_per_s: float = 10_000.0

    @property
    def mean_tokens(self) -> float:
        return (self.turns + 1) / 2 * (self.tool_tokens + self.sampled_tokens)

    @property
    def kv_tokens(self) -> int:
        return int(self.slots * self.mean_tokens / self.over_subscription)


def drawn_agents(seed: int) -> Agents:
    """Draw a workload: agents, turns, tokens, tools and the size of the KV cache."""
    random = np.random.default_rng(seed)
    slots = int(random.integers(16, 33))
    return Agents(
        slots=slots,
        agents=slots * 3 // 2,
        group_size=int(random.choice([1, 4, 8])),
        turns=int(random.integers(15, 60)),
        tool_tokens=int(random.integers(500, 4000)),
        sampled_tokens=int(random.integers(100, 800)),
        tool_s=float(random.uniform(1, 20)),
        over_subscription=float(random.uniform(2, 10)),
    )


class CachingEngine:
    """An engine with a KV cache. It evicts the prefixes that were used least recently,
    computes one prompt at a time, and lets requests wait while others fill the cache."""

    def __init__(self, agents: Agents, number: int = 0) -> None:
        self.name = f"engine-{number}"
        self._agents = agents
        self._decoding = PacedEngine(Setting().workload)
        self._prefill = asyncio.Lock()
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Cached tokens of each agent that does not run, the least recently used
        first."""
        self._used = 0
        """Tokens of running requests."""
        self.num_running = 0
        self.num_waiting = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.num_running,
            waiting=self.num_waiting,
            kv_tokens=self._agents.kv_tokens,
            kv_used=self._used,
            kv_use=self._used / self._agents.kv_tokens,
            instance=self.name,
        )

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        agent = int(request.input_ids_T[0])
        num_prompt = len(request.input_ids_T)
        num_new = request.sampling.max_new_tokens
        self.num_waiting += 1
        async with self._queue:
            while self._used + num_prompt + num_new > self._agents.kv_tokens:
                self._freed.clear()
                await self._freed.wait()
            self.num_waiting -= 1
            num_cached = min(self._cached.pop(agent, 0), num_prompt)
            self._used += num_prompt + num_new
            self._evict()
        self.num_running += 1
        self.prompt_tokens += num_prompt
        self.cached_tokens += num_cached
        async with self._prefill:
            seconds = (num_prompt - num_cached) / self._agents.prefill_tokens_per_s
            await asyncio.sleep(seconds)
        await self._decoding.generate(num_new)
        self.num_running -= 1
        self._used -= num_prompt + num_new
        self._cached[agent] = num_prompt + num_new
        self._evict()
        self._freed.set()
        yield GenerateChunk(
            ids_T=np.zeros(num_new, np.int32),
            logprobs_T=np.zeros(num_new, np.float32),
            spans=(),
        )
        yield GenerateEnd(
            spans=(),
            finish_reason="length",
            matched_stop=None,
            cached_tokens=num_cached,
            engine=self.name,
        )

    def _evict(self) -> None:
        excess = self._used + sum(self._cached.values()) - self._agents.kv_tokens
        while excess > 0:
            agent, tokens = self._cached.popitem(last=False)
            if tokens > excess:
                self._cached[agent] = tokens - excess
                self._cached.move_to_end(agent, last=False)
            excess -= tokens


class StickyRouter:
    """Sends each routing key to one of the engines, the same each time."""

    def __init__(self, engines: list[CachingEngine]) -> None:
        self.engines = engines
        self._assigned: dict[str, CachingEngine] = {}

    def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        key = request.routing_key
        if key not in self._assigned:
            number = len(self._assigned) % len(self.engines)
            self._assigned[key] = self.engines[number]
        return self._assigned[key].stream(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsResult:
    seconds: float
    """Until all agents have ended."""
    turns: int
    prefix_hits: float
    """Cached prompt tokens over all prompt tokens."""
    turns_held: int
    longest_hold_s: float

    @property
    def turns_per_s(self) -> float:
        return self.turns / self.seconds


def run_agents(
    agents: Agents,
    policy: GatePolicy | None,
    *,
    max_hold_s: float = 1e9,
    num_engines: int = 1,
) -> AgentsResult:
    """Run all agents, with a gate if there is a policy."""
    return run_jumping(_run(agents, policy, max_hold_s, num_engines))


async def _run(
    agents: Agents, policy: GatePolicy | None, max_hold_s: float, num_engines: int
) -> AgentsResult:
    loop = asyncio.get_running_loop()
    engines = [CachingEngine(agents, number) for number in range(num_engines)]
    sampler: Sampler = StickyRouter(engines)
    records: dict[str, SessionRecord] = {}
    gate = None
    following = None
    if policy is not None:
        gate = Gate(
            policy,
            max_hold_s=max_hold_s,
            open_sessions=lambda: list(records.values()),
            read_fleet=lambda: FleetSnapshot(
                engines={engine.name: engine.load for engine in engines}
            ),
        )
        following = asyncio.create_task(gate.follow())
        sampler = GatedSampler(sampler, gate)
    longest_s = 0.0
    slots = asyncio.Semaphore(agents.slots)

    async def run_agent(number: int) -> None:
        nonlocal longest_s
        random = np.random.default_rng(number)
        async with slots:
            group = number // agents.group_size
            record = open_record(f"ses-{number}", group, loop.time())
            records[record.session.id] = record
            tokens = 0
            for turn in range(agents.turns):
                await asyncio.sleep(random.exponential(agents.tool_s))
                tokens += agents.tool_tokens
                began_at = loop.time()
                await generate(
                    sampler,
                    GenerateRequest(
                        rid=f"{number}-{turn}",
                        input_ids_T=np.broadcast_to(np.int32(number), tokens),
                        sampling=Sampling(max_new_tokens=agents.sampled_tokens),
                        routing_key=record.session.id,
                    ),
                )
                longest_s = max(longest_s, loop.time() - began_at)
                tokens += agents.sampled_tokens
            del records[record.session.id]

    async with asyncio.TaskGroup() as running:
        for number in range(agents.agents):
            running.create_task(run_agent(number))
    if following is not None:
        following.cancel()
    return AgentsResult(
        seconds=loop.time(),
        turns=agents.agents * agents.turns,
        prefix_hits=sum(engine.cached_tokens for engine in engines)
        / sum(engine.prompt_tokens for engine in engines),
        turns_held=gate.turns_held if gate is not None else 0,
        longest_hold_s=longest_s,
    )


def open_record(session_id: str, group: int, opened_at: float) -> SessionRecord:
    """Return the record of a session that was opened at this time."""
    session = Session(
        id=session_id,
        key="",
        base_url="",
        task_id=f"t{group}",
        group_id=f"g{group}",
        index=0,
        attempt=0,
        purpose="train",
        sampling=Sampling(),
    )
    return SessionRecord(session=session, key_hash=b"", opened_at=opened_at)
