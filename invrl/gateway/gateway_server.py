"""The gateway's processes, and what others hold of them.

`python -m invrl.gateway.gateway_server SETTINGS-FILE SOCKET...` supervises the workers
(`supervisor.py`); `GatewayServer` starts such a process, starts it again when it dies, and ends it.
Invariant: the sockets are of the process that holds `GatewayServer`, so what connects while the gateway is
dead waits for its successor. Importing this module loads no tokenizer and no web framework."""

import logging
import os
import socket
import sys
import urllib.request
from pathlib import Path

from invrl.errors import ServerError
from invrl.gateway.settings import GatewaySettings
from invrl.process import RestartLimit, ServerProcess

_log = logging.getLogger(__name__)
_RESTARTS_PER_MINUTE = 5
_BACKLOG = 4096
_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Nothing may start a thread before the workers are forked."""


class GatewayServer:
    """A gateway in processes of its own. The settings file in `folder` holds keys: only its owner reads it.
    Raises ServerError where it cannot listen."""

    module = "invrl.gateway.gateway_server"

    def __init__(self, settings: GatewaySettings, *, folder: Path, log: Path) -> None:
        self._settings, self._log_file = settings, log
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "gateway.json"
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(settings.to_json())
        self._sockets = [_listen(settings.gateway_host, settings.gateway_port)]
        if settings.gateway_workers > 1:
            self._sockets += [_listen("127.0.0.1", 0) for _ in range(settings.gateway_workers)]
        self._restarts = RestartLimit(_RESTARTS_PER_MINUTE)
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
        """Starts it again if it has died: from the thread that started it, which it dies with. Raises
        ServerError where it dies again and again."""
        if self.process.alive():
            return
        if not self._restarts.allows():
            self.process.check_alive()
        _log.warning("the gateway died and is started again, see %s", self._log_file)
        self.process = self._start()

    def stop(self) -> None:
        self.process.stop()
        for one in self._sockets:
            one.close()

    def _start(self) -> ServerProcess:
        files = [one.fileno() for one in self._sockets]
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
    file, *sockets = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    from invrl.gateway.supervisor import supervise

    listener, *own = [socket.socket(fileno=int(each)) for each in sockets]
    supervise(GatewaySettings.model_validate_json(Path(file).read_text()), listener, own)


if __name__ == "__main__":
    main()
