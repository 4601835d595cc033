"""The live side of an open session: its forest, the generations in flight, the turns so far.

Invariant: who asks the same thing again gets a sample of its own, which counts as a turn. There are two
exceptions. An answer that is whole but reached no client goes to whoever asks for it next. A request that
says that it is a retry (the official clients count theirs in a header) is given what it was given before.
Equal bytes alone are no retry: clients without such a header draw several samples of one prompt that way."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from invrl.errors import SessionError
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.forest import Forest
from invrl.gateway.turns.generation import Generation
from invrl.gateway.types import Change, MatchLevel, Node
from invrl.types import Sampling, Turn


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """What became of one request, however often it was sent."""

    pending: list[Generation] = field(default_factory=list)
    """Begun or told again, in this order; no client has the answer yet."""
    undelivered: list[Node] = field(default_factory=list)
    """Answers that were recorded but reached no client, and that nobody is being told now."""
    failed: int = 0
    """Generations that ended without an answer, and that nobody has begun anew since."""
    delivered: Generation | Node | None = None
    """The answer that a client got last. A generation where a turn does not hold all that was shown."""


class Conversation:
    """Everything about a session that dies with it."""

    def __init__(self, record: SessionRecord, match_level: MatchLevel) -> None:
        self.record = record
        self.forest = Forest(match_level)
        self.turns: list[Turn] = []
        self.delivered: set[str] = set()
        self.asked: Counter[bytes] = Counter()
        """Generations begun so far, by the digest of their prompt."""
        self.changes: dict[str, Change] = {}
        """By turn: how its request departs from what was recorded. Of turns that a worker before this one
        recorded, only once somebody asks."""
        self.restored = False
        """A worker before this one recorded turns, and nobody has asked yet how they departed."""
        self.begun = 0
        """Turns begun so far."""
        self.closing = self.frozen = record.frozen
        """What the session hands over is settled: no turn is added and none becomes delivered."""
        self.closed = asyncio.Lock()
        """Held while the session is being closed."""
        self.matching = asyncio.Lock()
        """Held while another thread matches a request with the forest."""
        self._requests: dict[str, _Request] = {}
        """By digest."""
        self._running: set[Generation] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_called(self) -> bool:
        """A client's request is under way."""
        return self._calls > 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A client's request, until its answer is delivered or given up. SessionError 429 past the limit."""
        most = self.record.session.limits.max_concurrent_calls
        if self._calls >= most:
            reason = f"the session may have {most} calls at a time"
            raise SessionError(reason, status=429, code="too_many_concurrent_calls", retry_after_s=1.0)
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def admit(self) -> Sampling:
        """The session's sampling within the tokens that are left, for one more turn. SessionError 403 once
        its turns or tokens are used up. Tokens count when a turn ends: calls at a time may pass the limit."""
        session = self.record.session
        limits, sampled = session.limits, sum(len(turn.sampled_ids_T) for turn in self.turns)
        if max(self.begun, len(self.turns)) >= limits.max_turns:
            reason = f"the session has made its {limits.max_turns} turns"
            raise SessionError(reason, status=403, code="max_turns_exceeded")
        if sampled >= limits.max_sampled_tokens:
            reason = f"the session has sampled {sampled} of {limits.max_sampled_tokens} tokens"
            raise SessionError(reason, status=403, code="max_tokens_exceeded")
        left = limits.max_sampled_tokens - sampled
        return replace(session.sampling, max_new_tokens=min(session.sampling.max_new_tokens, left))

    def earlier(self, digest: str, *, retry: bool) -> Generation | Node | None:
        """What answers this request without a new sample: a generation to join, or a recorded turn to tell
        again; None if there is no such thing. `retry`: the client says that it asks for the second time.

        Of several equal requests in flight, or of one that failed, a retry gets a sample of its own: it is
        unknown which of them it repeats, and an answer that somebody else has would be one sample twice."""
        request = self._requests.get(digest)
        if request is None:
            return None
        self._sort(request)
        for generation in request.pending:
            if generation.unclaimed:
                return generation
        if request.undelivered:
            return request.undelivered.pop(0)
        if not retry or request.failed:
            return None
        if request.pending:
            return request.pending[0] if len(request.pending) == 1 else None
        return request.delivered

    def _sort(self, request: _Request) -> None:
        """Brings a request up to date with what has become of its generations and turns since."""
        for generation in tuple(request.pending):
            turn_id = generation.proposal.request.rid
            node = self.forest.turn(turn_id)
            if generation.failed:
                request.pending.remove(generation)
                if node is None:
                    request.failed += 1
                else:
                    request.undelivered.append(node)
            elif generation.unclaimed and turn_id in self.delivered:  # somebody went on from it
                request.pending.remove(generation)
                request.delivered = generation
        request.undelivered = [node for node in request.undelivered if node.turn.id not in self.delivered]

    def count_prompt(self, ids_T: NDArray[np.int32]) -> tuple[bytes, int]:
        """Counts a generation from these ids: their digest, and the how manieth it is."""
        prompt = hashlib.blake2b(ids_T.tobytes(), digest_size=16).digest()
        self.asked[prompt] += 1
        return prompt, self.asked[prompt]

    def has_root(self, ids: Sequence[int]) -> bool:
        """Whether a turn so far began a conversation with exactly this prompt."""
        ids_T = np.asarray(ids, np.int32)
        begun = (turn.context_ids_T for turn in self.turns if turn.parent_id is None)
        return any(np.array_equal(context_ids_T, ids_T) for context_ids_T in begun)

    def start(self, digest: str, generation: Generation, *, replay: bool = False) -> None:
        """`replay`: it tells a recorded turn again, and samples nothing."""
        request = self._requests.setdefault(digest, _Request())
        request.pending.append(generation)
        if not replay:
            self.begun += 1
            request.failed = max(0, request.failed - 1)
        self._running = {other for other in self._running if other.running} | {generation}

    def keep_answer(self, generation: Generation, answer: Generation | Node) -> None:
        """The generation's answer was delivered; `answer` is what a retry is told from."""
        request = self._requests.setdefault(generation.proposal.digest, _Request())
        if generation in request.pending:
            request.pending.remove(generation)
        request.delivered = answer
        self._running.discard(generation)

    def restore_answer(self, node: Node) -> None:
        """A turn that was recorded by a worker before this one, in the order of the turns."""
        request = self._requests.setdefault(node.turn.request_digest, _Request())
        if node.turn.delivered:
            request.delivered = node
        else:
            request.undelivered.append(node)

    async def settle(self, deadline_s: float) -> None:
        """Ends what is being sampled and lets answers on their way out arrive."""
        self.closing = True
        running = [generation for generation in self._running if generation.running]
        for generation in running:
            generation.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for generation in running:
                    await generation.settled()
                await self._idle.wait()

    def freeze(self) -> None:
        """`turns` and `delivered` are a snapshot from here on."""
        self.frozen = True
        self._requests.clear()
        self._running.clear()
