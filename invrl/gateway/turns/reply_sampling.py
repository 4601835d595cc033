"""Samples one reply, on one engine after another while engines fail.

Before the first token a request is simply sent again; after it, `continuation.py` says what
the next engine is asked. The clients of the generation notice a pause.

Every reply is streamed by the engine. One that the client does not stream comes in few
events, and is taken only once it has ended: nobody has seen its tokens before, so if no
engine can continue them, they are forgotten and the reply is sampled anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec
import numpy as np

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.errors import NoEngineError, ServerError
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns.continuation import NotMoved, Segments
from invrl.host.output.traces import child_span

_log = logging.getLogger(__name__)

_RETRY_PAUSES_S = (0.5, 2.0)
"""Pauses before a second and a third try for the next token: an engine got the request,
and failed it. Another request would perhaps fail for the same reason."""
_ENGINE_POLL_S = 0.5
"""Pause between two requests of which no engine gets the first. They use up no try: a
router takes seconds to notice that an engine is dead, on a busy machine many."""
WHOLE_REPLY_INTERVAL = 32
"""Tokens in each event of a reply that the client does not stream: so few events that
they cost next to nothing, and no more tokens are lost with an engine."""


class Sampler(Protocol):
    """Interface of the engines for the gateway (`SglangClient`). Closing the stream
    ends the generation there."""

    def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]: ...


_Take = Callable[[GenerateChunk], None]
"""Takes tokens of the reply, in their order."""


class ReplySampling:
    """One reply being sampled."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        stream: bool,
        sampler: Sampler,
        text_stream: TextStream,
        engine_return_s: float,
    ) -> None:
        """`stream`: tokens are taken as they come. `text_stream`: has the text of all
        tokens that were taken. `engine_return_s`: how long to wait for an engine that
        gets the request."""
        if not stream:
            request = msgspec.structs.replace(
                request, stream_interval=WHOLE_REPLY_INTERVAL
            )
        self.segments = Segments(request)
        self.not_moved: NotMoved | None = None
        """Reason that the reply ended in the middle; None if it did not."""
        self._request = request
        self._stream = stream
        self._sampler = sampler
        self._text_stream = text_stream
        self._tries = _Tries(engine_return_s)
        self._held: list[GenerateChunk] = []
        """Tokens that have come and are not taken yet."""

    async def run(self, take: _Take) -> GenerateEnd:
        """Sample to the end. Raises the last engine's error if the tries for the next
        token are used up, or if the reply cannot be moved."""
        if self._stream:
            return await self._sample(take)
        try:
            return await self._sample(self._held.append)
        finally:
            if self._held:
                take(self._joined_held())

    async def _sample(self, take: _Take) -> GenerateEnd:
        request = self._request
        while True:
            try:
                with child_span("generate"):
                    end = await self._sample_segment(request, take)
                return self.segments.joined(end)
            except ServerError as error:
                following, pause_s = self._following(error)
                if isinstance(following, NotMoved):
                    self._keep_reason(following, error)
                    raise
            if isinstance(following, GenerateEnd):
                return following
            request = following
            await asyncio.sleep(pause_s)

    def _following(
        self, error: ServerError
    ) -> tuple[GenerateRequest | GenerateEnd | NotMoved, float]:
        """Return what follows the failure of an engine: the next request, the end of
        the reply, or the reason that it fails. With it, the pause before the
        request."""
        has_new_tokens = self.segments.has_new_tokens
        following = self.segments.continuation(
            error, is_text_settled=not has_new_tokens or self._is_text_settled()
        )
        if isinstance(following, GenerateEnd):
            return following, 0.0
        is_lost = isinstance(following, NotMoved)
        if is_lost and self._stream:
            return following, 0.0
        pause_s = self._tries.pause_s(
            error, has_new_tokens=has_new_tokens and not is_lost
        )
        if pause_s is None:
            return NotMoved.NO_ENGINE, 0.0
        if is_lost:
            self._held.clear()
            following = self.segments.restart()
        return following, pause_s

    def _is_text_settled(self) -> bool:
        held_ids = [token for chunk in self._held for token in chunk.ids_T.tolist()]
        return self._text_stream.is_settled_after(held_ids)

    def _keep_reason(self, reason: NotMoved, error: ServerError) -> None:
        """Keep the reason that no engine continues the reply, if it has begun."""
        num_sampled = self.segments.num_sampled
        if num_sampled:
            self.not_moved = reason
            _log.warning(
                "%s ends after %d tokens, and no other engine continues it (%s): %s",
                self._request.rid,
                num_sampled,
                reason.value,
                error,
            )

    def _joined_held(self) -> GenerateChunk:
        held = self._held
        return msgspec.structs.replace(
            held[-1],
            ids_T=np.concatenate([chunk.ids_T for chunk in held]),
            logprobs_T=np.concatenate([chunk.logprobs_T for chunk in held]),
            top=np.concatenate([chunk.top for chunk in held]),
            spans=self.segments.spans,
        )

    async def _sample_segment(
        self, request: GenerateRequest, take: _Take
    ) -> GenerateEnd:
        end = None
        async with contextlib.aclosing(self._sampler.stream(request)) as items:
            async for item in items:
                if isinstance(item, GenerateChunk):
                    self.segments.add(item)
                    take(item)
                else:
                    end = item
        if end is None:
            raise ServerError("the engine's stream ended without a result")
        return end


class _Tries:
    """The tries for the next token of a reply."""

    def __init__(self, engine_return_s: float) -> None:
        self._engine_return_s = engine_return_s
        self._pauses = iter(_RETRY_PAUSES_S)
        self._no_engine_since: float | None = None

    def pause_s(self, error: ServerError, *, has_new_tokens: bool) -> float | None:
        """Return the pause before the try that follows this error; None if it was the
        last one. `has_new_tokens`: the try that failed has sampled tokens, so the next
        token begins with all its tries."""
        if isinstance(error, NoEngineError):
            now = time.monotonic()
            if self._no_engine_since is None:
                self._no_engine_since = now
                _log.warning("waiting for an engine: %s", error)
            if now - self._no_engine_since > self._engine_return_s:
                return None
            return _ENGINE_POLL_S
        self._no_engine_since = None
        if has_new_tokens:
            self._pauses = iter(_RETRY_PAUSES_S)
        pause_s = next(self._pauses, None)
        if pause_s is not None:
            _log.warning("asking again: %s", error)
        return pause_s
