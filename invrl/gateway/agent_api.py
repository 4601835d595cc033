"""The hot path: an agent's request, from its key to the last byte of its answer.

Generic over dialects; plain ASGI, because delivery and disconnects are decided close to the wire. Invariants:
whatever goes wrong has the dialect's own shape; a client that goes away cancels its generation; a turn is
delivered when its answer has left whole, which is after its commit. Mounted by `app.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from invrl.errors import DeadlineError, ServerError, SessionError
from invrl.gateway.connection import ClientConnection
from invrl.gateway.dialects.chat import ChatDialect, ChatRequest
from invrl.gateway.generation import Generation
from invrl.gateway.sessions import SessionRecord, SessionRegistry
from invrl.gateway.settings import GatewaySettings
from invrl.gateway.turns import Turns

_log = logging.getLogger(__name__)
Headers = Mapping[str, str]
_JSON = {"content-type": "application/json"}
_RETRY_COUNT = "x-stainless-retry-count"
"""The official clients' count of their own retries, "0" on a first try."""


def session_keys(path_key: str | None, headers: Headers) -> list[str]:
    """Every session key that a request carries: in the path, as bearer, as x-api-key. With a key in the
    path, headers count only where they hold a session key: agents send some placeholder there."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    keys = [key for key in given if key]
    if path_key is None:
        return keys
    return [path_key, *(key for key in keys if key.startswith("isk-"))]


def retry_after(error: SessionError) -> dict[str, str]:
    """The header of a refusal that will not last."""
    return {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentEndpoint:
    """One dialect's sampling route as an ASGI app."""

    dialect: ChatDialect
    registry: SessionRegistry
    turns: Turns
    settings: GatewaySettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(scope, receive, send)
        try:
            record = self.registry.by_key(session_keys(scope["path_params"].get("key"), client.headers))
            if scope["method"] != "POST":
                raise SessionError("this route takes POST only", status=405, code="method_not_allowed")
            limit, deadline_s = self.settings.max_body_bytes, self.settings.body_timeout_s
            raw = await client.body(limit=limit, deadline_s=deadline_s)
            await self._serve(client, record, raw)
        except SessionError as error:
            await self._refuse(client, error)
        except (ServerError, DeadlineError) as error:
            _log.warning("generation failed: %s", error)
            refusal = SessionError(str(error), status=503, code="engine_unavailable", retry_after_s=1.0)
            await self._refuse(client, refusal)
        except Exception:
            _log.exception("a request failed inside of the gateway")
            await self._refuse(client, SessionError("internal error", status=500, code="internal_error"))
        finally:
            client.release()

    async def _serve(self, client: ClientConnection, record: SessionRecord, raw: bytes) -> None:
        count = client.headers.get(_RETRY_COUNT)
        request = self.dialect.parse(raw, retry=None if count is None else count != "0")
        conversation = self.turns.conversation(record)
        with conversation.call():
            generation, overridden = self.turns.begin(conversation, request.turn)
            headers = {"x-request-id": generation.proposal.request.rid}
            if overridden:
                headers["x-invrl-overridden"] = names = ",".join(overridden)
                _log.info("session %s: the run overrides %s", record.session.id, names)
            with generation.attached():
                serve = self._stream if request.turn.stream else self._whole
                answering = asyncio.create_task(serve(client, request, generation, headers))
                delivered = await client.unless_gone(answering)
            if delivered:
                self.turns.deliver(conversation, generation)
            else:
                self.turns.counts["undelivered"] += 1
                _log.info("session %s: the client went away", record.session.id)

    async def _whole(
        self, client: ClientConnection, request: ChatRequest, generation: Generation, headers: Headers
    ) -> bool:
        answer = await generation.answer()
        return await client.answer(200, {**headers, **_JSON}, self.dialect.answer(request, answer))

    async def _stream(
        self, client: ClientConnection, request: ChatRequest, generation: Generation, headers: Headers
    ) -> bool:
        """The stream begins with the first token, or when it is long in coming: what fails before has a
        status of its own."""
        rid, created = generation.proposal.request.rid, generation.started_at
        pieces = generation.pieces()
        upcoming = asyncio.ensure_future(anext(pieces, None))
        try:
            while True:
                done, _ = await asyncio.wait([upcoming], timeout=self.settings.keep_alive_s)
                piece = upcoming.result() if done else None
                if done and piece is None:
                    break
                if not client.started:
                    await client.start_stream(headers)
                    await client.write(self.dialect.stream_head(request, rid, created))
                if piece is None:
                    await client.write(b": waiting\n\n")
                    continue
                if event := self.dialect.stream_piece(request, rid, created, piece):
                    await client.write(event)
                upcoming = asyncio.ensure_future(anext(pieces, None))
            return await client.end(self.dialect.stream_tail(request, await generation.answer()))
        finally:
            upcoming.cancel()

    async def _refuse(self, client: ClientConnection, error: SessionError) -> None:
        if client.gone.is_set():
            return
        if client.started:
            await client.end(self.dialect.stream_error(error))
        else:
            await client.answer(error.status, {**_JSON, **retry_after(error)}, self.dialect.error(error))
