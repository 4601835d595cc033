"""Two workers of a gateway, in this process, on a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import uvicorn
from fakes import FakeEngine
from running_gateway import ENV_KEY, Running, eventually

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.http.http_protocol import LimitedHttpProtocol
from invrl.gateway.server.routes.app import make_app
from invrl.gateway.server.settings import GatewaySettings
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter


class Workers:
    """`at[n]` is worker n as a client that reached it sees it; `stop(n)` ends one."""

    def __init__(
        self, engine: FakeEngine, http: httpx.AsyncClient, folder: Path
    ) -> None:
        self.engine = engine
        self.folder = folder
        self.at = [
            Running("", engine, RunStore(folder / "run.db"), http) for _ in range(2)
        ]
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.urls = [
            f"http://127.0.0.1:{listener.getsockname()[1]}"
            for listener in self.listeners
        ]
        self._shared = memoryview(bytearray(16)).cast("Q")
        self._servers: list[uvicorn.Server | None] = [None, None]
        self._ends = contextlib.AsyncExitStack()

    async def start(
        self, number: int, model: Path, renderer: Renderer, **changes: object
    ) -> None:
        url = self.at[number].url = self.urls[number]
        values = {
            "port": int(url.rpartition(":")[2]),
            "router_url": self.engine.url,
            "env_key": ENV_KEY,
            "model_path": str(model),
            "model_name": "tiny",
            "store_path": str(self.folder / "run.db"),
            "context_length": 1024,
            "vocab_size": 512,
            **changes,
        }
        settings = GatewaySettings.model_validate(values)
        store = RunStoreWriter(Path(settings.store_path))
        client = SglangClient(
            settings.router_url,
            limits=EngineLimits(vocab_size=512, context_length=1024),
        )
        place = WorkerPlace(number=number, urls=self.urls, open_sessions=self._shared)
        parts = {
            "sampler": client,
            "renderer": renderer,
            "store": store,
            "on_shutdown": client.close,
        }
        app = make_app(settings, **parts, place=place)
        served = {
            "http": LimitedHttpProtocol,
            "timeout_graceful_shutdown": 1,
            "timeout_keep_alive": 600,
        }
        config = uvicorn.Config(app, port=settings.port, log_level="critical", **served)
        server = self._servers[number] = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self.listeners[number]]))
        self._ends.callback(store.close)
        self._ends.push_async_callback(asyncio.wait, [serving])
        await eventually(lambda: server.started)

    async def stop(self) -> None:
        for server in self._servers:
            if server is not None:
                server.should_exit = True
        await self._ends.aclose()
        for listener in self.listeners:
            listener.close()
