"""The gateway as the driver holds it, and the entry point of its supervisor process.

`GatewayServer` starts the supervisor process, replaces it when it dies or hangs, and
stops it. The process runs `python -m invrl.gateway.server.processes.gateway_server
SETTINGS-FILE HEARTBEATS SOCKET...`, which forks the workers (`supervisor.py`).
Invariant: the process that holds `GatewayServer` owns the sockets, so connections that
arrive while the supervisor is dead wait for its successor. Importing this module loads
no tokenizer and no web framework."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from invrl.errors import ServerError
from invrl.gateway.server.processes.heartbeat_page import (
    SUPERVISOR,
    HeartbeatPage,
    SilenceWatch,
    worker_place,
)
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.files.private_file import open_private
from invrl.host.network.direct_connections import direct_client
from invrl.host.output.incidents import incidents
from invrl.host.output.log_lines import write_log_lines
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import PYTHON_MODULE, RestartLimit, ServerProcess
from invrl.types.fleet import FleetSnapshot
from invrl.types.weights import WeightVersion

_RESTARTS_PER_MINUTE = 5
_BACKLOG = 4096
_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Keeps libraries from starting threads before the workers are forked."""


class GatewayServer:
    """A gateway in separate processes. The settings file in `folder` contains keys:
    only its owner can read it. Raises ServerError if the gateway cannot listen on its
    address."""

    module = "invrl.gateway.server.processes.gateway_server"

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        folder: Path,
        log: Path,
        parent: ForkParent | None = None,
    ) -> None:
        """Starts it. `parent`: a process that has imported SGLang, whose parsers the
        gateway uses, and is its owner's to stop; None for one of its own."""
        workers = settings.workers
        self._settings = settings
        self._log_file = log
        folder.mkdir(parents=True, exist_ok=True)
        self._settings_file = folder / "gateway.json"
        with open_private(self._settings_file) as out:
            out.write(settings.to_json().encode())
        self._sockets = [_listen(settings.host, settings.port)]
        if workers > 1:
            self._sockets += [_listen("127.0.0.1", 0) for _ in range(workers)]
        self._heartbeat_file = HeartbeatPage.create(workers=workers)
        self._heartbeats = HeartbeatPage(self._heartbeat_file, workers=workers)
        self._watch = SilenceWatch(
            self._heartbeats, [SUPERVISOR], timeout_s=settings.heartbeat_timeout_s
        )
        self._hung_workers_reported = [0] * workers
        self._ended_workers_reported = [0] * workers
        self._restarts = RestartLimit(_RESTARTS_PER_MINUTE)
        self._end_grace_until = 0.0
        """Monotonic seconds until which environments are informed that the run has
        ended. 0 before `end_run`."""
        self._own_parent: ForkParent | None = None
        if parent is None:
            # SGLang prints while it is imported, as it likes.
            parent_log = log.with_name("gateway-parent.log")
            self._own_parent = parent = ForkParent(self.module, log=parent_log)
        self._parent = parent
        self.process = self._start()

    @property
    def url(self) -> str:
        """Address for processes of this machine. (Agents use `settings.url`.)"""
        return self.url_at("127.0.0.1")

    def url_at(self, address: str) -> str:
        """Return the address for processes that reach this machine at `address`, which
        counts where the gateway listens on every interface."""
        host = self._settings.host
        if host == "0.0.0.0":
            host = address
        return f"http://{host}:{self._settings.port}"

    def wait_ready(self, *, deadline_s: float = 60.0) -> None:
        """Wait until the gateway answers. Raises ServerError or DeadlineError if it
        does not."""
        self.process.wait_until(self._is_healthy, deadline_s=deadline_s)

    def check_alive(self) -> None:
        """Restart the supervisor if it has died. Kill it if it hangs; the next call
        restarts it. Call it from the thread that created this object: the process dies
        with that thread. Raises ServerError if the supervisor has died too often."""
        self._report_workers()
        if self.process.alive():
            if self._watch.silent():
                self._kill_hung_supervisor()
            return
        if not self._restarts.allows():
            self.process.check_alive()
        incidents.warning(
            "the gateway died and is started again, see %s", self._log_file
        )
        self.process = self._start()

    def announce_version(self, version: WeightVersion) -> None:
        """Announce a version before an engine gets these weights: until then, its
        tokens are refused as sampled by weights that do not exist."""
        self._heartbeats.announce_version(version)

    @property
    def newest_version(self) -> WeightVersion:
        """Version announced last."""
        return self._heartbeats.newest_version()

    def announce_load(self, fleet: FleetSnapshot) -> None:
        """Give the workers the load of the engines."""
        self._heartbeats.announce_load(fleet)

    @property
    def held_turns(self) -> int:
        """Number of turns that the gate holds."""
        return self._heartbeats.held_turns()

    @property
    def wrong_replies(self) -> int:
        """Number of refused answers of engines that could not be true."""
        return self._heartbeats.wrong_replies()

    def end_run(self) -> None:
        """Let the gateway answer that the run has ended: to an environment that asks
        for a task, and to one that calls a session whose rollout is no longer
        needed."""
        self._heartbeats.end_run()
        self._end_grace_until = time.monotonic() + self._settings.session.end_grace_s

    async def wait_end_grace(self) -> None:
        """After `end_run` and before `stop`: waits until environments have had
        `session.end_grace_s` to learn that the run has ended. Returns at once if
        `end_run` was not called."""
        await asyncio.sleep(max(0.0, self._end_grace_until - time.monotonic()))

    def stop(self) -> None:
        self.process.stop()
        if self._own_parent is not None:
            self._own_parent.stop()
        for listener in self._sockets:
            listener.close()
        os.close(self._heartbeat_file)

    def _kill_hung_supervisor(self) -> None:
        """Kill the supervisor if it hangs. The workers die with it."""
        incidents.warning(
            "the gateway's supervisor (process %d) showed no sign of life for %g s "
            "(run.heartbeat_timeout_s): it is killed",
            self.process.pid,
            self._settings.heartbeat_timeout_s,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        # kill it once; the kernel reports when it is gone
        self._watch.start_over(SUPERVISOR)

    def _report_workers(self) -> None:
        """Report each worker that hung or ended in one line."""
        for number in range(self._settings.workers):
            hung = self._heartbeats.hung(worker_place(number))
            if hung > self._hung_workers_reported[number]:
                self._hung_workers_reported[number] = hung
                incidents.warning(
                    "worker %d of the gateway showed no sign of life for %g s (run.heartbeat_timeout_s) "
                    "and was replaced, see %s",
                    number,
                    self._settings.heartbeat_timeout_s,
                    self._log_file,
                )
            ended = self._heartbeats.ended(worker_place(number))
            if ended > self._ended_workers_reported[number]:
                self._ended_workers_reported[number] = ended
                incidents.warning(
                    "worker %d of the gateway ended and was replaced, see %s",
                    number,
                    self._log_file,
                )

    def _start(self) -> ServerProcess:
        self._watch.start_over(SUPERVISOR)
        inherited_files = [
            self._heartbeat_file,
            *(listener.fileno() for listener in self._sockets),
        ]
        file_arguments = [str(file) for file in inherited_files]
        command = [
            *PYTHON_MODULE,
            self.module,
            str(self._settings_file),
            *file_arguments,
        ]
        return ServerProcess(
            "gateway",
            command,
            log=self._log_file,
            env=_ENV,
            keep=inherited_files,
            parent=self._parent,
        )

    def _is_healthy(self) -> bool:
        try:
            with direct_client(self.url, timeout_s=2.0) as http:
                return http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServerError(
            f"the gateway cannot listen on {host}:{port}: {error}"
        ) from error


def prepare() -> None:
    """Import what the supervisor and its workers need, in the process that forks
    them."""
    from sglang.srt.function_call import function_call_parser  # noqa: F401
    from sglang.srt.parser import reasoning_parser  # noqa: F401

    from invrl.gateway.server.processes import supervisor  # noqa: F401


def main(arguments: Sequence[str]) -> None:
    """Run the supervisor. `arguments` are the settings file, and the descriptors of
    heartbeats and sockets."""
    settings_file, heartbeat_file, *socket_files = arguments
    from invrl.gateway.server.processes.supervisor import supervise

    settings = GatewaySettings.model_validate_json(
        Path(settings_file).read_text(encoding="utf-8")
    )
    write_log_lines("gateway", settings.log)
    heartbeats = HeartbeatPage(int(heartbeat_file), workers=settings.workers)
    listener, *own_sockets = [socket.socket(fileno=int(file)) for file in socket_files]
    supervise(settings, listener, own_sockets, heartbeats)


if __name__ == "__main__":
    main(sys.argv[1:])
