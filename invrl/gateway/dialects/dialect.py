"""The interface of a dialect: the wire format of one API, in both directions. Pure.

The gateway serves every dialect in the same way: it parses the request, samples, and
writes the dialect's answer.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.types import Answer, Node, Piece, ResponseStart, TurnRequest

FindTurn = Callable[[str], Node | None]
"""Returns a whole turn of the session by its id; None if the session has no such
turn."""


def no_turn(_: str) -> None:
    """Find no turn: the `FindTurn` of a session without turns."""


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request: what to sample, and how many times. Dialects add the form of the
    answer."""

    turn: TurnRequest
    n: int = 1


Request = TypeVar("Request", bound=ParsedRequest)


class ResponseParts(Protocol):
    """Writes one streamed answer: its beginning, each of its pieces, its end. The
    beginning is written with the first token; keep-alives may come before it."""

    keep_alive: bytes
    """Sent while no token comes. Clients skip it."""

    def head(self, cached_tokens: int) -> bytes:
        """Return the beginning. `cached_tokens` is the number of prompt tokens that the
        engine had cached."""
        ...

    def piece(self, choice: int, piece: Piece) -> bytes:
        """Return a piece; empty while its text is held back (half a character, or
        perhaps a stop string)."""
        ...

    def tail(self, answers: Sequence[Answer]) -> bytes: ...

    def error(self, error: SessionError) -> bytes:
        """Return an error after the stream has begun. Clients raise it when they read
        it."""
        ...


class Dialect(Protocol[Request]):
    """The wire format of one sampling route, for one served model."""

    path: str
    """Route below `/v1`."""
    model: str
    """Name of the model in answers."""

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> Request:
        """Parse the request in a body. Raises SessionError 400, which names the invalid
        field. `find` resolves ids in the request."""
        ...

    def answer(self, request: Request, answers: Sequence[Answer]) -> bytes:
        """Return the body of a whole answer. `answers` has one answer for each of
        `n`."""
        ...

    def stream(
        self, request: Request, starts: Sequence[ResponseStart]
    ) -> ResponseParts:
        """Return the writer of a streamed answer. `starts` has one start for each of
        `n`."""
        ...

    def error(self, error: SessionError) -> bytes:
        """Return the body of an error."""
        ...


class CountingDialect(Dialect[Request], Protocol[Request]):
    """A dialect that also counts the tokens of a request's prompt, at
    `path`/count_tokens."""

    def parse_count(self, raw: bytes) -> TurnRequest: ...

    def counted(self, tokens: int) -> bytes: ...
