"""One turn being sampled, from the proposal to the commit.

A generation belongs to nobody: clients attach to it (the first one, and retries that join), and when the last
one has gone it is cancelled, upstream too. Invariants: a turn whose prompt the engine counts otherwise than
the proposal is an aborted one; `answer()` returns only after the commit that holds the turn; what was sampled
of an aborted one is recorded, and never continued or trained. Started by `turns.py`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.sglang_client import NO_TOP, GenerateChunk, GenerateEnd, GenerateRequest, GenerateResult
from invrl.errors import InvrlError, ServerError, SessionError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.reply_parser import ReplyParser, join_deltas, reply_message
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.types import Answer, Delta, Message, Node, Piece, Tool
from invrl.types import FinishReason, Turn, VersionSpan

_log = logging.getLogger(__name__)

_JOINED = 16
_ASK_AGAIN_S = 0.5
"""The router takes about a second to leave a dead engine; clients' own retries cover more."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What will be sampled, and where in the forest it goes."""

    request: GenerateRequest
    stream: bool
    parent: Node | None
    context_ids: Sequence[int] | NDArray[np.int32]
    messages: tuple[Message, ...]
    """The messages that the context adds."""
    tools: tuple[Tool, ...] = ()
    fork_reason: str
    digest: str
    constrained: bool = False
    grammar: str = ""
    """As in `Turn`."""


Commit = Callable[[Turn, Proposal, Message], "asyncio.Future[None]"]
"""Records a turn with its reply; done when it is durable."""


class Sampler(Protocol):
    """What the gateway asks of the fleet (`SglangClient`); cancelling ends the generation there."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]: ...


class Generation:
    """Runs a proposal. `delivered`: some client got the whole answer.

    Its task ends without an exception, whatever happens: a task keeps its exception, that its traceback, that
    the frames, and those this generation and its whole conversation. Such a circle would stay until the
    collector for cycles comes, which is about once in half a million requests."""

    def __init__(
        self, proposal: Proposal, *, sampler: Sampler, renderer: Renderer, parser: ReplyParser, commit: Commit
    ) -> None:
        self.proposal = proposal
        self.delivered = False
        self._sampler, self._commit = sampler, commit
        self._parser = parser
        self._stream: TextStream = renderer.stream(proposal.request.stop, special=parser.special)
        self._pieces: list[Piece] = []
        self._joined = 0
        """So many of them, the first ones, are of `_JOINED` chunks or more, each longer than the next: one
        chunk by itself takes 0.5 KB."""
        self._spans: tuple[VersionSpan, ...] = ()
        self.cached_tokens = 0
        """Of the prompt, known with the first chunk."""
        self.started_at, self.finished_at = time.time(), 0.0
        self._attached = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._answer: Answer | None = None
        self._error: Exception | None = None
        """Why there is no answer, without its traceback; None: there is one, or it has been cancelled."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def failed(self) -> bool:
        """There is no answer, or there will be none: it has been cancelled, and may not have ended yet."""
        if not self._task.done():
            return self._task.cancelling() > 0
        return self._answer is None

    @property
    def unclaimed(self) -> bool:
        """The answer is whole, no client got it, and none is being sent it."""
        return not (self.running or self.failed or self.delivered or self._attached)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """A client waits for the answer inside of this block."""
        self._attached += 1
        try:
            yield
        finally:
            self._attached -= 1
            if not self._attached:
                self.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    async def settled(self) -> None:
        """Waits until it has ended, in whatever way."""
        await asyncio.wait([self._task])

    async def pieces(self, silence_s: float) -> AsyncIterator[Piece | None]:
        """From the first one on, as they are sampled; None after every `silence_s` without one. Raises what
        `answer` raises."""
        loop = asyncio.get_running_loop()
        at = 0
        while True:
            while at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            if self._task.done():
                await self.answer()
                return
            if self._attached == 1 and at >= self._joined + _JOINED:  # seen by all who read
                longest = _join(self._pieces[self._joined :])
                del self._pieces[self._joined :]
                while self._pieces and len(self._pieces[-1].ids_T) <= len(longest.ids_T):
                    longest = _join([self._pieces.pop(), longest])
                self._pieces.append(longest)
                self._joined = at = len(self._pieces)
            self._waiters.append(waiter := loop.create_future())
            timer = loop.call_later(silence_s, _resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
            if at == len(self._pieces) and not self._task.done():
                yield None

    async def answer(self) -> Answer:
        """The turn, committed. SessionError, ServerError or DeadlineError if there is none."""
        while not self._task.done():  # what it publishes last, in its last step, wakes sooner than its end
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter
        if self._answer is not None:
            return self._answer
        if self._error is not None:
            raise copy.copy(self._error)  # the traceback that it gets now is this caller's alone
        reason = "the session was closed meanwhile"
        raise SessionError(reason, status=401, code="session_closed")

    async def _run(self) -> None:
        try:
            self._answer = await self._sample_and_record()
        except asyncio.CancelledError as cancelled:
            _forget_tracebacks(cancelled)
        except InvrlError as error:
            self._error = copy.copy(error)
            _forget_tracebacks(error)
        except Exception as error:
            _log.exception("a generation failed inside of the gateway")
            self._error = RuntimeError(f"{type(error).__name__}: {error}")
            _forget_tracebacks(error)

    async def _sample_and_record(self) -> Answer:
        try:
            result = await self._sample()
            for delta in (self._parser.push(self._stream.finish()), *self._parser.finish()):
                self._publish(msgspec.structs.replace(_EMPTY, delta=delta))
        except (asyncio.CancelledError, Exception):
            self._record("abort")
            raise
        turn, message, durable = self._record(result.finish_reason, result)
        await asyncio.shield(durable)
        if result.finish_reason == "abort":
            raise ServerError("the engine aborted this generation")
        stop = result.matched_stop if isinstance(result.matched_stop, str) else ""
        return Answer(turn=turn, message=message, pieces=tuple(self._pieces), stop=stop)

    async def _sample(self) -> GenerateEnd:
        """Asks once more if the fleet fails before the first token."""
        request = self.proposal.request
        try:
            return await self._ask(request)
        except ServerError as error:
            if self._pieces:
                raise
            _log.warning("asking again: %s", error)
            await asyncio.sleep(_ASK_AGAIN_S)
            return await self._ask(msgspec.structs.replace(request, rid=request.rid + "-again"))

    async def _ask(self, request: GenerateRequest) -> GenerateEnd:
        if self.proposal.stream:
            result = None
            async with contextlib.aclosing(self._sampler.stream(request)) as items:
                async for item in items:
                    if isinstance(item, GenerateChunk):
                        self._take(item)
                    else:
                        result = item
            if result is None:
                raise ServerError("the engine's stream ended without a result")
        else:
            result = await self._sampler.generate(request)
            if len(result.ids_T):
                self._take(result)
        sent = len(request.input_ids_T)
        if result.prompt_tokens != sent:
            raise ServerError(f"the engine consumed {result.prompt_tokens} prompt tokens, {sent} were sent")
        return result

    def _take(self, chunk: GenerateChunk | GenerateResult) -> None:
        """The tokens are kept even if their text cannot be read: they were sampled."""
        self._spans = chunk.spans
        self.cached_tokens = chunk.cached_tokens
        delta = Delta()
        try:
            delta = self._parser.push(self._stream.push(chunk.ids_T.tolist()))
        finally:
            piece = Piece(delta=delta, ids_T=chunk.ids_T, logprobs_T=chunk.logprobs_T, top=chunk.top)
            self._publish(piece)

    def _publish(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    def _ended(self, _: asyncio.Task[None]) -> None:
        if self._error is not None and not self._attached:
            _log.info("a generation that nobody waits for failed: %s", self._error)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _resolve(waiter)

    def _record(
        self, finish: FinishReason, result: GenerateEnd | None = None
    ) -> tuple[Turn, Message, asyncio.Future[None]]:
        proposal = self.proposal
        message = reply_message(join_deltas([piece.delta for piece in self._pieces]))
        turn = Turn(
            id=proposal.request.rid,
            session_id=proposal.request.routing_key,
            parent_id=proposal.parent.turn.id if proposal.parent else None,
            context_ids_T=np.asarray(proposal.context_ids, np.int32),
            sampled_ids_T=np.concatenate([_EMPTY.ids_T, *(piece.ids_T for piece in self._pieces)]),
            logprobs_T=np.concatenate([_EMPTY.logprobs_T, *(piece.logprobs_T for piece in self._pieces)]),
            spans=self._spans,
            finish_reason=finish,
            request_digest=proposal.digest,
            delivered=False,
            temperature=proposal.request.sampling.temperature,
            prompt_tokens=len(proposal.request.input_ids_T),
            cached_tokens=result.cached_tokens if result else 0,
            fork_reason=proposal.fork_reason,
            constrained=proposal.constrained,
            grammar=proposal.grammar,
            started_at=self.started_at,
            finished_at=self.finished_at or time.time(),
        )
        return turn, message, self._commit(turn, proposal, message)


_EMPTY = Piece(delta=Delta(), ids_T=np.empty(0, np.int32), logprobs_T=np.empty(0, np.float32), top=NO_TOP)


def _forget_tracebacks(error: BaseException) -> None:
    """Of an error and of those that led to it: whoever holds on to one of them holds no frame."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.__traceback__ = None
            waiting += [cause.__cause__, cause.__context__]


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _join(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        delta=join_deltas([piece.delta for piece in pieces]),
        ids_T=np.concatenate([piece.ids_T for piece in pieces]),
        logprobs_T=np.concatenate([piece.logprobs_T for piece in pieces]),
        top=np.concatenate([piece.top for piece in pieces]) if pieces[0].top.size else NO_TOP,
    )
