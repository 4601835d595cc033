"""What `/v1/messages` answers: messages, whole and streamed, and errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.dialect import ParsedRequest
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import Answer, CallDelta, Piece, ResponseStart
from invrl.types.turns import Turn

_CLIENT_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_SERVER_ERRORS = {503: "overloaded_error", 504: "timeout_error"}
_NOT_STOPPED: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}


class MessagesRequest(ParsedRequest, frozen=True, kw_only=True):
    shows_thinking: bool
    omits_thinking_text: bool


def error_body(error: SessionError) -> bytes:
    """Return the body of an error. Clients compact their history when the message
    says "prompt is too long"."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = "prompt is too long: " + message
    if error.status < 500:
        kind = _CLIENT_ERRORS.get(error.status, "invalid_request_error")
    else:
        kind = _SERVER_ERRORS.get(error.status, "api_error")
    body = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": None,
    }
    return msgspec.json.encode(body)


def message_fields(
    model: str,
    turn_id: str,
    *,
    content: Sequence[Fields],
    usage: dict[str, int],
    stop: dict[str, str | None] = _NOT_STOPPED,
) -> Fields:
    """Return a message object. `stop` is the result of `stop_fields`, once the
    reply has ended."""
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **stop,
        "usage": usage,
    }


def blocks(request: MessagesRequest, answer: Answer) -> list[Fields]:
    reply = answer.message
    shown: list[Fields] = []
    if reply.reasoning and request.shows_thinking:
        thinking = reply.reasoning
        if request.omits_thinking_text:
            thinking = ""
        block = {
            "type": "thinking",
            "thinking": thinking,
            "signature": _signature(answer.turn.id),
        }
        shown.append(block)
    if reply.content:
        shown.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        block = {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": wire.arguments_object(call.arguments),
        }
        shown.append(block)
    return shown


class MessagesStream:
    """Writes one streamed answer: blocks one after the other, each with its start,
    deltas and stop."""

    keep_alive = wire.encode_event({"type": "ping"}, "ping")

    def __init__(
        self,
        model: str,
        request: MessagesRequest,
        start: ResponseStart,
    ) -> None:
        self._model = model
        self._request = request
        self._start = start
        self._open_block = ""
        """Type of the open block; "" if none is open."""
        self._index = -1
        self._blocks_of_calls: dict[int, int] = {}

    def head(self, cached_tokens: int) -> bytes:
        prompt_tokens = self._start.prompt_tokens
        counts = _usage_fields(prompt_tokens, cached_tokens, sampled_tokens=0)
        message = message_fields(
            self._model, self._start.turn_id, content=(), usage=counts
        )
        return _event("message_start", message=message) + self.keep_alive

    def piece(self, choice: int, piece: Piece) -> bytes:
        delta = piece.delta
        events: list[bytes] = []
        if delta.reasoning:
            events += self._thinking_events(delta.reasoning)
        if delta.content:
            events.append(self._ensure_block("text", text=""))
            events.append(self._delta("text_delta", text=delta.content))
        for call in delta.calls:
            events += self._call_events(call)
        return b"".join(events)

    def tail(self, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        message_delta = _event(
            "message_delta",
            delta=stop_fields(answer),
            usage=usage(answer.turn),
        )
        return self._stop_block() + message_delta + _event("message_stop")

    def error(self, error: SessionError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _thinking_events(self, text: str) -> list[bytes]:
        if not self._request.shows_thinking:
            return [self.keep_alive]
        start = self._ensure_block("thinking", thinking="", signature="")
        if self._request.omits_thinking_text:
            return [start]
        return [start, self._delta("thinking_delta", thinking=text)]

    def _call_events(self, call: CallDelta) -> list[bytes]:
        events = []
        if call.index not in self._blocks_of_calls:
            events.append(self._stop_block())
            start = self._ensure_block("tool_use", id=call.id, name=call.name, input={})
            events.append(start)
            self._blocks_of_calls[call.index] = self._index
        if call.arguments:
            # The arguments of an earlier call may come late: the index says which call
            # they are of.
            index = self._blocks_of_calls[call.index]
            delta = self._delta("input_json_delta", index, partial_json=call.arguments)
            events.append(delta)
        return events

    def _ensure_block(self, kind: str, **fields: Any) -> bytes:
        """Begin a block of this type, unless one is open."""
        if kind == self._open_block:
            return b""
        stop = self._stop_block()
        self._open_block = kind
        self._index += 1
        start = _event(
            "content_block_start",
            index=self._index,
            content_block={"type": kind, **fields},
        )
        return stop + start

    def _delta(self, kind: str, index: int | None = None, **fields: str) -> bytes:
        """Return a piece of the last block, or of block number `index`."""
        if index is None:
            index = self._index
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=index, delta=delta)

    def _stop_block(self) -> bytes:
        kind = self._open_block
        self._open_block = ""
        if not kind:
            return b""
        stop = _event("content_block_stop", index=self._index)
        if kind != "thinking":
            return stop
        signature = _signature(self._start.turn_id)
        return self._delta("signature_delta", signature=signature) + stop


def stop_fields(answer: Answer) -> dict[str, str | None]:
    """Return Anthropic's name of the finish reason, and the stop sequence that ended
    the reply."""
    if answer.turn.finish_reason == "length":
        reason = "max_tokens"
    elif answer.stop:
        reason = "stop_sequence"
    elif answer.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": answer.stop or None}


def usage(turn: Turn) -> dict[str, int]:
    sampled_tokens = len(turn.sampled_ids_T)
    return _usage_fields(turn.prompt_tokens, turn.cached_tokens, sampled_tokens)


def _usage_fields(
    prompt_tokens: int,
    cached_tokens: int,
    sampled_tokens: int,
) -> dict[str, int]:
    """Count tokens. Anthropic's `input_tokens` do not include those read from the
    cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": sampled_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return wire.encode_event({"type": kind, **fields}, kind)


def _signature(turn_id: str) -> str:
    """Return a signature of thinking, which clients require and send back. Nothing
    reads it."""
    return f"invrl-{turn_id}"
