"""The hot path: an agent's request, from its key to the last byte of its answer.

Generic over dialects; plain ASGI, because delivery and disconnects are decided close to the wire. Invariants:
whatever goes wrong has the dialect's own shape; a client that goes away cancels its generation; a turn is
delivered when its answer has left whole, which is after its commit. Mounted by `app.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs
from starlette.types import Receive, Scope, Send

from invrl.errors import DeadlineError, ServerError, SessionError
from invrl.gateway.dialects.dialect import CountingDialect, Dialect, ParsedRequest
from invrl.gateway.keys import keys_of_request
from invrl.gateway.registry import SessionRegistry
from invrl.gateway.server.connection import ClientConnection
from invrl.gateway.server.refusals import retry_after
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.generation import Generation
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import AnswerStart, Piece, TurnRequest

_log = logging.getLogger(__name__)
Headers = Mapping[str, str]
_JSON = {"content-type": "application/json"}
_RETRY_COUNT = "x-stainless-retry-count"
"""The official clients' count of their own retries, "0" on a first try."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentEndpoint:
    """One dialect's sampling route as an ASGI app."""

    dialect: Dialect[Any]
    registry: SessionRegistry
    turns: Turns
    settings: GatewaySettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(scope, receive, send)
        try:
            record = self.registry.by_key(keys_of_request(scope["path_params"].get("key"), client.headers))
            record.last_heard.update()
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
        retry = count not in (None, "0")
        conversation = self.turns.conversation(record)
        with conversation.call(), contextlib.ExitStack() as stack:
            stack.callback(record.last_heard.update)
            generations: list[Generation] = []

            async def answered() -> bool:
                parse = partial(self.dialect.parse, raw, retry=retry, find=conversation.forest.turn)
                request = await self.turns.threads.run(parse, size=len(raw))
                self.turns.count_ignored(record, request.turn.ignored)
                prepared = await self.turns.prepare(conversation, request.turn, size=len(raw))
                self.turns.conversation(record)  # it may have been closed meanwhile
                overridden: tuple[str, ...] = ()
                for turn in _choices(request):
                    generation, news = self.turns.begin(conversation, turn, prepared)
                    generations.append(generation)  # if the next one is refused, it ends
                    stack.enter_context(generation.attached())
                    overridden += news
                return await self._tell(client, record, request, generations, overridden)

            if await client.unless_gone(answered()):
                for generation in generations:
                    self.turns.deliver(conversation, generation)
            else:
                self.turns.counts["undelivered"] += len(generations)
                _log.info("session %s: the client went away", record.session.id)

    async def _tell(
        self,
        client: ClientConnection,
        record: SessionRecord,
        request: ParsedRequest,
        generations: Sequence[Generation],
        overridden: Sequence[str],
    ) -> bool:
        """True if the answer has left whole."""
        rid = generations[0].proposal.request.rid
        headers = {"x-request-id": rid, "request-id": rid}  # OpenAI's name, Anthropic's
        if overridden:
            names = ",".join(overridden)
            headers["x-invrl-overridden"] = names
            _log.info("session %s: the run overrides %s", record.session.id, names)
        tell = self._stream if request.turn.stream else self._whole
        return await tell(client, request, generations, headers)

    async def _whole(
        self,
        client: ClientConnection,
        request: ParsedRequest,
        generations: Sequence[Generation],
        headers: Headers,
    ) -> bool:
        answers = [await generation.answer() for generation in generations]
        return await client.answer(200, {**headers, **_JSON}, self.dialect.answer(request, answers))

    async def _stream(
        self,
        client: ClientConnection,
        request: ParsedRequest,
        generations: Sequence[Generation],
        headers: Headers,
    ) -> bool:
        """The stream begins with the first token, or when it is long in coming: what fails before has a
        status of its own. The dialect's head waits for the first token, which tells what was cached."""
        stream = self.dialect.stream(request, [_begun(generation) for generation in generations])
        client.error_event = stream.error
        headed = False
        async for choice, piece in _interleaved(generations, self.settings.keep_alive_s):
            if not client.started:
                await client.start_stream(headers)
            if piece is not None and not headed:
                headed = True
                await client.write(stream.head(generations[0].cached_tokens))
            if event := stream.keep_alive if piece is None else stream.piece(choice, piece):
                await client.write(event)
        answers = [await generation.answer() for generation in generations]
        return await client.end(stream.tail(answers))

    async def _refuse(self, client: ClientConnection, error: SessionError) -> None:
        if client.gone.is_set():
            return
        if client.started:
            await client.end(client.error_event(error))
        else:
            allow = {"allow": "POST"} if error.status == 405 else {}
            headers = {**_JSON, **allow, **retry_after(error)}
            await client.answer(error.status, headers, self.dialect.error(error))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountEndpoint(AgentEndpoint):
    """One dialect's route that counts the tokens of a request's prompt; nothing is sampled."""

    dialect: CountingDialect[Any]

    async def _serve(self, client: ClientConnection, record: SessionRecord, raw: bytes) -> None:
        parse = partial(self.dialect.parse_count, raw)
        request = await self.turns.threads.run(parse, size=len(raw))
        conversation = self.turns.conversation(record)
        tokens = await self.turns.count_tokens(conversation, request, size=len(raw))
        await client.answer(200, _JSON, self.dialect.counted(tokens))


def _choices(request: ParsedRequest) -> list[TurnRequest]:
    """One turn for each of `n`. Retries find each again by its own digest."""
    turn = request.turn
    others = (structs.replace(turn, digest=f"{turn.digest}-{nth}") for nth in range(1, request.n))
    return [turn, *others]


def _begun(generation: Generation) -> AnswerStart:
    request = generation.proposal.request
    prompt_tokens = len(request.input_ids_T)
    return AnswerStart(turn_id=request.rid, created=generation.started_at, prompt_tokens=prompt_tokens)


async def _interleaved(
    generations: Sequence[Generation], silence_s: float
) -> AsyncIterator[tuple[int, Piece | None]]:
    """(choice, piece) as they are sampled, without a piece after every `silence_s` of the choice's silence.
    Raises what the first generation to fail raises."""
    if len(generations) == 1:
        async for piece in generations[0].pieces(silence_s):
            yield 0, piece
        return
    found: asyncio.Queue[tuple[int, Piece | None] | Exception | None] = asyncio.Queue()

    async def forward(choice: int) -> None:
        try:
            async for piece in generations[choice].pieces(silence_s):
                found.put_nowait((choice, piece))
            found.put_nowait(None)
        except Exception as error:  # raised where the pieces are read
            found.put_nowait(error)

    running = [asyncio.create_task(forward(choice)) for choice in range(len(generations))]
    try:
        left = len(running)
        while left:
            item = await found.get()
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    del item  # else it holds its traceback, that this frame, and this frame it
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in running:
            task.cancel()
