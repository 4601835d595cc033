"""The live side of an open session: its forest, the generations in flight, the turns so
far.

Invariant: a request that equals an earlier one gets a new sample, which counts as a
turn, with two exceptions. An answer that is complete but reached no client goes to the
next equal request. A request that is marked as a retry (the official clients count
their retries in a header) gets the earlier answer. Equal bytes alone do not make a
retry: clients without such a header draw several samples of one prompt in this way.
"""

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
from invrl.gateway.turns.generation import Generation
from invrl.gateway.turns.matching.forest import Forest
from invrl.gateway.turns.recorded_response import RecordedResponse
from invrl.gateway.types import Change, MatchLevel, Node
from invrl.types.sessions import Sampling
from invrl.types.turns import Segment, Turn

ResponseSource = Generation | RecordedResponse
"""Source of a client's answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class _RequestState:
    """Answers to one request, however often it was sent."""

    pending: list[ResponseSource] = field(default_factory=list)
    """Answers that no client has yet, in the order of their beginning."""
    undelivered: list[Node] = field(default_factory=list)
    """Recorded answers that reached no client and are not being sent to one."""
    failed: int = 0
    """Generations that ended without an answer and were not begun again since."""
    delivered: ResponseSource | Node | None = None
    """Answer that a client got last. Not a node if the turn lacks some of what was
    shown."""

    def unclaimed_response(self) -> ResponseSource | Node | None:
        """Return a complete answer that reached no client and is not being sent to one;
        None if there is none."""
        for source in self.pending:
            if source.unclaimed:
                return source
        if self.undelivered:
            return self.undelivered[0]
        return None

    def repeated_response(self) -> ResponseSource | Node | None:
        """Return the answer to a client that repeats the request. None if several equal
        requests are in flight, or one has failed: it is unknown which of them the
        client repeats, and if it got the answer of another client, one sample would
        count as two."""
        if self.failed or len(self.pending) > 1:
            return None
        if self.pending:
            return self.pending[0]
        return self.delivered


class Conversation:
    """State of a session that ends with it."""

    def __init__(self, record: SessionRecord, match_level: MatchLevel) -> None:
        self.record = record
        self.turns: list[Turn] = []
        self.delivered: set[str] = set()
        """Ids of the turns whose answer reached a client."""
        self.forest = Forest(match_level, self.delivered)
        self.changes: dict[str, Change] = {}
        """Departures of requests from the recording, by turn. For turns that an earlier
        worker recorded, they are found only when the session is shown
        (`turn_overview.py`)."""
        self.segments: dict[str, tuple[Segment, ...]] = {}
        """Engines of each moved turn."""
        self.restored = False
        """Whether an earlier worker recorded turns whose changes have not been found
        yet."""
        self.begun = 0
        self.closing = record.frozen
        self.frozen = record.frozen
        """Whether the session's outcome is settled: no turn is added, and none becomes
        delivered."""
        self.closed = asyncio.Lock()
        """Held while the session is being closed."""
        self.matching = asyncio.Lock()
        """Held while another thread matches a request with the forest."""
        self._requests: dict[str, _RequestState] = {}
        """Requests by digest."""
        self._prompts: Counter[bytes] = Counter()
        """Generations begun so far, by the digest of their prompt."""
        self._running: set[Generation] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_called(self) -> bool:
        """Whether a client's request is being answered."""
        return self._calls > 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Surround a client's request, until its answer is delivered or abandoned.
        Raises SessionError 429 if the session has too many concurrent requests."""
        limit = self.record.session.limits.max_concurrent_calls
        if self._calls >= limit:
            reason = f"the session may have {limit} calls at a time"
            raise SessionError(
                reason, status=429, code="too_many_concurrent_calls", retry_after_s=1.0
            )
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def admit(self) -> Sampling:
        """Return the session's sampling parameters for one more turn, within the
        remaining tokens. Raises SessionError 403 once its turns or tokens are used up.
        Tokens count when a turn ends, so concurrent turns can exceed the limit."""
        session = self.record.session
        limits = session.limits
        if max(self.begun, len(self.turns)) >= limits.max_turns:
            reason = f"the session has made its {limits.max_turns} turns"
            raise SessionError(reason, status=403, code="max_turns_exceeded")
        sampled = sum(len(turn.sampled_ids_T) for turn in self.turns)
        if sampled >= limits.max_sampled_tokens:
            reason = f"the session has sampled {sampled} of {limits.max_sampled_tokens} tokens"
            raise SessionError(reason, status=403, code="max_tokens_exceeded")
        left = limits.max_sampled_tokens - sampled
        return replace(
            session.sampling, max_new_tokens=min(session.sampling.max_new_tokens, left)
        )

    def existing_response(
        self, digest: str, *, retry: bool
    ) -> ResponseSource | Node | None:
        """Return the answer to this request without a new sample: an answer in flight
        that the client joins, or a recorded turn, which `repeat` sends again. None if
        the request must be sampled. `retry`: the client says that it repeats the
        request."""
        request = self._requests.get(digest)
        if request is None:
            return None
        self._update(request)
        unclaimed = request.unclaimed_response()
        if unclaimed is not None or not retry:
            return unclaimed
        return request.repeated_response()

    def _update(self, request: _RequestState) -> None:
        """Update the request from its generations and turns."""
        for source in tuple(request.pending):
            node = self.forest.turn(source.turn_id)
            if source.failed:
                request.pending.remove(source)
                if node is None:
                    request.failed += 1
                else:
                    request.undelivered.append(node)
            elif (
                source.unclaimed and source.turn_id in self.delivered
            ):  # a later request continued it
                request.pending.remove(source)
                request.delivered = source
        request.undelivered = [
            node for node in request.undelivered if node.turn.id not in self.delivered
        ]

    def count_prompt(self, ids_T: NDArray[np.int32]) -> tuple[bytes, int]:
        """Count a generation on this prompt. Returns the digest of the prompt, and the
        number of generations on it so far, including this one."""
        prompt = hashlib.blake2b(ids_T.tobytes(), digest_size=16).digest()
        self._prompts[prompt] += 1
        return prompt, self._prompts[prompt]

    def has_root(self, ids: Sequence[int]) -> bool:
        """Whether a turn so far began a conversation with exactly this prompt."""
        ids_T = np.asarray(ids, np.int32)
        return any(
            turn.parent_id is None and np.array_equal(turn.context_ids_T, ids_T)
            for turn in self.turns
        )

    def discard(self, turn: Turn) -> None:
        """Removes a turn that could not be stored."""
        if not self.frozen:
            self.turns = [other for other in self.turns if other is not turn]

    def start(self, generation: Generation) -> None:
        """Add a generation that was begun for a request."""
        request = self._requests.setdefault(generation.digest, _RequestState())
        request.pending.append(generation)
        request.failed = max(0, request.failed - 1)
        self.begun += 1
        self._running = {other for other in self._running if other.running}
        self._running.add(generation)

    def repeat(self, answer: RecordedResponse) -> None:
        """Add a recorded answer that is being sent again."""
        request = self._requests.setdefault(answer.digest, _RequestState())
        request.undelivered = [
            node for node in request.undelivered if node.turn.id != answer.turn_id
        ]
        request.pending.append(answer)

    def keep_response(
        self, source: ResponseSource, answer: ResponseSource | Node
    ) -> None:
        """Keep a delivered answer. A retry will get it from `answer`."""
        request = self._requests.setdefault(source.digest, _RequestState())
        if source in request.pending:
            request.pending.remove(source)
        request.delivered = answer
        if isinstance(source, Generation):
            self._running.discard(source)

    def restore_response(self, node: Node) -> None:
        """Add the answer of a turn that an earlier worker recorded. Call it in the
        order of the turns."""
        request = self._requests.setdefault(node.turn.request_digest, _RequestState())
        if node.turn.delivered:
            request.delivered = node
        else:
            request.undelivered.append(node)

    async def settle(self, deadline_s: float) -> None:
        """Cancel ongoing sampling, and wait up to `deadline_s` for answers that are on
        their way."""
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
        """Freeze `turns` and `delivered`."""
        self.frozen = True
        self._requests.clear()
        self._running.clear()
