"""The gateway's OS process, and what others hold of it.

`python -m invrl.gateway.gateway_server --settings FILE` serves; `GatewayServer` starts such a process
and ends it. Importing this module loads no tokenizer and no web framework."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import urllib.request
from pathlib import Path

from invrl.gateway.settings import GatewaySettings
from invrl.process import ServerProcess


class GatewayServer:
    """A gateway in its own process. The settings file in `folder` holds keys: only its owner reads it."""

    module = "invrl.gateway.gateway_server"

    def __init__(self, settings: GatewaySettings, *, folder: Path, log: Path) -> None:
        self._settings = settings
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "gateway.json"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(settings.to_json())
        command = [sys.executable, "-m", self.module, "--settings", str(file)]
        self.process = ServerProcess("gateway", command, log=log, env={"OMP_NUM_THREADS": "1"})

    @property
    def url(self) -> str:
        """Where this machine reaches it (agents: `settings.url`)."""
        host = self._settings.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self._settings.port}"

    def wait_ready(self, *, deadline_s: float = 60.0) -> float:
        """Seconds until it answers. Raises ServerError, DeadlineError."""
        return self.process.wait_ready(self._answers, deadline_s=deadline_s)

    def stop(self) -> None:
        self.process.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def serve(settings: GatewaySettings) -> None:
    """Runs until it is told to stop; every accepted turn is committed when this returns."""
    import uvicorn

    from invrl.gateway.app import make_app
    from invrl.gateway.model_folder import load_renderer
    from invrl.rollout.sglang_client import EngineLimits, SglangClient
    from invrl.run_store import RunStoreWriter

    renderer = load_renderer(settings.model_path, settings.vocab_size)
    store = RunStoreWriter(Path(settings.store_path))
    router_key = settings.router_api_key.get_secret_value() if settings.router_api_key else ""

    async def run() -> None:
        limits = EngineLimits(vocab_size=settings.vocab_size, context_length=settings.context_length)
        url, key, deadline_s = settings.router_url, router_key, settings.generate_timeout_s
        engine = SglangClient(
            url, limits=limits, api_key=key, name="the fleet", generate_deadline_s=deadline_s
        )
        app = make_app(settings, engine=engine, renderer=renderer, store=store, on_shutdown=engine.close)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=3,
            timeout_keep_alive=75,
            backlog=4096,
        )
        await uvicorn.Server(config).serve()

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="the gateway of a run")
    parser.add_argument("--settings", required=True, type=Path, help="JSON file of GatewaySettings")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(GatewaySettings.model_validate(json.loads(arguments.settings.read_text())))


if __name__ == "__main__":
    main()
