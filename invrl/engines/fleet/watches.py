"""The tasks that watch the engines, the routers and the load of a fleet.

Invariant: a watch that has failed is not forgotten: `check` raises its error until the
watch is ended."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from invrl.engines.fleet.engine_health import engine_death
from invrl.engines.launch.engine_launcher import Engine
from invrl.engines.launch.hosted_engine import HostedEngine
from invrl.errors import InvrlError, ServerError


class Watches:
    """An engine that is silent for `timeout_s` is dead."""

    def __init__(self, *, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self.tasks: dict[str, asyncio.Task[None]] = {}
        """By the name of what is watched."""

    def begin(self, name: str, watch: Coroutine[Any, Any, None]) -> None:
        self.tasks[name] = asyncio.create_task(watch)

    def end(self, name: str) -> None:
        """End the watch of an engine that leaves; it may be the one that calls this."""
        watch = self.tasks.pop(name, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()

    def check(self) -> None:
        """Raise InvrlError if a watch has failed."""
        for name, watch in self.tasks.items():
            if not watch.done() or watch.cancelled():
                continue
            error = watch.exception()
            if isinstance(error, InvrlError):
                raise error
            if error is not None:
                raise ServerError(
                    f"nobody watches {name} any more: {error!r}"
                ) from error

    def death(self, engine: Engine) -> Awaitable[str]:
        """Wait until the engine is dead. Returns the reason."""
        server = engine.server
        return engine_death(
            server.processes(),
            engine.client,
            engine.receiver,
            timeout_s=self._timeout_s,
            interval_s=self._interval_s,
            elsewhere=server.until_ended if isinstance(server, HostedEngine) else None,
        )

    async def while_alive(self, engine: Engine, work: Awaitable[None]) -> None:
        """Await `work` on an engine that has no watch yet. Raises ServerError if the
        engine dies first."""
        working = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self.death(engine))
        try:
            await asyncio.wait((working, death), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ServerError(f"{engine.server.name} died: {death.result()}")
        finally:
            working.cancel()
            death.cancel()
            await asyncio.gather(working, death, return_exceptions=True)
        working.result()
