"""An engine of the run's own on another node of its Ray cluster, behind an agent there
(`engine_agent_actor.py`).

It replaces `EngineServer` in the fleet. The node is chosen when the engine starts:
while none is there, the start waits for one. The engine of a node that died is started
again on another one, or on that one once it is back.

Every call but `until_ended` blocks; `stop` ends `wait_ready` from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from invrl.engines.launch.engine_agent_actor import EngineAgent, EngineStart
from invrl.engines.launch.engine_hosts import EngineHost, EngineHosts
from invrl.errors import (
    ActorDiedError,
    ActorSilentError,
    DeadlineError,
    InvrlError,
    ServerError,
)

if TYPE_CHECKING:
    from invrl.host.ray.actor import ActorHandle

_LOG = logging.getLogger(__name__)
_POLL_INTERVAL_S = 1.0
_REPLY_MARGIN_S = 30.0
"""Seconds by which the wait for an agent exceeds its own deadline."""
_STOP_DEADLINE_S = 45.0
"""Seconds for an agent to end its engine. The agent of a node that is gone does not
reply."""


class HostedEngine:
    """Part of `EngineServer` that a fleet uses."""

    def __init__(self, start: EngineStart, hosts: EngineHosts) -> None:
        self.name = start.name
        self.url = ""
        self.admin_key = ""
        self.api_key = ""
        """Known, as are the address and the other key, once `wait_ready` has
        returned."""
        self._start = start
        self._hosts = hosts
        self._agent: ActorHandle[EngineAgent] | None = None
        self._place = ""
        self._lost_its_port = False
        self._stopped = threading.Event()

    def processes(self) -> None:
        """None: its processes are on another node. `until_ended` watches them."""

    def lost_its_port(self) -> bool:
        return self._lost_its_port

    def wait_ready(self) -> None:
        """Start the agent and the engine, and wait until it has made a token.

        Raises ServerError with the log's last lines if the engine died, DeadlineError
        if there was no node for it, or if it did not come up, within
        `engine.start_timeout_s`.
        """
        asyncio.run(self._start_somewhere())

    def stop(self) -> None:
        """End the engine and its agent. Idempotent. The agent of a node that is gone
        has ended its engine."""
        self._stopped.set()
        agent = self._agent
        self._agent = None
        if agent is not None:
            asyncio.run(self._stop_agent(agent))

    async def until_ended(self) -> None:
        """Wait until a process of the engine, its agent or its node has ended. A
        connection that breaks is no end: the engine's silence tells then."""
        # imports Ray, which a fleet on one machine does not need
        from invrl.host.ray.actor import is_unreachable

        agent = self._agent
        if agent is None:
            return
        reason = ""
        while not reason:
            try:
                reason = await agent.call(EngineAgent.until_ended, math.inf)
            except ActorDiedError as error:
                if not is_unreachable(error):
                    reason = str(error)
                await asyncio.sleep(_POLL_INTERVAL_S)
        _LOG.warning("%s has ended on %s: %s", self.name, self._place, reason)

    async def _start_somewhere(self) -> None:
        timeout_s = self._start.config.start_timeout_s
        give_up_at = time.monotonic() + timeout_s
        failure = "there is none"
        while not self._stopped.is_set():
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                awaited = f"{self._hosts.description}, for {self.name} ({failure})"
                raise DeadlineError(awaited, timeout_s)
            host = self._hosts.host_of(self.name)
            if host is not None:
                try:
                    return await self._start_on(host, left_s)
                except (ActorDiedError, ActorSilentError) as error:
                    failure = f"{host.name}: {error}"
                    _LOG.warning("%s did not start on %s", self.name, failure)
            await asyncio.sleep(_POLL_INTERVAL_S)
        raise ServerError(f"{self.name} is not started any more")

    async def _start_on(self, host: EngineHost, left_s: float) -> None:
        """Start agent and engine on a node. Raises ActorDiedError or ActorSilentError
        if the node, or the agent, did not stay."""
        # imports Ray, which a fleet on one machine does not need
        from invrl.host.ray.actor import ActorOptions, start_actor

        agent = start_actor(
            f"the agent of {self.name} on {host.name}",
            EngineAgent,
            ActorOptions(node=host.node_id, num_gpus=host.num_gpus),
            self._start,
            host.address,
        )
        self._agent = agent
        self._place = f"{host.name} ({host.address})"
        try:
            if self._stopped.is_set():  # `stop` may not have seen the agent
                raise ServerError(f"{self.name} is not started any more")
            address = await agent.call(EngineAgent.launch, left_s)
            deadline_s = self._start.config.start_timeout_s + _REPLY_MARGIN_S
            await agent.call(EngineAgent.wait_ready, deadline_s)
        except BaseException as error:
            if isinstance(error, ServerError) and not isinstance(error, ActorDiedError):
                self._lost_its_port = await self._has_lost_its_port(agent)
            self._agent = None
            await self._stop_agent(agent)
            raise
        self.url = address.url
        self.admin_key = address.admin_key
        self.api_key = address.api_key

    async def _has_lost_its_port(self, agent: ActorHandle[EngineAgent]) -> bool:
        try:
            return await agent.call(EngineAgent.lost_its_port, _STOP_DEADLINE_S)
        except InvrlError:
            return False

    async def _stop_agent(self, agent: ActorHandle[EngineAgent]) -> None:
        try:
            await agent.call(EngineAgent.stop, _STOP_DEADLINE_S)
        except (ActorDiedError, ActorSilentError) as error:
            _LOG.info("%s ended with its agent: %s", self.name, error)
        finally:
            agent.kill()
