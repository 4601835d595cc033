"""One turn being sampled, from the proposal to the commit.

A generation belongs to nobody: clients attach to it (the first one, and retries that join), and when
the last one has gone it is cancelled, upstream too. Invariants: the engine's prompt count must equal
the proposal's, or nothing is recorded; `answer()` returns only after the commit that holds the turn.
Started by `turns.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from invrl.errors import SessionError
from invrl.gateway.engine import Chunk, Engine, EngineError, Generate
from invrl.gateway.forest import Message, Node
from invrl.gateway.rendering import Renderer, TextStream
from invrl.types import FinishReason, Turn, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What will be sampled, and where in the forest it goes."""

    request: Generate
    parent: Node | None
    context_ids: Sequence[int]
    messages: tuple[Message, ...]
    """The messages that the context adds."""
    fork_reason: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one chunk of the engine adds to the answer."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A committed turn as a dialect shows it."""

    turn: Turn
    text: str
    pieces: tuple[Piece, ...]
    finish_reason: FinishReason


Commit = Callable[[Turn, Proposal, str], "asyncio.Future[None]"]
"""Records a turn with its reply's text; done when it is durable."""


class Generation:
    """Runs a proposal. `delivered`: some client got the whole answer."""

    def __init__(
        self, proposal: Proposal, *, engine: Engine, renderer: Renderer, commit: Commit, timeout_s: float
    ) -> None:
        self.proposal = proposal
        self.delivered = False
        self._engine = engine
        self._stream: TextStream = renderer.stream(proposal.request.sampling.stop)
        self._commit = commit
        self._timeout_s = timeout_s
        self._pieces: list[Piece] = []
        self._spans: tuple[VersionSpan, ...] = ()
        self._cached_tokens = 0
        self.started_at = time.time()
        self._attached = 0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._wake)

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def failed(self) -> bool:
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

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

    async def pieces(self) -> AsyncIterator[Piece]:
        """From the first one on, as they are sampled. Raises what `answer` raises."""
        at = 0
        while True:
            while at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            if self._task.done():
                await self.answer()
                return
            changed = self._changed
            await changed.wait()

    async def answer(self) -> Answer:
        """The turn, committed. SessionError or EngineError if there is none."""
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():
                raise SessionError(
                    "the session was closed meanwhile", status=401, code="session_closed"
                ) from None
            raise

    async def _run(self) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_s):
                finish = await self._sample()
        except TimeoutError:
            self._record("abort")
            raise EngineError(f"no whole answer within {self._timeout_s:.0f} s", retryable=False) from None
        except (asyncio.CancelledError, EngineError):
            self._record("abort")
            raise
        self._publish(replace(_EMPTY, text=self._stream.finish()))
        turn, durable = self._record(finish)
        if finish == "abort":
            raise EngineError("the engine aborted this generation", retryable=False)
        await asyncio.shield(durable)
        return Answer(turn=turn, text=self._stream.text, pieces=tuple(self._pieces), finish_reason=finish)

    async def _sample(self) -> FinishReason:
        for attempt in (1, 2):
            try:
                async with contextlib.aclosing(self._engine.generate(self.proposal.request)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        self._take(chunk)
                        if chunk.finish_reason is not None:
                            return chunk.finish_reason
                raise EngineError("the engine ended its answer without a reason", retryable=not self._pieces)
            except EngineError as error:
                if attempt == 2 or not error.retryable or self._pieces:
                    raise
        raise AssertionError("unreachable")

    def _take(self, chunk: Chunk) -> None:
        sent = len(self.proposal.request.input_ids)
        if chunk.prompt_tokens != sent:
            raise EngineError(
                f"the engine consumed {chunk.prompt_tokens} prompt tokens, {sent} were sent", retryable=False
            )
        self._spans = chunk.spans
        self._cached_tokens = chunk.cached_tokens
        if chunk.ids:
            text = self._stream.push(chunk.ids)
            self._publish(Piece(text=text, ids=chunk.ids, logprobs=chunk.logprobs))

    def _publish(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._wake()

    def _wake(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _record(self, finish: FinishReason) -> tuple[Turn, asyncio.Future[None]]:
        proposal = self.proposal
        ids = [token for piece in self._pieces for token in piece.ids]
        turn = Turn(
            id=proposal.request.rid,
            session_id=proposal.request.session_id,
            parent_id=proposal.parent.turn.id if proposal.parent else None,
            context_ids_T=np.asarray(proposal.context_ids, np.int32),
            sampled_ids_T=np.asarray(ids, np.int32),
            logprobs_T=np.asarray([x for piece in self._pieces for x in piece.logprobs], np.float32),
            spans=self._spans if ids else (),
            finish_reason=finish,
            request_digest=proposal.digest,
            delivered=False,
            temperature=proposal.request.sampling.temperature,
            prompt_tokens=len(proposal.request.input_ids),
            cached_tokens=self._cached_tokens,
            fork_reason=proposal.fork_reason,
            started_at=self.started_at,
            finished_at=time.time(),
        )
        return turn, self._commit(turn, proposal, self._stream.text)


_EMPTY = Piece(text="", ids=(), logprobs=())
