"""The router of a fleet: a process that is started again when it dies, and the engines
that it routes to.

Invariant: a router that is started again has the address and the keys of the dead one,
so the gateway need not know, and it gets the engines that the dead one routed to and
that are still there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from invrl.engines.config import EngineConfig
from invrl.engines.fleet.blocking_calls import BlockingCalls
from invrl.engines.fleet.engine_health import router_death
from invrl.engines.launch.engine_launcher import Engine
from invrl.engines.launch.sglang_args import router_flags
from invrl.engines.router.router_server import RouterServer
from invrl.engines.router.smg import Smg, find_smg
from invrl.errors import DeadlineError, ServerError
from invrl.host.output.incidents import incidents
from invrl.host.processes.process import RestartLimit, process_tree

_LOG = logging.getLogger(__name__)
_RESTARTS_PER_MINUTE = 3
_RETURN_S = 180.0
"""Seconds that an engine waits for a restarting router, in addition to those until its
silence is noticed."""
_ANSWER_S = 5.0
_POLL_S = 0.05


class FleetRouter:
    """`server` is the router's process of this moment."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        run_folder: Path,
        *,
        passthrough: Sequence[str],
        installed_smg: Smg | None,
        heartbeat_timeout_s: float,
        calls: BlockingCalls,
    ) -> None:
        """Starts the router's process. A router that is silent for longer than
        `heartbeat_timeout_s` is dead. `calls`: the fleet's."""
        self.name = name
        self._config = config
        self._run_folder = run_folder
        self._passthrough = passthrough
        self._smg = installed_smg
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._calls = calls
        self._restarts = RestartLimit(_RESTARTS_PER_MINUTE)
        self._unrouted: set[str] = set()
        """URLs of engines whose registration the router's death interrupted."""
        self.server = self._launch()

    def _launch(self, predecessor: RouterServer | None = None) -> RouterServer:
        return RouterServer(
            run_folder=self._run_folder,
            start_timeout_s=self._config.router_start_timeout_s,
            passthrough=self._passthrough,
            address=None if predecessor is None else predecessor.address,
            installed_smg=self._smg,
            name=self.name,
        )

    async def wait_ready(self) -> None:
        """Raises ServerError or DeadlineError."""
        await self._calls.run(self.server.wait_ready)

    async def watch(
        self, route_again: Callable[[RouterServer], Awaitable[None]]
    ) -> None:
        """Start the router again whenever it dies. `route_again` gets the dead one, and
        calls `register_again` for the engines of the fleet. Raises ServerError or
        DeadlineError once the router dies again and again, or does not come back."""
        while True:
            router = self.server

            async def answers(deadline_s: float, router: RouterServer = router) -> bool:
                return await self._calls.run(router.answers, deadline_s)

            reason = await router_death(
                process_tree(router.pid)[:1],
                answers,
                timeout_s=self._heartbeat_timeout_s,
                interval_s=self._config.health_interval_s,
            )
            if not self._restarts.allows():
                raise ServerError(
                    f"the {self.name} died {_RESTARTS_PER_MINUTE + 1} times in a minute: {reason}. "
                    f"Last lines of {router.log}:\n{router.log_tail()}"
                )
            incidents.error("the %s is started again: %s", self.name, reason)
            await self._end(router)
            self.server = self._launch(router)
            await self.wait_ready()
            await route_again(router)
            incidents.warning("the %s is back", self.name)

    async def register(self, engine: Engine) -> None:
        """Register an engine with the router; if the router must be restarted, wait for
        that first. Raises ServerError or DeadlineError if a router that answers does
        not reach the engine."""
        while True:
            router = self.server
            try:
                return await self._register_now(engine)
            except (ServerError, DeadlineError):
                if self.server is router and await self._answers():
                    raise
                _LOG.warning(
                    "%s waits for the router, which is away", engine.server.name
                )
                await self._until_it_answers()

    async def register_again(self, engine: Engine, dead: RouterServer) -> bool:
        """Registers an engine that the dead router routed to. Returns whether the
        router that took its place routes to it now. Raises ServerError or DeadlineError
        if a router that answers does not reach the engine."""
        url = engine.server.url
        if not (dead.registered(url) or url in self._unrouted):
            return False
        try:
            await self._register_now(engine)
        except (ServerError, DeadlineError):
            if await self._answers():
                raise
            # It is the router again, which is started once more.
            self._unrouted.add(url)
            return False
        self._unrouted.discard(url)
        return True

    async def _register_now(self, engine: Engine) -> None:
        await self._calls.run(
            self.server.register, engine.server.url, api_key=engine.server.api_key
        )

    async def unregister(self, engine: Engine) -> None:
        try:
            await self._calls.run(self.server.unregister, engine.server.url)
        except Exception as error:  # a router that is gone routes to nobody
            _LOG.warning("%s could not be unregistered: %s", engine.server.name, error)

    async def _until_it_answers(self) -> None:
        deadline_s = self._heartbeat_timeout_s + _RETURN_S
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._answers():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DeadlineError("the router to be started again", deadline_s) from None

    async def _answers(self) -> bool:
        return await self._calls.run(self.server.answers, _ANSWER_S)

    async def stop(self) -> None:
        """Nobody may call `watch` any more."""
        await self._end(self.server)
        self.server.address.close()

    async def _end(self, router: RouterServer) -> None:
        try:
            await self._calls.run(router.stop)
        except Exception:
            _LOG.exception("the router could not be ended")


def router_maker(
    config: EngineConfig,
    run_folder: Path,
    options: Mapping[str, object],
    *,
    heartbeat_timeout_s: float,
) -> Callable[..., FleetRouter]:
    """Return what makes a router by its name and the fleet's `calls`. `options` are
    passed through, by upstream's field names. Raises ConfigError."""
    installed_smg = find_smg(config.smg_environment) if config.router == "smg" else None
    return partial(
        FleetRouter,
        config=config,
        run_folder=run_folder,
        passthrough=router_flags(options, installed_smg),
        installed_smg=installed_smg,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )
