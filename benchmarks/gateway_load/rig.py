"""The stand-in engine, the real router, and two real gateways (with and without
capture), as processes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks import ROOT
from invrl.engines.router.router_server import RouterServer
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.host.processes.process import ServerProcess


class _UncapturedGateway(GatewayServer):
    """Another program on the same settings: capture has no switch in the product."""

    module = "benchmarks.gateway_load.uncaptured"


class Rig:
    """`start`, measure, `stop`. `gateways`: by name, "on" and "off" (capture)."""

    def __init__(
        self,
        folder: Path,
        *,
        model_path: Path,
        vocab_size: int,
        reply_ids: Sequence[int],
    ) -> None:
        self.folder, self.model_path, self.vocab_size = folder, model_path, vocab_size
        self.env_key = secrets.token_hex(16)
        self.engine_port = free_port()
        self.engine_url = f"http://127.0.0.1:{self.engine_port}"
        reply = folder / "reply.json"
        reply.write_text(json.dumps(list(reply_ids)))
        command = [
            sys.executable,
            "-m",
            "benchmarks.gateway_load.paced_engine",
            "--port",
            str(self.engine_port),
        ]
        # of all that start here
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        self.engine = self._python("engine", [*command, "--reply", str(reply)])
        self.router = RouterServer(run_folder=folder, start_timeout_s=240.0)
        self.gateways: dict[str, GatewayServer] = {}

    async def start(self) -> None:
        self.engine.wait_until(self._engine_listens, deadline_s=120.0)
        await asyncio.to_thread(self.router.wait_ready)
        await asyncio.to_thread(self.router.register, self.engine_url, api_key="")
        for name in ("on", "off"):
            self.gateways[name] = self._gateway(name)
        for gateway in self.gateways.values():
            gateway.wait_ready(deadline_s=120.0)

    def stop(self) -> None:
        for gateway in self.gateways.values():
            gateway.stop()
        self.router.stop()
        self.engine.stop()

    def store_path(self, gateway: str) -> Path:
        return self.folder / gateway / "run.sqlite"

    def pace(self, seconds: float) -> None:
        """What the stand-in takes for a token from now on."""
        body = json.dumps({"seconds": seconds}).encode()
        urllib.request.urlopen(
            urllib.request.Request(self.engine_url + "/pace", data=body), timeout=60.0
        )

    def processes(self, gateway: str) -> dict[str, list[psutil.Process]]:
        """Each with all below it, but for the load generator."""
        servers = {
            "gateway": self.gateways[gateway].process,
            "router": self.router,
            "engine": self.engine,
        }
        families = {
            name: psutil.Process(server.pid) for name, server in servers.items()
        }
        found = {
            name: [root, *root.children(recursive=True)]
            for name, root in families.items()
        }
        return {**found, "load": [psutil.Process()]}

    def check(self) -> None:
        """ServerError if one of them has ended."""
        for process in (
            self.engine,
            self.router,
            *(gateway.process for gateway in self.gateways.values()),
        ):
            process.check_alive()

    def _gateway(self, name: str) -> GatewayServer:
        settings = GatewaySettings.model_validate(
            {
                "run_id": "bench",
                "tool_call_parser": "none",
                "reasoning_parser": "none",
                "port": free_port(),
                "router_url": self.router.url,
                "router_api_key": self.router.api_key,
                "env_key": self.env_key,
                "model_path": str(self.model_path),
                "model_name": "bench",
                "store_path": str(self.store_path(name)),
                "max_new_tokens": 1024,
                "context_length": 8192,
                "vocab_size": self.vocab_size,
                "session": {"max_open": 1_000_000},
            }
        )
        made = GatewayServer if name == "on" else _UncapturedGateway
        return made(
            settings,
            folder=self.folder / name,
            log=self.folder / "logs" / f"gateway-{name}.log",
        )

    def _python(self, name: str, command: Sequence[str]) -> ServerProcess:
        return ServerProcess(name, command, log=self.folder / "logs" / f"{name}.log")

    def _engine_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.engine_port)) == 0
