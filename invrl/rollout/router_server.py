"""sglang-router as an OS process, with the settings that suit RL, and its workers.

Invariant: private (loopback; sampling needs `api_key`, which the gateway holds, management another key that
never leaves this file; towards an engine it uses that engine's key), it never retries, never sheds, never
ejects an engine that is only paused, and it routes to an engine only after `register` (which happens once
that engine holds the fleet's version). Used by `fleet`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp

from invrl.errors import DeadlineError, ServerError
from invrl.process import LocalServer, free_port

_FLAGS = {
    # A session's turns stay on the engine that caches them; cache_aware sent all sessions that share a
    # system prompt to one engine.
    "policy": "manual",
    "request-timeout-secs": "7200",
    "worker-startup-check-interval": "1",
    "health-check-interval-secs": "1",
    # A dead engine refuses at once and is out after three looks; a busy machine may answer late.
    "health-check-timeout-secs": "10",
    "health-failure-threshold": "3",
    "health-success-threshold": "1",
    # Answered while generation is paused; /health is not. A hung scheduler is `health.py`'s business.
    "health-check-endpoint": "/server_info",
    "shutdown-grace-period-secs": "1",
    "log-level": "warn",
}
# The gateway owns retries; and 4xx answers would count as failures and open the breaker for everyone.
_SWITCHES = ("--disable-retries", "--disable-circuit-breaker")


class RouterServer(LocalServer):
    """`start`, `wait_ready`, then `register` engines."""

    def __init__(self, *, run_folder: Path, start_timeout_s: float, passthrough: Sequence[str] = ()) -> None:
        super().__init__("router", run_folder=run_folder)
        self._start_timeout_s, self._passthrough = start_timeout_s, tuple(passthrough)
        self._management_key = secrets.token_hex(24)
        self._worker_ids: dict[str, str] = {}

    def start(self) -> None:
        self.port = free_port()
        # Keys are given by environment (see `launch_router`): a command line can be read by anybody.
        command = [sys.executable, "-m", "invrl.rollout.launch_router"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += [part for name, value in _FLAGS.items() for part in (f"--{name}", value)]
        command += [*_SWITCHES, *self._passthrough]
        env = {"INVRL_ROUTER_API_KEY": self.api_key, "INVRL_ROUTER_MANAGEMENT_KEY": self._management_key}
        self._launch(command, env)

    async def wait_ready(self) -> None:
        """Until the router answers. Raises ServerError if it died, DeadlineError."""
        process = self.process

        async def answers() -> bool:
            process.check_alive()
            with contextlib.suppress(ServerError):
                await self._workers()
                return True
            return False

        def waited_for() -> str:
            return f"the router to answer; last lines of {process.log}:\n{process.log_tail()}"

        await _until(answers, waited_for, self._start_timeout_s)

    async def register(self, url: str, *, api_key: str, deadline_s: float = 60.0) -> None:
        """Returns once the router routes to this engine. DeadlineError, ServerError."""
        await self._call("POST", "/workers", {"url": url, "api_key": api_key})

        async def routed() -> bool:
            for worker in await self._workers():
                if worker.get("url") == url and worker.get("is_healthy"):
                    self._worker_ids[url] = str(worker["id"])
                    return True
            return False

        await _until(routed, lambda: f"the router to route to {url}", deadline_s)

    async def unregister(self, url: str, *, deadline_s: float = 60.0) -> None:
        """Returns once the router no longer routes to this engine. Nothing to do for a stranger."""
        worker_id = self._worker_ids.pop(url, None)
        if worker_id is None:
            return
        await self._call("DELETE", f"/workers/{worker_id}", None)

        async def gone() -> bool:
            return all(worker.get("url") != url for worker in await self._workers())

        await _until(gone, lambda: f"the router to forget {url}", deadline_s)

    async def _workers(self) -> list[dict[str, object]]:
        answer = await self._call("GET", "/workers", None)
        workers = answer.get("workers", [])
        assert isinstance(workers, list)
        return workers

    async def _call(self, method: str, path: str, body: dict[str, str] | None) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {self._management_key}"}
        timeout = aiohttp.ClientTimeout(total=30.0)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
                http.request(method, self.url + path, json=body) as response,
            ):
                if response.status >= 300:
                    text = (await response.text())[:500]
                    raise ServerError(f"the router answered {method} {path} with {response.status}: {text}")
                return dict(await response.json())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"the router does not answer {method} {path}: {error!r}") from error


async def _until(
    probe: Callable[[], Awaitable[bool]], waited_for: Callable[[], str], deadline_s: float
) -> None:
    deadline = time.monotonic() + deadline_s
    while not await probe():
        if time.monotonic() > deadline:
            raise DeadlineError(waited_for(), deadline_s)
        await asyncio.sleep(0.1)
