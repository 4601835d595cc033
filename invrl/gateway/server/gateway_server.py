"""The gateway's processes, and what others hold of them.

`python -m invrl.gateway.server.gateway_server SETTINGS-FILE HEARTBEATS SOCKET...` supervises the workers
(`supervisor.py`); `GatewayServer` starts such a process, starts it
again when it dies or hangs, and ends it.
Invariant: the sockets are of the process that holds `GatewayServer`, so what connects while the gateway is
dead waits for its successor. Importing this module loads no tokenizer and no web framework."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

from invrl.errors import ServerError
from invrl.gateway.server.heartbeat_page import SUPERVISOR, HeartbeatPage, SilenceWatch, worker_place
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.private_file import open_private
from invrl.host.process import RestartLimit, ServerProcess

_log = logging.getLogger(__name__)
_RESTARTS_PER_MINUTE = 5
_BACKLOG = 4096
_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Nothing may start a thread before the workers are forked."""


class GatewayServer:
    """A gateway in processes of its own. The settings file in `folder` holds keys: only its owner reads it.
    Raises ServerError where it cannot listen."""

    module = "invrl.gateway.server.gateway_server"

    def __init__(self, settings: GatewaySettings, *, folder: Path, log: Path) -> None:
        self._settings, self._log_file = settings, log
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gateway.json"
        with open_private(self._file) as out:
            out.write(settings.to_json().encode())
        self._sockets = [_listen(settings.gateway_host, settings.gateway_port)]
        if settings.gateway_workers > 1:
            self._sockets += [_listen("127.0.0.1", 0) for _ in range(settings.gateway_workers)]
        workers = settings.gateway_workers
        self._heartbeat_file = HeartbeatPage.create(workers=workers)
        self._heartbeats = HeartbeatPage(self._heartbeat_file, workers=workers)
        self._watch = SilenceWatch(self._heartbeats, [SUPERVISOR], timeout_s=settings.heartbeat_timeout_s)
        self._hung_workers_told = [0] * workers
        self._restarts = RestartLimit(_RESTARTS_PER_MINUTE)
        self._told_until = 0.0
        """Monotonic seconds; in the past where nobody is told that the run has ended."""
        self.process = self._start()

    @property
    def url(self) -> str:
        """Where this machine reaches it (agents: `settings.url`)."""
        host = self._settings.gateway_host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self._settings.gateway_port}"

    def wait_ready(self, *, deadline_s: float = 60.0) -> None:
        """Until it answers. Raises ServerError, DeadlineError."""
        self.process.wait_until(self._answers, deadline_s=deadline_s)

    def check_alive(self) -> None:
        """Starts it again if it has died, and kills it if it hangs, which the next call takes for a death.
        From the thread that started it, which it dies with. Raises ServerError where it dies again and
        again."""
        self._tell_of_hung_workers()
        if self.process.alive():
            if self._watch.silent():
                self._kill_hung_supervisor()
            return
        if not self._restarts.allows():
            self.process.check_alive()
        _log.warning("the gateway died and is started again, see %s", self._log_file)
        self.process = self._start()

    def end_run(self) -> None:
        """From now on environments that we do not start are told that the run has ended: who asks for a task,
        and who calls a session, whose rollout nobody waits for any more."""
        self._heartbeats.end_run()
        self._told_until = time.monotonic() + self._settings.end_grace_s

    async def tell_the_end(self) -> None:
        """Before `stop`: waits until environments have had time to hear of it, if `end_run` was called."""
        await asyncio.sleep(max(0.0, self._told_until - time.monotonic()))

    def stop(self) -> None:
        self.process.stop()
        for one in self._sockets:
            one.close()
        os.close(self._heartbeat_file)

    def _kill_hung_supervisor(self) -> None:
        """Its workers die with it."""
        _log.warning(
            "the gateway's supervisor (process %d) showed no sign of life for %g s "
            "(run.heartbeat_timeout_s): it is killed",
            self.process.pid,
            self._settings.heartbeat_timeout_s,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self._watch.start_over(SUPERVISOR)  # killed once; the kernel says when it is gone

    def _tell_of_hung_workers(self) -> None:
        for number, told in enumerate(self._hung_workers_told):
            hung = self._heartbeats.hung(worker_place(number))
            if hung > told:
                self._hung_workers_told[number] = hung
                _log.warning(
                    "worker %d of the gateway showed no sign of life for %g s (run.heartbeat_timeout_s) "
                    "and was replaced, see %s",
                    number,
                    self._settings.heartbeat_timeout_s,
                    self._log_file,
                )

    def _start(self) -> ServerProcess:
        self._watch.start_over(SUPERVISOR)
        files = [self._heartbeat_file, *(one.fileno() for one in self._sockets)]
        command = [sys.executable, "-m", self.module, str(self._file), *map(str, files)]
        return ServerProcess("gateway", command, log=self._log_file, env=_ENV, keep=files)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ServerError(f"the gateway cannot listen on {host}:{port}: {error}") from error


def main() -> None:
    file, heartbeats, *sockets = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    from invrl.gateway.server.supervisor import supervise

    settings = GatewaySettings.model_validate_json(Path(file).read_text())
    page = HeartbeatPage(int(heartbeats), workers=settings.gateway_workers)
    listener, *own = [socket.socket(fileno=int(each)) for each in sockets]
    supervise(settings, listener, own, page)


if __name__ == "__main__":
    main()
