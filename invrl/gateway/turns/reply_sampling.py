"""Samples one reply, on one engine after another while engines fail.

Before the first token a request is simply sent again; after it, `continuation.py` says what
the next engine is asked. The clients of the generation notice a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
    GenerateResult,
)
from invrl.errors import NoEngineError, ServerError
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns.continuation import NotMoved, Segments
from invrl.host.output.traces import child_span

_log = logging.getLogger(__name__)

_RETRY_PAUSES_S = (0.5, 2.0)
"""Pauses before a second and a third try for the next token. The router takes up to two
seconds to drop a dead engine."""
_ENGINE_POLL_S = 0.5
"""Pause between two requests to a router that has no engine."""


class Sampler(Protocol):
    """Interface of the engines for the gateway (`SglangClient`). Cancelling a call ends
    the generation there."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]: ...


_Take = Callable[[GenerateChunk | GenerateResult], None]
"""Takes tokens as they are sampled."""


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
        """`text_stream`: has the text of all tokens that were taken.
        `engine_return_s`: how long to wait for an engine, if there is none."""
        self.segments = Segments(request)
        self.not_moved: NotMoved | None = None
        """Reason that the reply ended in the middle; None if it did not."""
        self._request = request
        self._stream = stream
        self._sampler = sampler
        self._text_stream = text_stream
        self._tries = _Tries(engine_return_s)

    async def run(self, take: _Take) -> GenerateEnd:
        """Sample to the end. Raises the last engine's error if the tries for the next
        token are used up, or if the reply cannot be moved."""
        request = self._request
        while True:
            try:
                with child_span("generate"):
                    end = await self._sample_segment(request, take)
                return self.segments.joined(end)
            except ServerError as error:
                pause_s = self._tries.pause_s(
                    error, has_new_tokens=self.segments.has_new_tokens
                )
                following = self._following(error, is_last_try=pause_s is None)
                if following is None:
                    raise
            if isinstance(following, GenerateEnd):
                return following
            request = following
            await asyncio.sleep(pause_s or 0.0)

    def _following(
        self, error: ServerError, *, is_last_try: bool
    ) -> GenerateRequest | GenerateEnd | None:
        """Return what follows the failure of an engine: the next request, or the end of
        the reply. None if the generation fails."""
        following = NotMoved.NO_ENGINE
        if not is_last_try:
            following = self.segments.continuation(
                error, is_text_settled=self._text_stream.is_settled
            )
        if not isinstance(following, NotMoved):
            return following
        num_sampled = self.segments.num_sampled
        if num_sampled:
            self.not_moved = following
            _log.warning(
                "%s ends after %d tokens, and no other engine continues it (%s): %s",
                self._request.rid,
                num_sampled,
                following.value,
                error,
            )
        return None

    async def _sample_segment(
        self, request: GenerateRequest, take: _Take
    ) -> GenerateEnd:
        if not self._stream:
            whole = await self._sampler.generate(request)
            self.segments.add(whole)
            take(whole)
            return whole
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
