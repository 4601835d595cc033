"""A stand-in for a run's gateway: it leases tasks, opens sessions, answers chat
completions, and writes down how each session ended. Called by tests of environments'
programs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "env-key-of-the-toy-gateway"


class TooLargeError(Exception):
    """The gateway's refusal of what an episode was worth."""


class LeasingGateway:
    """Leases `groups` tasks with `members` rollouts each, then says that the run has
    ended once all have ended."""

    def __init__(self, groups: int, members: int = 2) -> None:
        self.members = members
        self.groups = groups
        self.leased = 0
        self.ends: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Session id -> its finish and abort calls, in order."""
        self.keys: set[str] = set()
        self.lock = threading.Lock()
        self.url = ""

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if path == "/tasks/lease":
                return self._lease()
            if path == "/sessions":
                return self._open(body)
            action = re.fullmatch(r"/sessions/(\S+)/(finish|abort)", path)
            if action and "refused" in body.get("components", ()):
                raise TooLargeError
            if action:
                self.ends[action[1]].append({"action": action[2], **body})
                return {}
        message = {"role": "assistant", "content": "a reply"}
        return {"choices": [{"message": message}]}

    def _lease(self) -> dict[str, Any]:
        if self.leased < self.groups:
            number = self.leased
            self.leased += 1
            members = [{"index": i, "attempt": 0} for i in range(self.members)]
            task = {"id": f"task-{number}", "payload": {"seed": number}}
            lease = {"group_id": f"g{number}", "task": task, "members": members}
            return {"lease": lease, "ended": False}
        ended = len(self.ends) == self.groups * self.members
        return {"lease": None, "ended": ended}

    def _open(self, body: dict[str, Any]) -> dict[str, Any]:
        sessions = []
        for member in body["members"]:
            name = f"{body['group_id']}-{member['index']}"
            key = f"isk-{name}-0123456789abcdef"
            self.keys.add(key)
            base_url = f"{self.url}/s/{key}/v1"
            sessions.append(
                {"id": name, "key": key, "base_url": base_url, "model": "toy"}
            )
        return {"sessions": sessions}


@contextmanager
def leasing_gateway(groups: int, members: int = 2) -> Iterator[LeasingGateway]:
    gateway = LeasingGateway(groups, members)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            status = 200
            try:
                text = json.dumps(gateway.reply(self.path, body)).encode()
            except TooLargeError:
                status = 422
                text = b"too large"
            if b'"lease": null' in text:
                time.sleep(0.05)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gateway.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
