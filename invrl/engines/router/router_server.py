"""sglang-router, or smg, as an OS process, with the settings that suit RL, and the
engines that it routes to.

Invariant: the router is private. It listens on loopback; sampling needs `api_key`,
which the gateway holds; management needs another key, which never leaves this file.
sglang-router sends an engine that engine's key, smg the key of the request: behind smg
all engines have `api_key`. The router never retries, never sheds load, and never ejects
an engine that is only paused. It routes to an engine only after `register`, which is
called once that engine holds the fleet's version.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import httpx

from invrl.engines.router import launch_router, smg
from invrl.errors import ServerError
from invrl.host.network.direct_connections import WITHOUT_PROXIES, direct_client
from invrl.host.network.ports import ReservedPort
from invrl.host.processes.process import ServerProcess, random_key

_FLAGS = {
    # A session's turns stay on the engine that caches them; cache_aware sent all
    # sessions that share a system prompt to one engine.
    "policy": "manual",
    "request-timeout-secs": "7200",
    "worker-startup-check-interval": "1",
    "health-check-interval-secs": "1",
    # A dead engine refuses immediately and is out after three checks; a busy machine
    # may answer late.
    "health-check-timeout-secs": "10",
    "health-failure-threshold": "3",
    "health-success-threshold": "1",
    # Answered while generation is paused, unlike /health. `engine_health.py` finds a
    # hung scheduler.
    "health-check-endpoint": "/server_info",
    "shutdown-grace-period-secs": "1",
    "log-level": "warn",
}
# The gateway retries; and 4xx responses would count as failures and open the breaker
# for everyone.
_SWITCHES = ("--disable-retries", "--disable-circuit-breaker")
_CALL_DEADLINE_S = 30.0
_ROUTING_DEADLINE_S = 60.0


class RouterAddress:
    """Ports and keys of a router. Others hold them, so a restarted router keeps
    them."""

    def __init__(self) -> None:
        self.port = ReservedPort()
        self.prometheus_port = ReservedPort()
        self.api_key = random_key()
        self.management_key = random_key()

    def close(self) -> None:
        """Release the ports."""
        self.port.close()
        self.prometheus_port.close()


class RouterServer(ServerProcess):
    """Router process. Call `wait_ready`, then `register` engines. Every call blocks."""

    def __init__(
        self,
        *,
        run_folder: Path,
        start_timeout_s: float,
        passthrough: Sequence[str] = (),
        address: RouterAddress | None = None,
        installed_smg: smg.Smg | None = None,
        name: str = "router",
    ) -> None:
        """`address`: of the previous router that this one replaces. Without smg it is
        sglang-router. `name`: also of its log."""
        self.address = address or RouterAddress()
        self.api_key = self.address.api_key
        self.engine_api_key: str | None = None
        """API key that engines must have. None: each may have its own."""
        self.url = f"http://127.0.0.1:{self.address.port.number}"
        self.metrics_url = (
            f"http://127.0.0.1:{self.address.prometheus_port.number}/metrics"
        )
        self._start_timeout_s = start_timeout_s
        self._worker_ids: dict[str, str] = {}
        """Router's ids of the registered engines, by URL."""
        flags = {
            "host": "127.0.0.1",
            "port": str(self.address.port.number),
            "prometheus-host": "127.0.0.1",
            "prometheus-port": str(self.address.prometheus_port.number),
            **_FLAGS,
        }
        switches = _SWITCHES
        if installed_smg is None:
            self.program = f"sglang-router {version('sglang-router')}"
            command = [sys.executable, "-m", launch_router.__name__, "sglang_router"]
        else:
            self.program = f"smg {installed_smg.version}"
            self.engine_api_key = self.api_key
            flags |= smg.FLAGS
            switches += smg.SWITCHES
            # -I: ignore our environment and PYTHONPATH.
            command = [str(installed_smg.python), "-I", launch_router.__file__, "smg"]
        for flag, value in flags.items():
            command += [f"--{flag}", value]
        command += [*switches, *passthrough]
        # Sampling and management need different keys; an engine's key comes with its
        # registration.
        keys = f"--api-key={self.api_key}"
        keys += (
            f" --control-plane-api-keys invrl:invrl:admin:{self.address.management_key}"
        )
        log = run_folder / "logs" / f"{name}.log"
        super().__init__(
            name, command, log=log, env={"INVRL_KEY_FLAGS": keys, **WITHOUT_PROXIES}
        )

    def registered(self, url: str) -> bool:
        """Whether this engine was registered and has not been unregistered."""
        return url in self._worker_ids

    def answers(self, deadline_s: float) -> bool:
        """Whether the router answers within `deadline_s`."""
        try:
            self._workers(deadline_s=deadline_s)
        except ServerError:
            return False
        return True

    def wait_ready(self) -> None:
        """Wait until the router answers. Raises ServerError if it died,
        DeadlineError."""
        self.wait_until(
            lambda: self.answers(_CALL_DEADLINE_S), deadline_s=self._start_timeout_s
        )

    def register(self, url: str, *, api_key: str) -> None:
        """Register an engine, and wait until the router routes to it; return
        immediately if it already does.

        Raises DeadlineError, ServerError.
        """
        if self.registered(url):
            return
        self._call("POST", "/workers", {"url": url, "api_key": api_key})

        def is_routed() -> bool:
            for worker in self._workers():
                if worker.get("url") == url and worker.get("is_healthy"):
                    self._worker_ids[url] = str(worker["id"])
                    return True
            return False

        self.wait_until(is_routed, f"route to {url}", deadline_s=_ROUTING_DEADLINE_S)

    def unregister(self, url: str) -> None:
        """Unregister an engine, and wait until the router no longer routes to it;
        return immediately if it is not registered."""
        worker_id = self._worker_ids.pop(url, None)
        if worker_id is None:
            return
        self._call("DELETE", f"/workers/{worker_id}")

        def is_gone() -> bool:
            return all(worker.get("url") != url for worker in self._workers())

        self.wait_until(is_gone, f"forget {url}", deadline_s=_ROUTING_DEADLINE_S)

    def _workers(
        self, *, deadline_s: float = _CALL_DEADLINE_S
    ) -> list[dict[str, object]]:
        workers = self._call("GET", "/workers", deadline_s=deadline_s).get(
            "workers", []
        )
        assert isinstance(workers, list)
        return workers

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, str] | None = None,
        *,
        deadline_s: float = _CALL_DEADLINE_S,
    ) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {self.address.management_key}"}
        try:
            with direct_client(self.url, timeout_s=deadline_s, headers=headers) as http:
                response = http.request(method, path, json=body)
            if response.is_success:
                return dict(response.json())
        except (
            httpx.HTTPError,
            ValueError,
        ) as error:  # another server may answer, not in JSON
            raise ServerError(
                f"the router does not answer {method} {path}: {error!r}"
            ) from error
        raise ServerError(
            f"the router answered {method} {path} with {response.status_code}: {response.text[:500]}"
        )
