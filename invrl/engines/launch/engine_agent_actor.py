"""An engine's agent as a Ray actor on another node: the engine is its child, as engines
on the driver's node are the driver's.

Invariant: the engine ends with its agent, whatever ends that. The kernel kills the
engine's processes when the agent's process ends, and Ray ends the agent with the
driver's session or with the node.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from invrl.engines.config import EngineConfig
from invrl.engines.launch.engine_server import EnginePlace, EngineServer
from invrl.errors import ServerError
from invrl.host.output.log_lines import LogSettings
from invrl.host.processes.environment_keys import forget_keys
from invrl.host.processes.guardian import start_guardian
from invrl.host.processes.process import ENDED, process_state
from invrl.host.ray.actor_heartbeat import Pulse, pulse
from invrl.host.ray.actor_output import begin_output

_LOOK_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """Arguments for starting an engine on any node."""

    name: str
    config: EngineConfig
    model_path: Path
    """Has the same model on every node."""
    run_folder: Path
    """The log is below it, also on a node that does not share the driver's."""
    passthrough: Sequence[str]
    """More flags of SGLang."""
    api_key: str | None = field(repr=False)
    """Key that samples; None: a random one."""
    log: LogSettings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Address and keys of an engine that listens, or will."""

    url: str
    admin_key: str = field(repr=False)
    api_key: str = field(repr=False)


class EngineAgent:
    """Starts, watches and ends one engine on its node. `address`: the node's, at which
    the engine listens."""

    def __init__(self, start: EngineStart, address: str) -> None:
        forget_keys()
        self._start = start
        self._address = address
        self._server: EngineServer | None = None

    async def beat(self) -> Pulse:
        return pulse()

    async def launch(self) -> EngineAddress:
        """Start the engine's process in this thread, which lives as long as the agent.
        Returns before the engine answers."""
        if self._start.log is not None:
            begin_output(f"agent of {self._start.name}", self._start.log)
        start_guardian()
        server = EngineServer(
            self._start.name,
            self._start.config,
            model_path=self._start.model_path,
            run_folder=self._start.run_folder,
            passthrough=self._start.passthrough,
            api_key=self._start.api_key,
            place=EnginePlace(host=self._address),
            log=self._start.log,
        )
        self._server = server
        return EngineAddress(
            url=server.url, admin_key=server.admin_key, api_key=server.api_key
        )

    async def wait_ready(self) -> None:
        """Wait until the engine has made its first token. Raises ServerError with the
        log's last lines if it died, DeadlineError after `engine.start_timeout_s`."""
        await asyncio.to_thread(self._launched.wait_ready)

    async def lost_its_port(self) -> bool:
        """Return whether the engine has ended because another program took its port."""
        return self._launched.lost_its_port()

    async def until_ended(self) -> str:
        """Wait until a process of the engine has ended. Returns which one, with the
        log's last lines."""
        server = self._launched
        processes = server.processes()
        names: dict[psutil.Process, str] = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                names[process] = f"{process.name()} (pid {process.pid})"
        while True:
            for process in processes:
                if process_state(process) == ENDED:
                    name = names.get(process, f"pid {process.pid}")
                    return (
                        f"{name} has ended. Last lines of {server.log} there:\n"
                        f"{server.log_tail()}"
                    )
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def stop(self) -> None:
        """End the engine and everything below it. Idempotent."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    @property
    def _launched(self) -> EngineServer:
        if self._server is None:
            raise ServerError(f"{self._start.name} has not been launched")
        return self._server
