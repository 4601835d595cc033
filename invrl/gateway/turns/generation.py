"""One turn being sampled, from the proposal to the commit.

A generation belongs to no single client: clients attach to it (the first one, and
retries that join it). When the last one has gone, the generation is cancelled, at the
engine too. Invariants: if the engine counts another number of prompt tokens than were
sent, the turn is aborted; `answer()` returns only after the commit of the turn, which
waits for space on a full disk; what was sampled of an aborted turn is recorded, and
never continued or trained. If its engine fails, another one continues the generation
(`continuation.py`), and the clients do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.generation import (
    NO_TOP,
    GenerateChunk,
    GenerateRequest,
)
from invrl.errors import (
    DiskFullError,
    InvrlError,
    SessionError,
)
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.reply_parser import (
    ReplyParser,
    join_deltas,
    reply_message,
)
from invrl.gateway.turns.continuation import NotMoved
from invrl.gateway.turns.reply_sampling import ReplySampling, Sampler
from invrl.gateway.types import Answer, Delta, Message, Node, Piece, ResponseStart, Tool
from invrl.host.output.traces import Attributes, SpanPlace, child_span
from invrl.types.routed_experts import RoutedExperts
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import FinishReason, Segment, Turn

_log = logging.getLogger(__name__)

_JOIN_AFTER = 16
"""Number of pieces, seen by every reader, from which they are joined."""
_SPACE_POLL_S = 1.0
"""Pause between two tries to record a turn on a full disk."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The next sample, and its place in the forest."""

    request: GenerateRequest
    stream: bool
    parent: Node | None
    context_ids: Sequence[int] | NDArray[np.int32]
    messages: tuple[Message, ...]
    """Messages that the context adds."""
    tools: tuple[Tool, ...] = ()
    fork_reason: str
    digest: str
    constrained: bool = False
    grammar: str = ""
    top_shown: int = 0
    """Number of the likeliest tokens shown to the client at each sampled one."""
    top_recorded: int = 0
    """Number of them that are recorded."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Recorded data of a turn's tokens in addition to the turn itself; None where
    unknown."""

    experts_TLK: RoutedExperts | None = None
    """Experts of `Rollout.routed_experts`."""
    top: TopLogprobs | None = None
    """Likeliest tokens of `Rollout.top_logprobs`."""
    trace: SpanPlace | None = None
    """Span of the turn, if this process sends traces."""
    stop: str = ""
    """Client's stop string that ended the reply; "" if none did."""
    segments: tuple[Segment, ...] = ()
    """Engines of a moved turn; empty if one request to an engine sampled all tokens."""
    not_moved: NotMoved | None = None
    """Reason that no other engine continued the turn whose engine failed."""


Commit = Callable[[Turn, Proposal, Message, Recorded], "asyncio.Future[None]"]
"""Records a turn with its reply. The future is done when the turn is durable. If it has
a DiskFullError, nothing was recorded, and the call may be repeated."""


class Generation:
    """Samples a proposal in a separate task.

    The task ends without an exception, whatever happens. A task keeps its exception,
    the exception its traceback, the traceback the frames, and the frames this
    generation with its whole conversation. Such a cycle would stay in memory until the
    garbage collector runs, about once in half a million requests.
    """

    def __init__(
        self,
        proposal: Proposal,
        *,
        sampler: Sampler,
        renderer: Renderer,
        parser: ReplyParser,
        commit: Commit,
        engine_return_s: float = 600.0,
        space_wait_s: float = 240.0,
    ) -> None:
        """`engine_return_s`: how long to wait for an engine, if there is none.
        `space_wait_s`: how long to wait for space, if the disk is full."""
        self.proposal = proposal
        self.delivered = False
        """Whether some client got the whole answer."""
        self.started_at = time.time()
        self._began = time.monotonic()
        self._commit = commit
        self._space_wait_s = space_wait_s
        self._parser = parser
        self._text_stream = renderer.stream(
            proposal.request.stop,
            special=parser.special,
            inside=any(message.role == "text" for message in proposal.messages),
        )
        self._pieces: list[Piece] = []
        self._num_joined = 0
        """Number of pieces at the beginning that are joined from others. Each is longer
        than the next. (A piece of one chunk takes 0.5 KB of memory.)"""
        self._top: list[NDArray[np.void]] = []
        """Likeliest tokens [T, K] of each chunk to record."""
        self._sampling = ReplySampling(
            proposal.request,
            stream=proposal.stream,
            sampler=sampler,
            text_stream=self._text_stream,
            engine_return_s=engine_return_s,
        )
        self._num_attached = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._answer: Answer | None = None
        self._error: Exception | None = None
        """Error that prevented an answer, without its traceback. None if there is an
        answer, or if it was cancelled."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_end)

    @property
    def turn_id(self) -> str:
        return self.proposal.request.rid

    @property
    def digest(self) -> str:
        """Digest of the request."""
        return self.proposal.digest

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had cached; known with the first piece."""
        return self._sampling.segments.cached_tokens

    @property
    def start(self) -> ResponseStart:
        return ResponseStart(
            turn_id=self.turn_id,
            created=self.started_at,
            prompt_tokens=len(self.proposal.request.input_ids_T),
        )

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def failed(self) -> bool:
        """Whether there is no answer, or there will be none: it was cancelled, although
        it may still be running."""
        if not self._task.done():
            return self._task.cancelling() > 0
        return self._answer is None

    @property
    def unclaimed(self) -> bool:
        """Whether the answer is complete, no client got it, and it is not being sent to
        one."""
        if self.running or self.failed:
            return False
        return not self.delivered and self._num_attached == 0

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Attach a client, which waits for the answer inside this block."""
        self._num_attached += 1
        try:
            yield
        finally:
            self._num_attached -= 1
            if not self._num_attached:
                self.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    async def settled(self) -> None:
        """Wait until the generation has ended, in whatever way."""
        await asyncio.wait([self._task])

    async def pieces(self, silence_s: float) -> AsyncIterator[Piece | None]:
        """Yield the pieces from the first one on, as they are sampled; None after every
        `silence_s` without a piece. Raises like `answer`."""
        loop = asyncio.get_running_loop()
        position = 0
        while True:
            while position < len(self._pieces):
                yield self._pieces[position]
                position += 1
            if self._task.done():
                await self.answer()
                return
            is_only_reader = self._num_attached == 1
            if is_only_reader and position >= self._num_joined + _JOIN_AFTER:
                self._join_pieces()
                position = len(self._pieces)
            waiter = loop.create_future()
            self._waiters.append(waiter)
            timer = loop.call_later(silence_s, _resolve, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
            if position == len(self._pieces) and not self._task.done():
                yield None

    def _join_pieces(self) -> None:
        """Join the pieces of single chunks into one, and with it those before it that
        are not longer."""
        last = _join(self._pieces[self._num_joined :])
        del self._pieces[self._num_joined :]
        while self._pieces and len(self._pieces[-1].ids_T) <= len(last.ids_T):
            last = _join([self._pieces.pop(), last])
        self._pieces.append(last)
        self._num_joined = len(self._pieces)

    async def answer(self) -> Answer:
        """The committed turn. SessionError, ServerError, DeadlineError or DiskFullError
        if there is none."""
        # A loop, because the last pieces wake a waiter before the task has ended.
        while not self._task.done():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self._answer is not None:
            return self._answer
        if self._error is not None:
            raise copy.copy(
                self._error
            )  # a copy, because raising adds the traceback of this caller
        reason = "the session was closed meanwhile"
        raise SessionError(reason, status=401, code="session_closed")

    async def _run(self) -> None:
        try:
            with child_span("turn", self._attributes()) as trace:
                self._answer = await self._sample_and_record(trace)
        except asyncio.CancelledError as cancelled:
            _forget_tracebacks(cancelled)
        except InvrlError as error:
            self._error = copy.copy(error)
            _forget_tracebacks(error)
        except Exception as error:
            _log.exception("a generation failed inside of the gateway")
            self._error = RuntimeError(f"{type(error).__name__}: {error}")
            _forget_tracebacks(error)

    def _attributes(self) -> Attributes:
        """Return the attributes of the turn's span."""
        request = self.proposal.request
        return {
            "invrl.turn": self.turn_id,
            "invrl.session": request.routing_key,
            "invrl.prompt_tokens": len(request.input_ids_T),
        }

    async def _sample_and_record(self, trace: SpanPlace | None) -> Answer:
        try:
            result = await self._sampling.run(self._take)
            last_text = self._text_stream.finish()
            for delta in (self._parser.push(last_text), *self._parser.finish()):
                self._publish(msgspec.structs.replace(_EMPTY, delta=delta))
        except (asyncio.CancelledError, Exception):
            self._commit(
                self._turn("abort"),
                self.proposal,
                self._reply(),
                self._recorded(trace),
            )
            raise
        message = self._reply()
        turn = self._turn(result.finish_reason)
        stop = ""
        if isinstance(result.matched_stop, str):
            stop = result.matched_stop
        recorded = msgspec.structs.replace(
            self._recorded(trace),
            experts_TLK=result.experts_TLK,
            top=self._recorded_top(),
            stop=stop,
        )
        with child_span("commit", {"invrl.sampled_tokens": len(turn.sampled_ids_T)}):
            await self._record(turn, message, recorded)
        return Answer(turn=turn, message=message, pieces=tuple(self._pieces), stop=stop)

    def _recorded(self, trace: SpanPlace | None) -> Recorded:
        """Return what is known of every turn, also of one that is aborted."""
        segments = self._sampling.segments
        is_moved = segments.num_segments > 1
        return Recorded(
            trace=trace,
            segments=segments.by_engine if is_moved else (),
            not_moved=self._sampling.not_moved,
        )

    async def _record(self, turn: Turn, message: Message, recorded: Recorded) -> None:
        """Wait until the turn is durable. Raises DiskFullError if the disk stays
        full."""
        deadline = time.monotonic() + self._space_wait_s
        while True:
            durable = self._commit(turn, self.proposal, message, recorded)
            try:
                await asyncio.shield(durable)
                return
            except DiskFullError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_SPACE_POLL_S)

    def _take(self, chunk: GenerateChunk) -> None:
        """Publish the tokens of a chunk, even if their text cannot be parsed: they were
        sampled."""
        delta = Delta()
        try:
            text = self._text_stream.push(chunk.ids_T.tolist())
            delta = self._parser.push(text)
        finally:
            top = self._take_top(chunk)
            self._publish(
                Piece(
                    delta=delta, ids_T=chunk.ids_T, logprobs_T=chunk.logprobs_T, top=top
                )
            )

    def _take_top(self, chunk: GenerateChunk) -> NDArray[np.void]:
        """Keep the likeliest tokens to record; return those to show to the client."""
        if chunk.top.size == 0:
            return NO_TOP
        proposal = self.proposal
        top_TK = chunk.top.reshape(len(chunk.ids_T), -1)
        if proposal.top_recorded:
            self._top.append(top_TK[:, : proposal.top_recorded])
        return top_TK[:, : proposal.top_shown].reshape(-1)

    def _recorded_top(self) -> TopLogprobs | None:
        """Return the likeliest tokens of all tokens so far."""
        if not self._top:
            return None
        top_TK = np.concatenate(self._top)
        return TopLogprobs.reported(top_TK["id"], top_TK["logprob"])

    def _publish(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake_waiters()

    def _on_end(self, _: asyncio.Task[None]) -> None:
        if self._error is not None and not self._num_attached:
            _log.info("a generation that nobody waits for failed: %s", self._error)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            _resolve(waiter)

    def _reply(self) -> Message:
        """Return the reply sampled so far."""
        return reply_message(join_deltas([piece.delta for piece in self._pieces]))

    def _turn(self, finish_reason: FinishReason) -> Turn:
        """Return the turn sampled so far."""
        proposal = self.proposal
        parent_id = None
        if proposal.parent is not None:
            parent_id = proposal.parent.turn.id
        return Turn(
            id=proposal.request.rid,
            session_id=proposal.request.routing_key,
            parent_id=parent_id,
            context_ids_T=np.asarray(proposal.context_ids, np.int32),
            sampled_ids_T=np.concatenate(
                [_EMPTY.ids_T, *(piece.ids_T for piece in self._pieces)]
            ),
            logprobs_T=np.concatenate(
                [_EMPTY.logprobs_T, *(piece.logprobs_T for piece in self._pieces)]
            ),
            spans=self._sampling.segments.spans,
            finish_reason=finish_reason,
            request_digest=proposal.digest,
            delivered=False,
            temperature=proposal.request.sampling.temperature,
            prompt_tokens=len(proposal.request.input_ids_T),
            cached_tokens=self.cached_tokens,
            fork_reason=proposal.fork_reason,
            constrained=proposal.constrained,
            grammar=proposal.grammar,
            started_at=self.started_at,
            finished_at=self.started_at + time.monotonic() - self._began,
        )


_EMPTY = Piece(
    delta=Delta(),
    ids_T=np.empty(0, np.int32),
    logprobs_T=np.empty(0, np.float32),
    top=NO_TOP,
)


def _forget_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error and of its causes, so that keeping it keeps no
    frame."""
    remaining: list[BaseException | None] = [error]
    seen: set[int] = set()
    while remaining:
        current = remaining.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        remaining += [current.__cause__, current.__context__]


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _join(pieces: Sequence[Piece]) -> Piece:
    top = NO_TOP
    if pieces[0].top.size > 0:
        top = np.concatenate([piece.top for piece in pieces])
    return Piece(
        delta=join_deltas([piece.delta for piece in pieces]),
        ids_T=np.concatenate([piece.ids_T for piece in pieces]),
        logprobs_T=np.concatenate([piece.logprobs_T for piece in pieces]),
        top=top,
    )
