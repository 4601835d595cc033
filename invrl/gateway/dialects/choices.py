"""What chat and text completions share: an answer of `n` choices, whole and streamed. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.dialect import AnswerStream, Asked
from invrl.gateway.types import Answer, AnswerStart, Delta, Message, Piece, TurnRequest
from invrl.types import Turn

_MOST_CHOICES = 16


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChoicesFields(wire.SamplingFields, kw_only=True):
    """What the bodies of both hold."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None


class ChoicesRequest(Asked, frozen=True, kw_only=True):
    logprobs: bool
    include_usage: bool


class ChoicesDialect(wire.OpenAIDialect, ABC):
    """A dialect says how one choice looks. `ids`: what its answers' ids begin with. `objects`: what it calls
    a whole answer, and an event. `first`, `last`: what a stream says before and after a choice's tokens."""

    ids: ClassVar[str]
    objects: ClassVar[tuple[str, str]]
    first: ClassVar[Mapping[str, Any] | None] = None
    last: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def whole(self, message: Message) -> dict[str, Any]: ...

    @abstractmethod
    def added(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def logprobs(self, request: ChoicesRequest, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        """`offset`: characters of the reply's tokens before those of `pieces`."""

    def asked(self, body: ChoicesFields, turn: TurnRequest, *, logprobs: bool) -> ChoicesRequest:
        if body.stream_options is not None and not body.stream:
            raise wire.bad("`stream_options` needs `stream`", param="stream_options")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return ChoicesRequest(turn=turn, n=body.n or 1, logprobs=logprobs, include_usage=usage)

    def answer(self, request: ChoicesRequest, answers: Sequence[Answer]) -> bytes:
        turns, choices = [answer.turn for answer in answers], []
        for n, each in enumerate(answers):
            logprobs = self.logprobs(request, each.pieces, 0) if request.logprobs else None
            choices.append(_choice(n, self.whole(each.message), logprobs, finish_reason(each)))
        head = self.head(self.objects[0], turns[0].id, turns[0].started_at)
        return msgspec.json.encode({**head, "choices": choices, "usage": _usage(turns)})

    def stream(self, request: ChoicesRequest, begun: Sequence[AnswerStart]) -> AnswerStream:
        return _ChoicesStream(self, request, begun)

    def head(self, kind: str, turn_id: str, created: float) -> dict[str, Any]:
        return {"id": self.ids + turn_id, "object": kind, "created": int(created), "model": self.model}


class _ChoicesStream:
    keep_alive = wire.KEEP_ALIVE

    def __init__(
        self, dialect: ChoicesDialect, request: ChoicesRequest, begun: Sequence[AnswerStart]
    ) -> None:
        self._dialect, self._request = dialect, request
        self._head = dialect.head(dialect.objects[1], begun[0].turn_id, begun[0].created)
        self._offsets = [0] * len(begun)

    def head(self, cached_tokens: int) -> bytes:
        first, choices = self._dialect.first, range(len(self._offsets))
        return b"".join(self._event([_choice(n, first)]) for n in choices) if first else b""

    def piece(self, choice: int, piece: Piece) -> bytes:
        logprobs = None
        if self._request.logprobs and len(piece.ids_T):
            logprobs = self._dialect.logprobs(self._request, (piece,), self._offsets[choice])
            self._offsets[choice] += sum(len(self._dialect.token_text(each)) for each in piece.ids_T.tolist())
        if not piece.delta and logprobs is None:
            return b""
        return self._event([_choice(choice, self._dialect.added(piece.delta), logprobs)])

    def tail(self, answers: Sequence[Answer]) -> bytes:
        last, turns = self._dialect.last, [answer.turn for answer in answers]
        ends = [self._event([_choice(n, last, None, finish_reason(each))]) for n, each in enumerate(answers)]
        if self._request.include_usage:
            ends.append(self._event([], _usage(turns)))
        return b"".join(ends) + b"data: [DONE]\n\n"

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"

    def _event(self, choices: Sequence[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        shown = {"usage": used} if self._request.include_usage else {}
        return wire.sent({**self._head, "choices": choices, **shown})


def finish_reason(answer: Answer) -> str:
    """As OpenAI names it: a reply that ended with calls ended because of them."""
    called = answer.message.tool_calls and answer.turn.finish_reason == "stop"
    return "tool_calls" if called else answer.turn.finish_reason


def _choice(
    index: int, told: Mapping[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, **told, "logprobs": logprobs, "finish_reason": finish}


def _usage(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of one prompt and all its answers."""
    prompt, sampled = turns[0].prompt_tokens, sum(len(turn.sampled_ids_T) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": turns[0].cached_tokens},
    }
