"""The hot path: an agent's request, from its key to the last byte of its answer.

It is the same for all dialects. It is plain ASGI, because delivery and disconnects are
detected at that level. Invariants: every error has the dialect's own format; a client
that disconnects cancels its generation; a turn counts as delivered when its whole
answer has been sent, which is after its commit."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs
from starlette.types import Receive, Scope, Send

from invrl.errors import DeadlineError, DiskFullError, ServerError, SessionError
from invrl.gateway.dialects.dialect import CountingDialect, Dialect, ParsedRequest
from invrl.gateway.keys import request_keys
from invrl.gateway.registry import SessionRegistry
from invrl.gateway.server.http.connection import ClientConnection
from invrl.gateway.server.http.refusals import disk_full, retry_after
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.conversation import Conversation, ResponseSource
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import Piece, TurnRequest
from invrl.host.output.log_lines import session_of_task
from invrl.host.output.traces import Traces

_log = logging.getLogger(__name__)
_JSON = {"content-type": "application/json"}
_QUIET_INTERVALS = 6
"""Intervals of keep-alives for which a JSON answer that is not ready stays silent."""
_RETRY_COUNT = "x-stainless-retry-count"
"""Header in which the official clients count their own retries; "0" on the first
try."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentEndpoint:
    """One dialect's sampling route as an ASGI app."""

    dialect: Dialect[Any]
    registry: SessionRegistry
    turns: Turns
    settings: GatewaySettings
    traces: Traces | None = None
    """None: this gateway sends none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(scope, receive, send)
        record: SessionRecord | None = None
        try:
            keys = request_keys(scope["path_params"].get("key"), client.headers)
            record = self.registry.by_key(keys)
            session_of_task.set(record.session.id)
            client.session_id = record.session.id
            record.last_heard.update()
            if scope["method"] != "POST":
                raise SessionError(
                    "this route takes POST only", status=405, code="method_not_allowed"
                )
            body = await client.body(
                limit=self.settings.max_body_bytes,
                deadline_s=self.settings.body_timeout_s,
            )
            with self._traced(client, record):
                await self._serve(client, record, body)
        except SessionError as error:
            await self._refuse(client, record, error)
        except (ServerError, DeadlineError) as error:
            _log.warning("generation failed: %s", error)
            refusal = SessionError(
                str(error), status=503, code="engine_unavailable", retry_after_s=1.0
            )
            await self._refuse(client, record, refusal)
        except DiskFullError as error:
            await self._refuse(client, record, disk_full(error))
        except Exception:
            _log.exception("a request failed inside of the gateway")
            refusal = SessionError("internal error", status=500, code="internal_error")
            await self._refuse(client, record, refusal)
        finally:
            client.release()

    def _traced(
        self, client: ClientConnection, record: SessionRecord
    ) -> AbstractContextManager[None]:
        """Return the span of the call. It continues the client's trace if the client
        sends `traceparent`."""
        if self.traces is None:
            return contextlib.nullcontext()
        attributes = {"invrl.session": record.session.id}
        return self.traces.call(
            "agent_call", client.headers.get("traceparent", ""), attributes
        )

    async def _serve(
        self, client: ClientConnection, record: SessionRecord, body: bytes
    ) -> None:
        """Sample and send the answer, and mark it as delivered if the client received
        all of it."""
        conversation = self.turns.conversation(record)
        sources: list[ResponseSource] = []
        with conversation.call(), contextlib.ExitStack() as attachments:
            attachments.callback(record.last_heard.update)
            answering = self._answer(client, conversation, body, sources, attachments)
            if await client.cancel_on_disconnect(answering):
                for source in sources:
                    self.turns.deliver(conversation, source)
            else:
                self.turns.counts.turns["undelivered"] += len(sources)
                _log.info("session %s: the client went away", record.session.id)

    async def _answer(
        self,
        client: ClientConnection,
        conversation: Conversation,
        body: bytes,
        sources: list[ResponseSource],
        attachments: contextlib.ExitStack,
    ) -> bool:
        """Parse the body, begin a turn for each choice, and send the answer. True if
        the client received all of it. Each choice is added to `sources` as soon as it
        has begun, and attached until `attachments` closes: if a later choice is
        refused, or the client disconnects, the earlier ones are cancelled."""
        record = conversation.record
        is_retry = client.headers.get(_RETRY_COUNT, "0") != "0"
        parse = partial(
            self.dialect.parse, body, retry=is_retry, find=conversation.forest.turn
        )
        request = await self.turns.threads.run(parse, size=len(body))
        if client.model_in_path is not None:
            digest = request.turn.digest
            if client.model_in_path in self.turns.adapters:
                # A retry asks for the same adapter; the body does not say which.
                digest = f"{digest}-{client.model_in_path}"
            turn = structs.replace(
                request.turn, model=client.model_in_path, digest=digest
            )
            request = structs.replace(request, turn=turn)
        self.turns.check_model(record, request.turn.model)
        self.turns.counts.add_ignored(record, request.turn.ignored)
        prepared = await self.turns.prepare(conversation, request.turn, size=len(body))
        self.turns.conversation(record)  # SessionError if it was closed in the meantime
        overridden: list[str] = []
        for turn_request in _choices(request):
            source, newly_overridden = self.turns.begin(
                conversation, turn_request, prepared
            )
            sources.append(source)
            attachments.enter_context(source.attached())
            overridden.extend(newly_overridden)
        # OpenAI, Anthropic
        headers = {"x-request-id": sources[0].turn_id, "request-id": sources[0].turn_id}
        if overridden:
            names = ",".join(overridden)
            headers["x-invrl-overridden"] = names
            _log.info("session %s: the run overrides %s", record.session.id, names)
        if request.turn.stream:
            return await self._stream(client, request, sources, headers)
        blanks = contextlib.nullcontext()
        if self.settings.gate is not None:
            blanks = _blanks(client, {**headers, **_JSON}, self.settings.keep_alive_s)
        async with blanks:
            answers = [await source.answer() for source in sources]
        answer = self._dialect_of(request).answer(request, answers)
        if client.started:
            return await client.end(answer)
        return await client.answer(200, {**headers, **_JSON}, answer)

    async def _stream(
        self,
        client: ClientConnection,
        request: ParsedRequest,
        sources: Sequence[ResponseSource],
        headers: dict[str, str],
    ) -> bool:
        """Send the answer as events. True if the client received all of them. The HTTP
        response starts with the first token, or with the first keep-alive: an earlier
        error has its own status. The dialect's first event waits for the first token,
        because it contains the number of cached tokens."""
        starts = [source.start for source in sources]
        stream = self._dialect_of(request).stream(request, starts)
        client.error_event = stream.error
        has_head = False
        async for choice, piece in _interleaved(sources, self.settings.keep_alive_s):
            if not client.started:
                await client.start_stream(headers)
            if piece is None:
                await client.write(stream.keep_alive)
                continue
            if not has_head:
                has_head = True
                await client.write(stream.head(sources[0].cached_tokens))
            event = stream.piece(choice, piece)
            if event:
                await client.write(event)
        answers = [await source.answer() for source in sources]
        return await client.end(stream.tail(answers))

    def _dialect_of(self, request: ParsedRequest) -> Dialect[Any]:
        """Return the dialect with the name that answers to a request have: its
        adapter's, or the model's first."""
        adapter = request.turn.model
        if adapter is None or adapter not in self.settings.adapters:
            return self.dialect
        named = copy.copy(self.dialect)
        named.model = adapter
        return named

    async def _refuse(
        self,
        client: ClientConnection,
        record: SessionRecord | None,
        error: SessionError,
    ) -> None:
        """Refuse a request. `record` is its session; None if its key opens none."""
        if client.gone.is_set():
            return
        if record is not None:
            record.note_refusal(error)
        if client.started:
            # A JSON answer that has begun is cut off: the server closes the connection,
            # the client asks again, and gets the status.
            if client.error_event is not None:
                await client.end(client.error_event(error))
            return
        headers = {**_JSON, **retry_after(error)}
        if error.code == "disk_full":
            # The official clients would ask for another sample, which would wait again.
            headers["x-should-retry"] = "false"
        if error.status == 405:
            headers["allow"] = "POST"
        await client.answer(error.status, headers, self.dialect.error(error))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventsEndpoint(AgentEndpoint):
    """The route of a dialect that streams events only where the query says so."""

    async def _serve(
        self, client: ClientConnection, record: SessionRecord, body: bytes
    ) -> None:
        if "alt=sse" not in client.query.split("&"):
            raise SessionError(
                "a stream is sent as events: add `?alt=sse` to the URL",
                status=400,
                code="invalid_request",
                param="alt",
            )
        # Zero-argument super() does not work in a dataclass with slots.
        await AgentEndpoint._serve(self, client, record, body)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountEndpoint(AgentEndpoint):
    """One dialect's route that counts the tokens of a request's prompt. Nothing is
    sampled."""

    dialect: CountingDialect[Any]

    async def _serve(
        self, client: ClientConnection, record: SessionRecord, body: bytes
    ) -> None:
        parse = partial(self.dialect.parse_count, body)
        request = await self.turns.threads.run(parse, size=len(body))
        self.turns.check_model(record, client.model_in_path or request.model)
        conversation = self.turns.conversation(record)
        tokens = await self.turns.count_tokens(conversation, request, size=len(body))
        await client.answer(200, _JSON, self.dialect.counted(tokens))


def _choices(request: ParsedRequest) -> list[TurnRequest]:
    """Return a turn request for each of the `n` choices. Each has its own digest, by
    which a retry finds it."""
    first = request.turn
    choices = [first]
    for number in range(1, request.n):
        choices.append(structs.replace(first, digest=f"{first.digest}-{number}"))
    return choices


@contextlib.asynccontextmanager
async def _blanks(
    client: ClientConnection, headers: dict[str, str], keep_alive_s: float
) -> AsyncIterator[None]:
    """While the block waits for a JSON answer: after `_QUIET_INTERVALS` send its head
    and a blank, which JSON ignores, and a blank after every further `keep_alive_s`. The
    client of a turn that is held for long would otherwise give up and ask again. The
    head fixes the status, so it waits longer than that of a stream."""
    has_answer = asyncio.Event()
    writing: list[asyncio.Task[None]] = []

    async def write_blanks() -> None:
        await client.start(200, headers)
        while not has_answer.is_set():
            await client.write(b" ")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_s):
                    await has_answer.wait()

    def begin() -> None:
        writing.append(asyncio.create_task(write_blanks()))

    loop = asyncio.get_running_loop()
    timer = loop.call_later(_QUIET_INTERVALS * keep_alive_s, begin)
    try:
        yield
    finally:
        timer.cancel()
        has_answer.set()
        # A blank that is half sent must not be cut off.
        for task in writing:
            await task


async def _interleaved(
    sources: Sequence[ResponseSource], silence_s: float
) -> AsyncIterator[tuple[int, Piece | None]]:
    """Yield the pieces of all choices as they are sampled, each with the number of its
    choice. None instead of a piece after every `silence_s` in which the choice was
    silent. Raises the error of the first choice that fails."""
    if len(sources) == 1:
        async for piece in sources[0].pieces(silence_s):
            yield 0, piece
        return
    results: asyncio.Queue[tuple[int, Piece | None] | Exception | None] = (
        asyncio.Queue()
    )

    async def forward(choice: int) -> None:
        try:
            async for piece in sources[choice].pieces(silence_s):
                results.put_nowait((choice, piece))
            results.put_nowait(None)
        except Exception as error:  # raised below, where the pieces are read
            results.put_nowait(error)

    forwarding = [
        asyncio.create_task(forward(choice)) for choice in range(len(sources))
    ]
    try:
        num_running = len(forwarding)
        while num_running:
            result = await results.get()
            if isinstance(result, Exception):
                try:
                    raise result
                finally:
                    del (
                        result
                    )  # breaks the cycle of the error, its traceback and this frame
            if result is None:
                num_running -= 1
            else:
                yield result
    finally:
        for task in forwarding:
            task.cancel()
