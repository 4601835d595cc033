"""The answer of a recorded turn, for a client that requests it again. Nothing is
sampled."""

import contextlib
from collections.abc import AsyncIterator, Iterator

from invrl.gateway.types import Answer, Node, Piece, ResponseStart


class RecordedResponse:
    """Recorded counterpart of a `Generation`, with the methods that a client's request
    needs. The whole reply is one piece."""

    def __init__(self, node: Node) -> None:
        turn = node.turn
        self.turn_id = turn.id
        self.digest = turn.request_digest
        self.start = ResponseStart(
            turn_id=turn.id, created=turn.started_at, prompt_tokens=turn.prompt_tokens
        )
        self.cached_tokens = turn.cached_tokens
        self.delivered = False
        """Whether some client got the whole answer."""
        self._answer = Answer.recorded(node)
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
