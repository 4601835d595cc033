"""The live side of an open session: its forest, the generations in flight, the turns so far.

Invariant: a request is answered with an earlier answer only if it is a retry of the request that it was
made for; who asks the same thing again on purpose gets a fresh sample. Held by `turns.py`."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from invrl.errors import SessionError
from invrl.gateway.forest import Change, Forest, Node
from invrl.gateway.generation import Generation
from invrl.gateway.message import MatchLevel
from invrl.gateway.sessions import SessionRecord
from invrl.types import Sampling, Turn


class Conversation:
    """Everything about a session that dies with it."""

    def __init__(self, record: SessionRecord, match_level: MatchLevel) -> None:
        self.record = record
        self.forest = Forest(match_level)
        self.turns: list[Turn] = []
        self.delivered: set[str] = set()
        self.asked: Counter[bytes] = Counter()
        """Generations begun so far, by the digest of their prompt."""
        self.recorded: dict[str, Node] = {}
        """Delivered and restored turns by the digest of the request that they answer."""
        self.changes: dict[str, Change] = {}
        """By turn: how its request departs from what was recorded."""
        self.begun = 0
        """Turns begun so far."""
        self.closing = self.frozen = record.frozen
        """What the session hands over is settled: no turn is added and none becomes delivered."""
        self.closed = asyncio.Lock()
        """Held while the session is being closed."""
        self._generations: dict[str, Generation] = {}
        """The latest generation for each request digest, until its answer has been delivered."""
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

    def retried(self, digest: str, retry: bool | None) -> Generation | None:
        """The generation that this request is a retry of. `retry` is what the client says: the official
        clients count their retries in a header; None: it says nothing. Then the same request again is
        taken for a retry in training and evaluation, and for a new question in serving."""
        earlier = self._generations.get(digest)
        if earlier is None or earlier.failed:
            return None
        undelivered = not earlier.running and not earlier.delivered
        return earlier if self._is_retry(retry) or undelivered else None

    def replayed(self, digest: str, retry: bool | None) -> Node | None:
        """As `retried`, of what is only a turn by now."""
        node = self.recorded.get(digest)
        if node is None or not (self._is_retry(retry) or node.turn.id not in self.delivered):
            return None
        return node

    def count_prompt(self, ids_T: NDArray[np.int32]) -> tuple[bytes, int]:
        """Counts a generation from these ids: their digest, and the how manieth it is."""
        prompt = hashlib.blake2b(ids_T.tobytes(), digest_size=16).digest()
        self.asked[prompt] += 1
        return prompt, self.asked[prompt]

    def start(self, digest: str, generation: Generation, *, replay: bool = False) -> None:
        """`replay`: it tells a recorded turn again, which stays recorded."""
        self._generations[digest] = generation
        if not replay:
            self.recorded.pop(digest, None)
        self._running = {other for other in self._running if other.running} | {generation}

    def keep_turn(self, generation: Generation, node: Node) -> None:
        """Of what was delivered its turn is kept: a retry is answered from that."""
        digest = generation.proposal.digest
        if self._generations.get(digest) is generation:
            del self._generations[digest]
            self.recorded[digest] = node
        self._running.discard(generation)

    def _is_retry(self, said: bool | None) -> bool:
        return self.record.session.purpose != "serve" if said is None else said

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
        self._generations.clear()
        self._running.clear()
