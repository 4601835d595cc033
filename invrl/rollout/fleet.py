"""M engines behind one router, as one thing that starts, updates and ends.

Invariant: the router knows an engine only while it holds the fleet's version whole; an engine that
leaves (`evict`) is unregistered first and then ended. An engine's health is judged only while it may
generate, so a pause (weight update) is never taken for a hang. A plain class: `invrl serve` uses it directly,
training inside a Ray actor. Start it from a thread that lives as long as the servers should."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import DeadlineError, ServerError
from invrl.interfaces import StagedWeights, WeightLayout, WeightReceiver
from invrl.rollout.config import EngineConfig
from invrl.rollout.engine_server import EngineServer
from invrl.rollout.router_server import RouterServer
from invrl.rollout.sglang_args import router_flags, sglang_flags
from invrl.rollout.sglang_client import EngineLimits, SglangClient
from invrl.rollout.weight_receiver import RECEIVERS, EngineReceiver
from invrl.weight_sync import load_verified

_LOG = logging.getLogger(__name__)

_IDLE_WITHIN_S = 10.0
"""A new engine has answered the last of its checks; its scheduler may still be putting that away."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine of the fleet: its process, the client with its keys, its receiver."""

    server: EngineServer
    client: SglangClient
    receiver: EngineReceiver


class HealthCheck:
    """Does an engine's scheduler still make tokens? The router asks `/server_info`, which a hung one answers
    too. It takes `failures` bad answers in a row, and a dead process at once. A busy engine may take long
    (`deadline_s`) to get to the probe's token."""

    def __init__(self, *, deadline_s: float = 30.0, failures: int = 3) -> None:
        self._deadline_s, self._failures = deadline_s, failures
        self._failed: Counter[str] = Counter()

    async def round(self, engines: Mapping[str, Engine]) -> dict[str, str]:
        """Name -> reason of the engines that must leave."""
        verdicts = await asyncio.gather(*(self._judge(name, engine) for name, engine in engines.items()))
        return {name: verdict for name, verdict in zip(engines, verdicts, strict=True) if verdict}

    async def _judge(self, name: str, engine: Engine) -> str:
        if not engine.server.alive():
            return "its process has ended"
        if engine.receiver.is_paused:
            return ""
        generates = await engine.client.generates(deadline_s=self._deadline_s)
        # Paused while we asked: the silence proves nothing.
        self._failed[name] = 0 if generates or engine.receiver.is_paused else self._failed[name] + 1
        if self._failed[name] < self._failures:
            return ""
        del self._failed[name]
        return f"it made no token within {self._deadline_s} s, {self._failures} times in a row"


class Fleet:
    """`start`, then `router` is for the gateway, `receivers` for updates."""

    def __init__(
        self,
        engine: EngineConfig,
        model_path: Path,
        run_folder: Path,
        sglang: Mapping[str, object] | None = None,
        router: Mapping[str, object] | None = None,
        carrier: str = "arena",
    ) -> None:
        """Starts the router. `sglang`, `router`: passed through, by upstream's field names. ConfigError."""
        self._carrier = carrier
        self.limits = EngineLimits.of(model_path, max_total_tokens=engine.engine_max_total_tokens)
        self._config, self._model_path, self._run_folder = engine, model_path, run_folder
        self._sglang_flags = sglang_flags(sglang or {})
        self.engines: dict[str, Engine] = {}
        self._watch: asyncio.Task[None] | None = None
        self.evicted: dict[str, str] = {}
        """Name -> reason of engines that left and were not restarted."""
        flags, timeout_s = router_flags(router or {}), engine.router_start_timeout_s
        self.router = RouterServer(run_folder=run_folder, start_timeout_s=timeout_s, passthrough=flags)

    async def start(self) -> None:
        """All engines at once; none is routable before `admit`. On an error nothing is left running."""
        try:
            names = [f"engine-{at}" for at in range(self._config.num_engines)]
            self.engines = {name: self._launch(name) for name in names}
            servers = [engine.server for engine in self.engines.values()]
            await asyncio.gather(*(asyncio.to_thread(server.wait_ready) for server in servers))
            await asyncio.to_thread(self.router.wait_ready)
        except BaseException:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._watch_health())

    async def admit(self) -> None:
        """Let the router know the engines: they hold the fleet's version. ServerError, DeadlineError."""
        await asyncio.gather(*(self._register(engine) for engine in self.engines.values()))

    async def receivers(self) -> Sequence[WeightReceiver]:
        return [engine.receiver for engine in self.engines.values()]

    def check(self) -> None:
        """Raises ServerError if the router has ended or no engine is left."""
        self.router.check_alive()
        if not self.engines and self.evicted:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.evicted.items())
            raise ServerError(f"no engine is left: {reasons}")

    async def evict(self, name: str, reason: str) -> None:
        """Unregister an engine, then end it. Nothing to do for one that has left."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        _LOG.error("%s leaves the fleet: %s", name, reason)
        self.evicted[name] = reason
        with contextlib.suppress(ServerError, DeadlineError):  # a router that is gone routes to nobody
            await asyncio.to_thread(self.router.unregister, engine.server.url)
        await self._end(engine)

    async def restart(self, name: str, layout: WeightLayout, staged: StagedWeights) -> None:
        """Bring an evicted engine back with `staged` (the fleet's version), proved by checksum, and
        only then let the router know it. Raises ServerError, DeadlineError, WeightSyncError."""
        engine = self._launch(name)
        try:
            await asyncio.to_thread(engine.server.wait_ready)
            await engine.receiver.check(layout, staged)
            await load_verified(engine.receiver, staged)
            await engine.receiver.commit(staged.version)
            await engine.client.flush_cache(idle_within_s=_IDLE_WITHIN_S)
            await self._register(engine)
        except BaseException:
            await self._end(engine)
            raise
        self.engines[name] = engine
        self.evicted.pop(name, None)

    async def stop(self) -> None:
        """End everything. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        engines, self.engines = list(self.engines.values()), {}
        await asyncio.gather(*(self._end(engine) for engine in engines))
        await asyncio.to_thread(self.router.stop)

    async def _watch_health(self) -> None:
        check = HealthCheck()
        while True:
            await asyncio.sleep(self._config.engine_health_interval_s)
            for name, reason in (await check.round(dict(self.engines))).items():
                await self.evict(name, reason)

    def _launch(self, name: str) -> Engine:
        model, folder, flags = self._model_path, self._run_folder, self._sglang_flags
        # In this thread: the kernel ends a child together with the thread that started it.
        server = EngineServer(name, self._config, model_path=model, run_folder=folder, passthrough=flags)
        url, key, admin_key = server.url, server.api_key, server.admin_key
        client = SglangClient(url, limits=self.limits, api_key=key, admin_key=admin_key, name=name)
        receiver = RECEIVERS[self._carrier](name, client)
        return Engine(server=server, client=client, receiver=receiver)

    async def _register(self, engine: Engine) -> None:
        server = engine.server
        await asyncio.to_thread(self.router.register, server.url, api_key=server.api_key)

    async def _end(self, engine: Engine) -> None:
        await engine.client.close()
        await asyncio.to_thread(engine.server.stop)
