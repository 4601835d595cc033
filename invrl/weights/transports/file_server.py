"""Serves the folders of a run's versions to engines that share no disk with the
trainer.

    GET /version-000007/delta.zst      with the header "Authorization: Bearer KEY"

Invariant: only files that a weight transport writes are served, only with the key, and
nothing is accepted. The server listens on one address of the trainer's machine, at a
free port, without TLS: use it in a private network. Runs in threads of the trainer's
rank, and ends with it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import socket
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import ClassVar

import msgspec

from invrl.host.processes.process import random_key
from invrl.weights.transports.delta_folder import DELTA_NAME, MANIFEST_NAME
from invrl.weights.transports.weight_files import FileSource, ServedHandle
from invrl.weights.transports.weight_folder import WEIGHTS_NAME

_FILE = re.compile(
    rf"/(version-\d{{6,}})/({'|'.join(map(re.escape, (WEIGHTS_NAME, DELTA_NAME, MANIFEST_NAME)))})"
)
_CLOSES_WITHIN_S = 0.1
_SILENCE_S = 60.0
"""Seconds without a read or a request from a client."""


class WeightFileServer:
    def __init__(self, parent: Path, host: str) -> None:
        """`parent`: the folder of the versions' folders. Raises OSError if `host` is no
        address of this machine."""
        self._key = random_key()
        self._server = _server_class(host)((host, 0), _handler_class(parent, self._key))
        bracketed = f"[{host}]" if ":" in host else host
        self.source = FileSource(
            url=f"http://{bracketed}:{self._server.server_port}", key=self._key
        )
        serve = partial(self._server.serve_forever, poll_interval=_CLOSES_WITHIN_S)
        self._thread = threading.Thread(target=serve, name="weight files", daemon=True)
        self._thread.start()

    def served(self, handle: str) -> str:
        """Return the handle with which an engine fetches what `handle` names."""
        return msgspec.json.encode(
            ServedHandle(source=self.source, handle=handle)
        ).decode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Bind without HTTPServer's DNS lookup of this address."""
            TCPServer.server_bind(self)
            self.server_name = host
            self.server_port = self.server_address[1]

    return Server


def _handler_class(parent: Path, key: str) -> type[BaseHTTPRequestHandler]:
    expected = f"Bearer {key}".encode()

    class Handler(BaseHTTPRequestHandler):
        timeout: ClassVar[float | None] = _SILENCE_S
        server_version = "invrl"
        sys_version = ""

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(given, expected):
                self.send_error(HTTPStatus.UNAUTHORIZED)
                return
            file = _opened(parent, self.path)
            if file is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with os.fdopen(file, "rb") as body:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(os.fstat(file).st_size))
                self.end_headers()
                with contextlib.suppress(OSError):  # the engine is gone
                    self.connection.sendfile(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing of strangers' requests."""

    return Handler


def _opened(parent: Path, path: str) -> int | None:
    """Open a version's file and return its descriptor, or None. Reading continues even
    if the version is removed meanwhile."""
    match = _FILE.fullmatch(path)
    if match is None:
        return None
    version, name = match.groups()
    try:
        folder = os.open(parent / version, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder
            )
        finally:
            os.close(folder)
    except OSError:
        return None
