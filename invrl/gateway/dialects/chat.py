"""`/v1/chat/completions`: only the wire, in both directions. Pure.

Every field of the API stands in exactly one of these lists:
- honoured: `messages` (text, also in parts), `model` (must be ours), `stream`,
  `stream_options.include_usage`, `max_tokens`, `max_completion_tokens` (bounded by the session's
  max_new_tokens), `stop`, `logprobs`, `n` = 1.
- the run's: `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`,
  `repetition_penalty`, `logit_bias`, `seed`: honoured in serving sessions; overridden in training and
  evaluation, which is reported once per session (header `x-invrl-overridden`). `logit_bias` is
  refused in serving, because the router would drop it.
- ignored, for they change no token: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`,
  `prompt_cache_key`, `prompt_cache_retention`, `stream_options.include_obfuscation`; in messages
  `name`, `refusal`, `annotations`.
- refused with 400 until they are supported: see `_REFUSED`; in messages tool calls, audio, images.
Any other field is refused as unknown."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from invrl.errors import SessionError
from invrl.gateway.forest import Message
from invrl.gateway.generation import Answer, Piece
from invrl.gateway.sampling import ClientSampling
from invrl.gateway.turns import TurnRequest
from invrl.types import Turn

_REFUSED = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "top_logprobs": (None, 0),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields not supported yet, with the values that ask for nothing."""
_REFUSED_IN_MESSAGES = ("tool_calls", "tool_call_id", "function_call", "audio", "reasoning_content")
_CACHE = ("prompt_cache_key", "prompt_cache_retention")
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", *_CACHE)
_IGNORED_IN_MESSAGES = ("refusal", "annotations")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


def _unread(name: str, *fields: str) -> type[msgspec.Struct]:
    """Optional fields of any shape: taken, so that they are not refused as unknown."""
    return msgspec.defstruct(name, [(field, Any, None) for field in fields], kw_only=True)


_UnreadOfMessage = _unread("_UnreadOfMessage", *_REFUSED_IN_MESSAGES, *_IGNORED_IN_MESSAGES)
_UnreadOfBody = _unread("_UnreadOfBody", *_REFUSED, *_IGNORED)


class _Message(_UnreadOfMessage, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Body(_UnreadOfBody, forbid_unknown_fields=True):
    messages: list[_Message]
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    n: int | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Unit | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    sampling_seed: _Seed | None = msgspec.field(default=None, name="seed")


class ChatRequest(msgspec.Struct, frozen=True):
    """A parsed request: what to sample, and how this dialect shows it."""

    turn: TurnRequest
    logprobs: bool
    include_usage: bool


class ChatDialect:
    """The wire format of chat completions for one served model."""

    path = "/chat/completions"

    def __init__(self, *, model: str, vocab_size: int, token_text: Callable[[int], str]) -> None:
        self._model, self._vocab_size, self._token_text = model, vocab_size, token_text
        self._decoder = msgspec.json.Decoder(_Body)

    def parse(self, raw: bytes, *, retry: bool | None) -> ChatRequest:
        """SessionError 400 (404 for another model) that names the field."""
        try:
            body = self._decoder.decode(raw)
        except RecursionError:
            raise _bad("the request's JSON is nested too deeply") from None
        except UnicodeDecodeError:
            raise _bad("the request's JSON is not UTF-8") from None
        except msgspec.DecodeError as error:
            message = str(error)
            param = message.partition("`$.")[2].rstrip("`") or None
            raise _bad(message, param=param) from None
        self._check(body)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        if len(stop) > 16 or "" in stop:
            raise _bad("stop takes up to 16 strings, none of them empty", param="stop")
        asked = msgspec.convert(body, ClientSampling, from_attributes=True)  # the fields of both
        turn = TurnRequest(
            messages=tuple(_message(message, at) for at, message in enumerate(body.messages)),
            sampling=replace(asked, max_new_tokens=limit),
            stop=stop,
            stream=bool(body.stream),
            digest=hashlib.blake2b(b"chat" + raw, digest_size=16).hexdigest(),
            retry=retry,
        )
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return ChatRequest(turn=turn, logprobs=bool(body.logprobs), include_usage=usage)

    def answer(self, request: ChatRequest, answer: Answer) -> bytes:
        """The body of a whole answer."""
        turn = answer.turn
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.pieces) if request.logprobs else None,
            "finish_reason": turn.finish_reason,
        }
        head = self._head("chat.completion", turn.id, turn.started_at)
        return msgspec.json.encode({**head, "choices": [choice], "usage": _usage(turn)})

    def stream_head(self, request: ChatRequest, turn_id: str, created: float) -> bytes:
        return self._event(request, turn_id, created, {"role": "assistant", "content": "", "refusal": None})

    def stream_piece(self, request: ChatRequest, turn_id: str, created: float, piece: Piece) -> bytes:
        """Nothing while the piece's text is held back (half a character, perhaps a stop string)."""
        if not piece.text and not (request.logprobs and len(piece.ids_T)):
            return b""
        logprobs = self._logprobs((piece,)) if request.logprobs else None
        return self._event(request, turn_id, created, {"content": piece.text}, logprobs=logprobs)

    def stream_tail(self, request: ChatRequest, answer: Answer) -> bytes:
        turn = answer.turn
        tail = self._event(request, turn.id, turn.started_at, {}, finish=turn.finish_reason)
        if request.include_usage:
            head = self._head("chat.completion.chunk", turn.id, turn.started_at)
            tail += _sent({**head, "choices": [], "usage": _usage(turn)})
        return tail + b"data: [DONE]\n\n"

    def stream_error(self, error: SessionError) -> bytes:
        """An error once the stream has begun; clients raise it when they see it."""
        return b"data: " + self.error(error) + b"\n\n"

    def error(self, error: SessionError) -> bytes:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            error.status, "invalid_request_error" if error.status < 500 else "server_error"
        )
        detail = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return msgspec.json.encode({"error": detail})

    def models(self) -> bytes:
        """The answer of `/v1/models`."""
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "invrl"}
        return msgspec.json.encode({"object": "list", "data": [card]})

    def _check(self, body: _Body) -> None:
        if body.model != self._model:
            reason = f"The model `{body.model}` does not exist; this server has `{self._model}`."
            raise SessionError(reason, status=404, code="model_not_found", param="model")
        for name, neutral in _REFUSED.items():
            if getattr(body, name) not in neutral:
                raise _bad(f"`{name}` is not supported yet", param=name, code="unsupported_parameter")
        if body.n not in (None, 1):
            raise _bad("`n` must be 1: more is not supported yet", param="n", code="unsupported_value")
        if not body.messages:
            raise _bad("`messages` must not be empty", param="messages")
        if body.stream_options is not None and not body.stream:
            raise _bad("`stream_options` needs `stream`", param="stream_options")
        if body.top_k == 0:
            raise _bad("`top_k` must be -1 (off) or at least 1", param="top_k")
        for token in body.logit_bias or ():
            if not token.isdecimal() or int(token) >= self._vocab_size:
                raise _bad(f"`logit_bias` names no token: {token!r}", param="logit_bias")

    def _head(self, kind: str, turn_id: str, created: float) -> dict[str, Any]:
        return {"id": f"chatcmpl-{turn_id}", "object": kind, "created": int(created), "model": self._model}

    def _event(
        self,
        request: ChatRequest,
        turn_id: str,
        created: float,
        delta: dict[str, str | None],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if request.include_usage else {}
        return _sent({**self._head("chat.completion.chunk", turn_id, created), "choices": [choice], **usage})

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "content": [
                {
                    "token": (text := self._token_text(token_id)),
                    "logprob": logprob if math.isfinite(logprob) else -9999.0,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
                for piece in pieces
                for token_id, logprob in zip(piece.ids_T.tolist(), piece.logprobs_T.tolist(), strict=True)
            ],
            "refusal": None,
        }


def _message(message: _Message, at: int) -> Message:
    param = f"messages[{at}]"
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise _bad(f"{param}.role: {message.role!r} is not one of {known}", param=f"{param}.role")
    for name in _REFUSED_IN_MESSAGES:
        if getattr(message, name) not in (None, [], ""):
            raise _bad(f"{param}.{name} is not supported yet", param=param, code="unsupported_parameter")
    content = message.content
    if content is None and role != "assistant":
        raise _bad(f"{param}.content must be text", param=f"{param}.content")
    if isinstance(content, str):
        return Message(role, content)
    texts = []
    for part in content or ():
        if part.type not in ("text", "input_text") or part.text is None:
            reason = f"{param}.content: {part.type!r} is refused, this model takes text only"
            raise _bad(reason, param=f"{param}.content", code="unsupported_content")
        texts.append(part.text)
    return Message(role, "".join(texts))


def _usage(turn: Turn) -> dict[str, Any]:
    sampled = len(turn.sampled_ids_T)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _sent(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _bad(message: str, *, param: str | None = None, code: str = "invalid_request") -> SessionError:
    return SessionError(message, status=400, code=code, param=param)
