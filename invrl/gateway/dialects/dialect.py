"""What a dialect is: one API's wire format, in both directions. Pure.

`agent_api.py` serves any of them: it parses the request, samples, and writes what the dialect says."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.types import Answer, AnswerStart, Node, Piece, TurnRequest

FindTurn = Callable[[str], Node | None]
"""A whole turn of the session that asks, by its id; None if it has no such turn."""


def no_turn(_: str) -> None:
    """The `FindTurn` of a session without turns."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request: what to sample, and how many times. Dialects add how they show it."""

    turn: TurnRequest
    n: int = 1


Request = TypeVar("Request", bound=Asked)


class AnswerStream(Protocol):
    """One streamed answer: the bytes of its beginning, of each piece, of its end. Keep-alives may come before
    the beginning, which is told with the first token."""

    keep_alive: bytes
    """Sent while no token comes; clients skip it."""

    def head(self, cached_tokens: int) -> bytes:
        """`cached_tokens`: of the prompt, those that the engine had in its cache."""
        ...

    def piece(self, choice: int, piece: Piece) -> bytes:
        """Nothing while the piece's text is held back (half a character, perhaps a stop string)."""
        ...

    def tail(self, answers: Sequence[Answer]) -> bytes: ...

    def error(self, error: SessionError) -> bytes:
        """An error once the stream has begun; clients raise it when they see it."""
        ...


class Dialect(Protocol[Request]):
    """The wire format of one sampling route for one served model."""

    path: str
    """Below `/v1`."""

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> Request:
        """SessionError 400 (404 for another model) that names the field. `find`: for what the request names
        by an id instead of sending it."""
        ...

    def answer(self, request: Request, answers: Sequence[Answer]) -> bytes:
        """The body of a whole answer; `answers` has one of each choice."""
        ...

    def stream(self, request: Request, begun: Sequence[AnswerStart]) -> AnswerStream: ...

    def error(self, error: SessionError) -> bytes: ...


class CountingDialect(Dialect[Request], Protocol[Request]):
    """One that also tells how many tokens a request's prompt has, at `path`/count_tokens."""

    def parse_count(self, raw: bytes) -> TurnRequest: ...

    def counted(self, tokens: int) -> bytes: ...
