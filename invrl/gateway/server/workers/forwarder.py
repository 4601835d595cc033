"""Forwards a request to the worker that holds its session, and the answer back to the
client.

An ASGI layer around the application of each worker when there are several: any
connection serves any session. Invariants: the body of a request is read only if its key
was made by this gateway (the owner decides whether the key opens a session); an answer
is passed on as it arrives; if the client disconnects, the request to the owner ends
too; if the owner dies before it begins to answer, the request goes to its successor, as
a retry like a client's; if the owner dies during the answer, the answer breaks off; a
request goes to the owner's address, whatever its request line.
"""

import asyncio
import hmac
import logging
import zlib
from collections.abc import Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invrl.errors import SessionError
from invrl.gateway.keys import (
    hash_key,
    is_signed,
    request_keys,
    single_key_hash,
    unauthorized,
)
from invrl.gateway.server.http.connection import ClientConnection
from invrl.gateway.server.http.refusals import FormatError
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.server.workers.peers import Peers
from invrl.host.network.http_connection import HttpError

_log = logging.getLogger(__name__)
_SUCCESSOR_S = 30.0
"""Deadline of the successor of a dead worker."""
_PAUSE_S = 0.05
"""Pause between two tries to reach the owner."""
_CONNECTION_HEADERS = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "expect",
}
"""Headers of one connection, which are not forwarded."""
_SERVER_HEADERS = {"date", "server"}
"""Headers that this worker's own server adds to the answer."""


class _OpenRequest(msgspec.Struct):
    """Relevant field of a request that opens sessions."""

    request_id: str | None = None


class Forwarder:
    def __init__(
        self,
        app: ASGIApp,
        *,
        peers: Peers,
        settings: GatewaySettings,
        format_error: FormatError,
    ) -> None:
        self._app = app
        self._peers = peers
        self._settings = settings
        self._format_error = format_error
        self._env_key = settings.env_key.get_secret_value()
        # An answer that is not streamed arrives after its generation, which is
        # requested at most twice.
        self._silence_s = 2 * settings.session.generate_timeout_s + 60
        """Longest time between two pieces of an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = ClientConnection(scope, receive, send)
        place = self._peers.place
        path_key, session_id = _names_in_path(scope["path"])
        keys = request_keys(path_key or None, client.headers)
        first_key = keys[0] if keys else ""
        owner = place.owner(path_key or session_id or first_key)
        opens_sessions = (
            owner is None and scope["method"] == "POST" and scope["path"] == "/sessions"
        )
        if not opens_sessions and owner in (None, place.number):
            await self._app(scope, receive, send)
            return
        try:
            if opens_sessions:
                self._check_environment_key(keys)
            else:
                self._check_keys(keys)
            limit = self._settings.max_body_bytes
            body = await client.sent_body(
                limit=limit, deadline_s=self._settings.body_timeout_s
            )
            if opens_sessions:
                owner = self._opener(await client.decompressed(body, limit=limit))
                if owner == place.number:
                    await self._app(scope, _receive_again(body, client), send)
                    return
            assert owner is not None
            await client.cancel_on_disconnect(self._forward(client, scope, owner, body))
        except SessionError as error:
            if not client.gone.is_set():
                headers = {"content-type": "application/json"}
                await client.answer(
                    error.status, headers, self._format_error(Request(scope), error)
                )
        finally:
            client.release()

    def _check_environment_key(self, keys: Sequence[str]) -> None:
        """Raise SessionError 401 unless the request carries the environment key."""
        if not hmac.compare_digest(single_key_hash(keys), hash_key(self._env_key)):
            raise unauthorized("this needs the environment key")

    def _check_keys(self, keys: Sequence[str]) -> None:
        """Raise SessionError 401 unless each key is the environment key or a session
        key made by this gateway."""
        secret = self._env_key.encode()
        for key in keys:
            is_environment = hmac.compare_digest(hash_key(key), hash_key(self._env_key))
            if not is_environment and not is_signed(key, secret):
                raise unauthorized("unknown session key")
        if not keys:
            raise unauthorized(
                "no key: give it as bearer, as x-api-key or as x-goog-api-key, a session's own also in the path"
            )

    def _opener(self, body: bytes) -> int:
        """Return the worker that opens the sessions: this one, or, for a request with
        an id, the same worker at each of its tries."""
        place = self._peers.place
        try:
            request_id = msgspec.json.decode(body, type=_OpenRequest).request_id
        except (
            ValueError,
            RecursionError,
        ):  # the session API reports what is wrong with the body
            request_id = None
        if not request_id:
            return place.number
        return zlib.crc32(request_id.encode()) % len(place.urls)

    async def _forward(
        self, client: ClientConnection, scope: Scope, owner: int, body: bytes
    ) -> bool:
        """Forward a request. True if the client received the whole answer. Raises
        SessionError 503 if neither the owner nor a successor answers."""
        target = _target_of(scope)
        not_forwarded = _CONNECTION_HEADERS | {"content-length"}
        headers = {
            name: text
            for name, text in client.headers.items()
            if name not in not_forwarded
        }
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SUCCESSOR_S
        while True:
            try:
                return await self._relay(
                    client, owner, scope["method"], target, headers, body
                )
            except (HttpError, TimeoutError) as error:
                if (
                    client.started
                ):  # the answer stays incomplete and ends with the client's connection
                    _log.warning("worker %d broke off an answer: %r", owner, error)
                    return False
                if loop.time() > deadline:
                    raise SessionError(
                        f"worker {owner} of the gateway does not answer",
                        status=503,
                        code="gateway_unavailable",
                        retry_after_s=1.0,
                    ) from None
            await asyncio.sleep(_PAUSE_S)

    async def _relay(
        self,
        client: ClientConnection,
        owner: int,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
    ) -> bool:
        loop = asyncio.get_running_loop()
        connections = self._peers.connections(owner)
        async with (
            asyncio.timeout(self._silence_s) as silence,
            connections.request(method, target, headers, body) as answer,
        ):
            not_forwarded = _CONNECTION_HEADERS | _SERVER_HEADERS
            forwarded = {
                name: text
                for name, text in answer.headers.items()
                if name not in not_forwarded
            }
            await client.start(answer.status, forwarded)
            async for piece in answer.pieces():
                silence.reschedule(None)
                await client.write(piece)
                silence.reschedule(loop.time() + self._silence_s)
        return await client.end(b"")


def _target_of(scope: Scope) -> str:
    """Return the target of a request at another worker: the client's path and query,
    byte for byte. Raises SessionError 400 for a path that is none."""
    path = scope["raw_path"].decode("latin-1")
    if not path.startswith("/"):
        raise SessionError(
            "the request's path does not begin with /",
            status=400,
            code="invalid_request",
        )
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _names_in_path(path: str) -> tuple[str, str]:
    """Return the key and the id of the session in a path; "" for each that is
    missing."""
    parts = path.split("/")
    if len(parts) < 3:
        return "", ""
    kind = parts[1]
    name = parts[2]
    if kind == "s":
        return name, ""
    if kind == "sessions":
        return "", name
    return "", ""


def _receive_again(body: bytes, client: ClientConnection) -> Receive:
    """Return a `receive` that returns a body that has been read already."""
    messages: list[Message] = [
        {"type": "http.request", "body": body, "more_body": False}
    ]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await client.gone.wait()
        return {"type": "http.disconnect"}

    return receive
