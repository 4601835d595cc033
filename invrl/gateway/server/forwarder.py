"""Takes a request to the worker that holds its session, and the answer back.

ASGI, around the application of each of several workers: any connection serves any session. Invariants: no
body is read of a request without a key that this gateway made (its owner says whether it opens anything); an
answer streams through as it comes; a client that goes away ends the request at the owner too; a request that
the owner could not begin to answer because it died is sent to its successor, for which it is a retry like the
client's own; an answer that breaks off there breaks off here. Added by `app.py`."""

import asyncio
import hmac
import logging
import zlib
from collections.abc import Callable, Sequence

import aiohttp
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from invrl.errors import SessionError
from invrl.gateway.registry import hash_key, hash_of_one, is_signed, unauthorized
from invrl.gateway.server.agent_api import session_keys
from invrl.gateway.server.connection import ClientConnection
from invrl.gateway.server.peers import Peers
from invrl.gateway.server.settings import GatewaySettings

_log = logging.getLogger(__name__)
_SUCCESSOR_S = 30.0
"""How long a dead owner's successor may take to answer."""
_PAUSE_S = 0.05
_OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"}
_OF_THE_SERVER = {"date", "server"}


class _Opening(msgspec.Struct):
    request_id: str | None = None


class Forwarder:
    """`refusal`: the body of an error, as the request's client expects it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        peers: Peers,
        settings: GatewaySettings,
        refusal: Callable[[Scope, SessionError], bytes],
    ) -> None:
        self._app, self._peers, self._settings, self._refusal = app, peers, settings, refusal
        self._env_key = settings.env_key.get_secret_value()
        # An answer that is not streamed comes after its generation, which is asked for twice at most.
        longest_s = 2 * settings.generate_timeout_s + 60
        self._timeout = aiohttp.ClientTimeout(sock_connect=_SUCCESSOR_S, sock_read=longest_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client = ClientConnection(scope, receive, send)
        place = self._peers.place
        path_key, session_id = _names_in_path(scope["path"])
        keys = session_keys(path_key or None, client.headers)
        owner = place.owner(path_key or session_id or next(iter(keys), ""))
        opening = owner is None and scope["method"] == "POST" and scope["path"] == "/sessions"
        if not opening and owner in (None, place.number):
            return await self._app(scope, receive, send)
        try:
            self._check_keys(keys, only_environment=opening)
            limit, deadline_s = self._settings.max_body_bytes, self._settings.body_timeout_s
            raw = await client.body(limit=limit, deadline_s=deadline_s)
            if opening:
                owner = self._opener(raw)
                if owner == place.number:
                    return await self._app(scope, _again(raw, client), send)
            assert owner is not None
            await client.unless_gone(self._forward(client, scope, owner, raw))
        except SessionError as error:
            if not client.gone.is_set():
                headers = {"content-type": "application/json"}
                await client.answer(error.status, headers, self._refusal(scope, error))
        finally:
            client.release()

    def _check_keys(self, keys: Sequence[str], *, only_environment: bool) -> None:
        """SessionError 401 unless each key is the environment's or, without `only_environment`, a session's
        that this gateway made."""
        if only_environment:
            allowed = hmac.compare_digest(hash_of_one(keys), hash_key(self._env_key))
            if not allowed:
                raise unauthorized("this needs the environment key")
            return
        secret = self._env_key.encode()
        for key in keys:
            is_environment = hmac.compare_digest(hash_key(key), hash_key(self._env_key))
            if not is_environment and not is_signed(key, secret):
                raise unauthorized("unknown session key")
        if not keys:
            raise unauthorized("no key: give it as bearer or as x-api-key, a session's own also in the path")

    def _opener(self, raw: bytes) -> int:
        """Who opens sessions: who was asked, but the same worker for each try of a request that has an id."""
        place = self._peers.place
        try:
            named = msgspec.json.decode(raw, type=_Opening).request_id
        except (ValueError, RecursionError):  # the opener says what is wrong with it
            named = None
        return zlib.crc32(named.encode()) % len(place.urls) if named else place.number

    async def _forward(self, client: ClientConnection, scope: Scope, owner: int, raw: bytes) -> bool:
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + ("?" + query if query else "")
        url = URL(self._peers.place.urls[owner] + path, encoded=True)
        headers = {name: text for name, text in client.headers.items() if name not in _OF_THE_CONNECTION}
        headers["content-length"] = str(len(raw))
        until = asyncio.get_running_loop().time() + _SUCCESSOR_S
        while True:
            try:
                return await self._relay(client, scope["method"], url, headers, raw)
            except (aiohttp.ClientError, TimeoutError) as error:
                if client.started:  # left unfinished, the answer ends with the client's connection
                    _log.warning("worker %d broke off an answer: %r", owner, error)
                    return False
                if asyncio.get_running_loop().time() > until:
                    reason = f"worker {owner} of the gateway does not answer"
                    code = "gateway_unavailable"
                    raise SessionError(reason, status=503, code=code, retry_after_s=1.0) from None
            await asyncio.sleep(_PAUSE_S)

    async def _relay(
        self, client: ClientConnection, method: str, url: URL, headers: dict[str, str], raw: bytes
    ) -> bool:
        ask, timeout = self._peers.http.request, self._timeout
        async with ask(
            method, url, headers=headers, data=raw, allow_redirects=False, timeout=timeout
        ) as answer:
            kept = {name.lower(): text for name, text in answer.headers.items()}
            own = _OF_THE_CONNECTION | _OF_THE_SERVER
            await client.start(answer.status, {name: text for name, text in kept.items() if name not in own})
            async for piece in answer.content.iter_any():
                await client.write(piece)
        return await client.end(b"")


def _names_in_path(path: str) -> tuple[str, str]:
    """The key and the id of the session that a path names; "" for what it does not name."""
    _, kind, name, *_ = [*path.split("/"), "", ""]
    key = name if kind == "s" else ""
    session_id = name if kind == "sessions" else ""
    return key, session_id


def _again(raw: bytes, client: ClientConnection) -> Receive:
    """A request whose body has been read, for who reads it next."""
    waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await client.gone.wait()
        return {"type": "http.disconnect"}

    return receive
