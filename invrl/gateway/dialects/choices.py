"""Common parts of chat completions and text completions: an answer of `n` choices,
whole and streamed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.dialect import ParsedRequest, ResponseParts
from invrl.gateway.dialects.openai_dialect import OpenAIDialect
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import (
    Answer,
    CallDelta,
    Delta,
    Message,
    Piece,
    ResponseStart,
    ToolCall,
    TurnRequest,
)
from invrl.types.turns import Turn

_MAX_CHOICES = 16
_Number = Annotated[int, msgspec.Meta(ge=1, le=_MAX_CHOICES)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChoicesFields(wire.SamplingFields, kw_only=True):
    """Fields of both bodies."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: _Number | None = None
    stop: str | list[str] | None = None


class ChoicesRequest(ParsedRequest, frozen=True, kw_only=True):
    logprobs: bool
    include_usage: bool
    custom: frozenset[str] = frozenset()
    """Names of the tools that take a text instead of JSON."""


class ChoicesDialect(OpenAIDialect, ABC):
    """Dialect with choices. A subclass writes one choice."""

    id_prefix: ClassVar[str]
    """Prefix of its answers' ids."""
    answer_object: ClassVar[str]
    event_object: ClassVar[str]
    first_fields: ClassVar[Mapping[str, Any] | None] = None
    """Fields of the event before a choice's tokens; None if there is no such event."""
    last_fields: ClassVar[Mapping[str, Any]]
    """Fields of the event after a choice's tokens."""

    @abstractmethod
    def message_fields(self, request: ChoicesRequest, message: Message) -> Fields:
        """Return the fields of a choice in a whole answer."""

    @abstractmethod
    def delta_fields(self, request: ChoicesRequest, delta: Delta) -> Fields:
        """Return the fields of a choice in an event. For a custom tool's call, it is
        the first one."""

    def input_fields(self, index: int, call: ToolCall) -> Fields:
        """Return the fields of a choice in the event with the whole input of a custom
        tool's call, in dialects that have such tools."""
        raise NotImplementedError

    @abstractmethod
    def logprobs(
        self,
        request: ChoicesRequest,
        pieces: Sequence[Piece],
        offset: int,
    ) -> Fields:
        """Return the log-probs of the pieces. `offset` is the number of characters in
        the tokens before them."""

    def make_request(
        self,
        body: ChoicesFields,
        turn: TurnRequest,
        *,
        logprobs: bool,
        custom: Iterable[str] = (),
    ) -> ChoicesRequest:
        """Return the request of a body whose turn has been parsed."""
        include_usage = False
        if body.stream_options is not None:
            if not body.stream:
                raise wire.bad_request(
                    "`stream_options` needs `stream`", param="stream_options"
                )
            include_usage = body.stream_options.include_usage
        return ChoicesRequest(
            turn=turn,
            n=body.n or 1,
            logprobs=logprobs,
            include_usage=include_usage,
            custom=frozenset(custom),
        )

    def answer(self, request: ChoicesRequest, answers: Sequence[Answer]) -> bytes:
        choices = []
        for index, answer in enumerate(answers):
            fields = self.message_fields(request, answer.message)
            logprobs = None
            if request.logprobs:
                logprobs = self.logprobs(request, answer.pieces, offset=0)
            choice = _choice(index, fields, logprobs, _finish_reason(answer))
            choices.append(choice)
        turns = [answer.turn for answer in answers]
        first_turn = turns[0]
        body = self.common_fields(
            self.answer_object, first_turn.id, first_turn.started_at
        )
        body["choices"] = choices
        body["usage"] = _usage(turns)
        return msgspec.json.encode(body)

    def stream(
        self, request: ChoicesRequest, starts: Sequence[ResponseStart]
    ) -> ResponseParts:
        return _ChoicesStream(self, request, starts)

    def common_fields(self, kind: str, turn_id: str, created: float) -> Fields:
        """Return the first fields of a whole answer and of every event."""
        return {
            "id": self.id_prefix + turn_id,
            "object": kind,
            "created": int(created),
            "model": self.model,
        }


class _ChoicesStream:
    keep_alive = wire.KEEP_ALIVE

    def __init__(
        self,
        dialect: ChoicesDialect,
        request: ChoicesRequest,
        starts: Sequence[ResponseStart],
    ) -> None:
        self._dialect = dialect
        self._request = request
        first = starts[0]
        self._common_fields = dialect.common_fields(
            dialect.event_object, first.turn_id, first.created
        )
        self._offsets = [0] * len(starts)
        """Number of characters in the tokens of each choice so far."""
        self._custom_calls: list[set[int]] = [set() for _ in starts]
        """Calls of custom tools in each choice so far."""

    def head(self, cached_tokens: int) -> bytes:
        fields = self._dialect.first_fields
        if fields is None:
            return b""
        events = []
        for index in range(len(self._offsets)):
            choice = _choice(index, fields)
            events.append(self._event([choice]))
        return b"".join(events)

    def piece(self, choice: int, piece: Piece) -> bytes:
        logprobs = None
        if self._request.logprobs and len(piece.ids_T):
            logprobs = self._logprobs(choice, piece)
        delta = self._without_inputs(choice, piece.delta)
        if not delta and logprobs is None:
            return b""
        fields = self._dialect.delta_fields(self._request, delta)
        return self._event([_choice(choice, fields, logprobs)])

    def tail(self, answers: Sequence[Answer]) -> bytes:
        events = []
        for index, answer in enumerate(answers):
            for place in sorted(self._custom_calls[index]):
                call = answer.message.tool_calls[place]
                fields = self._dialect.input_fields(place, call)
                events.append(self._event([_choice(index, fields)]))
            fields = self._dialect.last_fields
            choice = _choice(index, fields, finish_reason=_finish_reason(answer))
            events.append(self._event([choice]))
        if self._request.include_usage:
            turns = [answer.turn for answer in answers]
            events.append(self._event([], _usage(turns)))
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"

    def _without_inputs(self, choice: int, delta: Delta) -> Delta:
        """Return the delta without the arguments of custom tools' calls: their input is
        known only when they are whole."""
        if not self._request.custom:
            return delta
        custom_calls = self._custom_calls[choice]
        calls: list[CallDelta] = []
        for call in delta.calls:
            if call.name in self._request.custom:
                custom_calls.add(call.index)
            if call.index not in custom_calls:
                calls.append(call)
            elif call.name:
                calls.append(msgspec.structs.replace(call, arguments=""))
        return msgspec.structs.replace(delta, calls=tuple(calls))

    def _logprobs(self, choice: int, piece: Piece) -> Fields:
        offset = self._offsets[choice]
        for token_id in piece.ids_T.tolist():
            text = self._dialect.token_text(token_id)
            self._offsets[choice] += len(text)
        return self._dialect.logprobs(self._request, (piece,), offset)

    def _event(self, choices: Sequence[Fields], usage: Fields | None = None) -> bytes:
        event = {**self._common_fields, "choices": choices}
        if self._request.include_usage:
            event["usage"] = usage
        return wire.encode_event(event)


def _finish_reason(answer: Answer) -> str:
    """Return OpenAI's name of the finish reason: a reply that ends with calls has
    stopped because of them."""
    reason = answer.turn.finish_reason
    if reason == "stop" and answer.message.tool_calls:
        return "tool_calls"
    return reason


def _choice(
    index: int,
    fields: Mapping[str, Any],
    logprobs: Fields | None = None,
    finish_reason: str | None = None,
) -> Fields:
    return {
        "index": index,
        **fields,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def _usage(turns: Sequence[Turn]) -> Fields:
    """Count the tokens of one prompt and of all its answers."""
    prompt_tokens = turns[0].prompt_tokens
    sampled_tokens = sum(len(turn.sampled_ids_T) for turn in turns)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": turns[0].cached_tokens},
    }
