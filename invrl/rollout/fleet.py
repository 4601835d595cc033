"""M engines behind one router, as one thing that starts, updates and ends.

Invariant: the router knows an engine only while it holds the fleet's version whole; an engine that
leaves (`evict`) is unregistered first and then ended. A plain class: `invrl serve` uses it directly,
training inside a Ray actor. Start it from a thread that lives as long as the servers should."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import DeadlineError, ServerError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightReceiver
from invrl.rollout.config import EngineConfig
from invrl.rollout.engine_server import EngineServer
from invrl.rollout.health import HealthCheck
from invrl.rollout.router_server import RouterServer
from invrl.rollout.sglang_args import router_flags, sglang_flags
from invrl.rollout.sglang_client import EngineLimits, SglangClient
from invrl.rollout.weight_receiver import RECEIVERS, EngineReceiver
from invrl.types import TensorSpec, WeightVersion
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

    @property
    def name(self) -> str:
        return self.server.name

    def alive(self) -> bool:
        return self.server.alive()

    def paused(self) -> bool:
        return self.receiver.is_paused

    async def generates(self, *, deadline_s: float) -> bool:
        return await self.client.generates(deadline_s=deadline_s)


class Fleet:
    """`start`, then `router_url` and `router_api_key` are for the gateway, `receivers` for updates."""

    def __init__(
        self,
        engine: EngineConfig,
        model_path: Path,
        run_folder: Path,
        sglang: Mapping[str, object] | None = None,
        router: Mapping[str, object] | None = None,
        carrier: str = "arena",
    ) -> None:
        """Starts the router. `sglang`, `router`: what the user passes through, by upstream's field names.
        ConfigError."""
        self._carrier = carrier
        self.limits = EngineLimits.of(model_path, max_total_tokens=engine.engine_max_total_tokens)
        self._config, self._model_path, self._run_folder = engine, model_path, run_folder
        self._replies = run_folder / "engine_replies"
        self._sglang_flags = sglang_flags(sglang or {})
        self._engines: dict[str, Engine] = {}
        self._version = WeightVersion(0)
        flags = router_flags(router or {})
        timeout_s = engine.router_start_timeout_s
        self._watch: asyncio.Task[None] | None = None
        self.evicted: dict[str, str] = {}
        """Name -> reason of engines that left and were not restarted."""
        self._router = RouterServer(run_folder=run_folder, start_timeout_s=timeout_s, passthrough=flags)

    @property
    def router_url(self) -> str:
        return self._router.url

    @property
    def router_api_key(self) -> str:
        return self._router.api_key

    @property
    def engines(self) -> Mapping[str, Engine]:
        return dict(self._engines)

    async def start(self) -> None:
        """All engines at once; none is routable before `admit`. On an error nothing is left running."""
        try:
            names = [f"engine-{at}" for at in range(self._config.num_engines)]
            self._engines = {name: self._launch(name) for name in names}
            await asyncio.gather(*(self._ready(engine) for engine in self._engines.values()))
            await asyncio.to_thread(self._router.wait_ready)
        except BaseException:
            await self.stop()
            raise
        check = HealthCheck(interval_s=self._config.engine_health_interval_s)
        self._watch = asyncio.create_task(check.watch(lambda: self.engines, self.evict))

    async def admit(self) -> None:
        """Let the router know the engines: they hold the fleet's version. ServerError, DeadlineError."""
        await asyncio.gather(*(self._register(engine) for engine in self._engines.values()))

    async def receivers(self) -> Sequence[WeightReceiver]:
        return [engine.receiver for engine in self._engines.values()]

    def check(self) -> None:
        """Raises ServerError if the router has ended or no engine is left."""
        self._router.check_alive()
        if not self._engines and self.evicted:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.evicted.items())
            raise ServerError(f"no engine is left: {reasons}")

    async def committed(self, version: WeightVersion) -> None:
        """The fleet now holds `version`: what an engine that is restarted must load."""
        self._version = version

    async def evict(self, name: str, reason: str) -> None:
        """Unregister an engine, then end it. Nothing to do for one that has left."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        _LOG.error("%s leaves the fleet: %s", name, reason)
        self.evicted[name] = reason
        with contextlib.suppress(ServerError, DeadlineError):  # a router that is gone routes to nobody
            await asyncio.to_thread(self._router.unregister, engine.server.url)
        await self._end(engine)

    async def restart(self, name: str, layout: tuple[TensorSpec, ...], staged: StagedWeights) -> None:
        """Bring an evicted engine back with `staged` (the fleet's version), proved by checksum, and
        only then let the router know it. Raises ServerError, DeadlineError, WeightSyncError."""
        if name in self._engines:
            raise ServerError(f"{name} is running")
        if staged.version != self._version:
            reason = f"{name} cannot return with version {staged.version}: the fleet holds {self._version}"
            raise WeightSyncError(reason, engine=name)
        engine = self._launch(name)
        try:
            await self._ready(engine)
            await engine.receiver.check(layout, staged)
            await load_verified(engine.receiver, staged)
            await engine.receiver.commit(staged.version)
            await engine.client.flush_cache(idle_within_s=_IDLE_WITHIN_S)
            await self._register(engine)
        except BaseException:
            await self._end(engine)
            raise
        self._engines[name] = engine
        self.evicted.pop(name, None)

    async def stop(self) -> None:
        """End everything. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        engines, self._engines = list(self._engines.values()), {}
        await asyncio.gather(*(self._end(engine) for engine in engines))
        await asyncio.to_thread(self._router.stop)
        shutil.rmtree(self._replies, ignore_errors=True)

    def _launch(self, name: str) -> Engine:
        model, folder, flags = self._model_path, self._run_folder, self._sglang_flags
        # In this thread: the kernel ends a child together with the thread that started it.
        server = EngineServer(name, self._config, model_path=model, run_folder=folder, passthrough=flags)
        url, key, admin_key = server.url, server.api_key, server.admin_key
        client = SglangClient(url, limits=self.limits, api_key=key, admin_key=admin_key, name=name)
        receiver = RECEIVERS[self._carrier](name, client, reply_folder=self._replies)
        return Engine(server=server, client=client, receiver=receiver)

    async def _ready(self, engine: Engine) -> None:
        await asyncio.to_thread(engine.server.wait_ready)

    async def _register(self, engine: Engine) -> None:
        server = engine.server
        await asyncio.to_thread(self._router.register, server.url, api_key=server.api_key)

    async def _end(self, engine: Engine) -> None:
        await engine.client.close()
        await asyncio.to_thread(engine.server.stop)
