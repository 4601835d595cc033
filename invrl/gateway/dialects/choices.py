"""What chat completions and text completions share: an answer of `n` choices, whole and streamed."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.dialect import AnswerStream, ParsedRequest
from invrl.gateway.dialects.openai_dialect import OpenAIDialect
from invrl.gateway.types import Answer, AnswerStart, Delta, Message, Piece, TurnRequest
from invrl.types import Turn

_MAX_CHOICES = 16


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChoicesFields(wire.SamplingFields, kw_only=True):
    """The fields of both bodies."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=_MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None


class ChoicesRequest(ParsedRequest, frozen=True, kw_only=True):
    logprobs: bool
    include_usage: bool


class ChoicesDialect(OpenAIDialect, ABC):
    """A subclass says how one choice is written."""

    id_prefix: ClassVar[str]
    """What the ids of its answers begin with."""
    answer_object: ClassVar[str]
    """The value of `object` in a whole answer."""
    event_object: ClassVar[str]
    """The value of `object` in an event."""
    first_fields: ClassVar[Mapping[str, Any] | None] = None
    """The fields of the event before a choice's tokens; None if there is no such event."""
    last_fields: ClassVar[Mapping[str, Any]]
    """The fields of the event after a choice's tokens."""

    @abstractmethod
    def message_fields(self, message: Message) -> dict[str, Any]:
        """The fields of a choice in a whole answer."""

    @abstractmethod
    def delta_fields(self, delta: Delta) -> dict[str, Any]:
        """The fields of a choice in an event."""

    @abstractmethod
    def logprobs(self, request: ChoicesRequest, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        """The log-probs of the pieces. `offset` is the number of characters in the tokens before them."""

    def parsed(self, body: ChoicesFields, turn: TurnRequest, *, logprobs: bool) -> ChoicesRequest:
        """The request of a body whose turn has been parsed."""
        include_usage = False
        if body.stream_options is not None:
            if not body.stream:
                raise wire.bad("`stream_options` needs `stream`", param="stream_options")
            include_usage = body.stream_options.include_usage
        return ChoicesRequest(turn=turn, n=body.n or 1, logprobs=logprobs, include_usage=include_usage)

    def answer(self, request: ChoicesRequest, answers: Sequence[Answer]) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = None
            if request.logprobs:
                logprobs = self.logprobs(request, answer.pieces, 0)
            fields = self.message_fields(answer.message)
            choices.append(_choice(index, fields, logprobs, finish_reason(answer)))
        turns = [answer.turn for answer in answers]
        body = self.head(self.answer_object, turns[0].id, turns[0].started_at)
        return msgspec.json.encode({**body, "choices": choices, "usage": _usage(turns)})

    def stream(self, request: ChoicesRequest, starts: Sequence[AnswerStart]) -> AnswerStream:
        return _ChoicesStream(self, request, starts)

    def head(self, kind: str, turn_id: str, created: float) -> dict[str, Any]:
        """The fields that a whole answer and every event begin with."""
        return {
            "id": self.id_prefix + turn_id,
            "object": kind,
            "created": int(created),
            "model": self.model,
        }


class _ChoicesStream:
    keep_alive = wire.KEEP_ALIVE

    def __init__(
        self, dialect: ChoicesDialect, request: ChoicesRequest, starts: Sequence[AnswerStart]
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._head = dialect.head(dialect.event_object, starts[0].turn_id, starts[0].created)
        self._offsets = [0] * len(starts)
        """The number of characters in the tokens of each choice so far."""

    def head(self, cached_tokens: int) -> bytes:
        fields = self._dialect.first_fields
        if fields is None:
            return b""
        events = [self._event([_choice(index, fields)]) for index in range(len(self._offsets))]
        return b"".join(events)

    def piece(self, choice: int, piece: Piece) -> bytes:
        logprobs = None
        if self._request.logprobs and len(piece.ids_T):
            logprobs = self._dialect.logprobs(self._request, (piece,), self._offsets[choice])
            texts = [self._dialect.token_text(token_id) for token_id in piece.ids_T.tolist()]
            self._offsets[choice] += sum(len(text) for text in texts)
        if not piece.delta and logprobs is None:
            return b""
        return self._event([_choice(choice, self._dialect.delta_fields(piece.delta), logprobs)])

    def tail(self, answers: Sequence[Answer]) -> bytes:
        events = []
        for index, answer in enumerate(answers):
            choice = _choice(index, self._dialect.last_fields, None, finish_reason(answer))
            events.append(self._event([choice]))
        if self._request.include_usage:
            events.append(self._event([], _usage([answer.turn for answer in answers])))
        return b"".join(events) + b"data: [DONE]\n\n"

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"

    def _event(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        event = {**self._head, "choices": choices}
        if self._request.include_usage:
            event["usage"] = usage
        return wire.encode_event(event)


def finish_reason(answer: Answer) -> str:
    """OpenAI's name of the finish reason: a reply that ends with calls has stopped because of them."""
    reason = answer.turn.finish_reason
    if reason == "stop" and answer.message.tool_calls:
        return "tool_calls"
    return reason


def _choice(
    index: int,
    fields: Mapping[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish: str | None = None,
) -> dict[str, Any]:
    return {"index": index, **fields, "logprobs": logprobs, "finish_reason": finish}


def _usage(turns: Sequence[Turn]) -> dict[str, Any]:
    """The tokens of one prompt and of all its answers."""
    prompt_tokens = turns[0].prompt_tokens
    sampled_tokens = sum(len(turn.sampled_ids_T) for turn in turns)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": turns[0].cached_tokens},
    }
