"""The answer of a recorded turn, for a client that requests it again. Nothing is
sampled."""

import contextlib
from collections.abc import AsyncIterator, Iterator

from invrl.engines.client.generation import NO_TOP
from invrl.gateway.types import (
    Answer,
    CallDelta,
    Delta,
    Message,
    Node,
    Piece,
    ResponseStart,
)


class RecordedResponse:
    """Recorded counterpart of a `Generation`, with the methods that a client's request
    needs. The whole reply is one piece."""

    def __init__(self, node: Node) -> None:
        turn = node.turn
        piece = Piece(
            delta=_reply_delta(node.messages[-1]),
            ids_T=turn.sampled_ids_T,
            logprobs_T=turn.logprobs_T,
            top=NO_TOP,
        )
        self.turn_id = turn.id
        self.digest = turn.request_digest
        self.start = ResponseStart(
            turn_id=turn.id, created=turn.started_at, prompt_tokens=turn.prompt_tokens
        )
        self.cached_tokens = turn.cached_tokens
        self.delivered = False
        """Whether some client got the whole answer."""
        self._answer = Answer(
            turn=turn, message=node.messages[-1], pieces=(piece,), stop=node.stop
        )
        self._num_attached = 0

    @property
    def failed(self) -> bool:
        return False

    @property
    def unclaimed(self) -> bool:
        """Whether no client got the answer, and it is not being sent to one."""
        return not self.delivered and self._num_attached == 0

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Attach a client, which receives the answer inside this block."""
        self._num_attached += 1
        try:
            yield
        finally:
            self._num_attached -= 1

    async def pieces(self, silence_s: float) -> AsyncIterator[Piece | None]:
        for piece in self._answer.pieces:
            yield piece

    async def answer(self) -> Answer:
        return self._answer


def _reply_delta(reply: Message) -> Delta:
    """Return the reply as it was parsed when sampled. Parsed again, in other pieces,
    the same text might give another result."""
    calls = tuple(
        CallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
        for index, call in enumerate(reply.tool_calls)
    )
    return Delta(content=reply.content, reasoning=reply.reasoning, calls=calls)
