"""The processes of a fleet's engines: their start, again if a stranger took the port,
and their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from invrl.engines.fleet.blocking_calls import BlockingCalls
from invrl.engines.fleet.fleet_router import FleetRouter
from invrl.engines.launch.engine_launcher import Engine, EngineLauncher
from invrl.errors import DeadlineError, ServerError

_LOG = logging.getLogger(__name__)
_PORT_TRIES = 3
_END_DEADLINE_S = 60.0
_END_POLL_S = 0.05


class EngineProcesses:
    """`router_of`: returns the router of the engine with that name."""

    def __init__(
        self,
        launcher: EngineLauncher,
        router_of: Callable[[str], FleetRouter],
        calls: BlockingCalls,
    ) -> None:
        self._launcher = launcher
        self._router_of = router_of
        self._calls = calls
        self.leaving: list[Engine] = []
        """Engines that left and are not being ended yet: the fleet may stop first."""
        self._num_ending = 0

    def launch(self, name: str) -> Engine:
        api_key = self._router_of(name).server.engine_api_key
        return self._launcher.launch(name, api_key=api_key)

    async def started(self, name: str, engine: Engine) -> Engine:
        """Return `engine` once it is up, or another one under the name if a stranger
        took its port.

        Raises ServerError or DeadlineError; the engine has ended then.
        """
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                await self._calls.run(engine.server.wait_ready)
                break
            except ServerError:
                lost_its_port = engine.server.lost_its_port()
                await self.end(engine)
                if not lost_its_port or tries_left == 0:
                    raise
                _LOG.warning("%s is started again: somebody took its port", name)
                engine = self.launch(name)
            except BaseException:
                await self.end(engine)
                raise
        engine.client.reach(
            engine.server.url,
            api_key=engine.server.api_key,
            admin_key=engine.server.admin_key,
        )
        return engine

    async def end(self, engine: Engine) -> None:
        """End an engine. Only log what does not end: everything else must still be
        ended."""
        self.leaving = [other for other in self.leaving if other is not engine]
        self._num_ending += 1
        try:
            try:
                await engine.client.close()
            finally:
                await self._calls.run(engine.server.stop)
        except Exception:
            _LOG.exception("%s could not be ended", engine.server.name)
        finally:
            self._num_ending -= 1

    async def until_lost_have_ended(self) -> None:
        """Wait until the processes of all engines that left have ended. Raises
        DeadlineError."""
        try:
            async with asyncio.timeout(_END_DEADLINE_S):
                while self.leaving or self._num_ending:
                    await asyncio.sleep(_END_POLL_S)
        except TimeoutError:
            raise DeadlineError("lost engines to end", _END_DEADLINE_S) from None
