"""`/v1/chat/completions`: only the wire, in both directions. Pure.

Every field of the API stands in exactly one of these lists:
- honoured: `messages` (text, also in parts; tool calls and results; `reasoning_content`), `model` (must
  be ours), `stream`, `stream_options.include_usage`, `max_tokens`, `max_completion_tokens` (bounded by the
  session's max_new_tokens), `stop`, `logprobs`, `top_logprobs` (to 20), `n` (to 16), `tools` (functions),
  `tool_choice`, `parallel_tool_calls` (false: calls after the first are not shown), `response_format`,
  `reasoning_effort` (none: no thinking; others: thinking), `chat_template_kwargs.enable_thinking`.
- the run's: `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`,
  `repetition_penalty`, `logit_bias`, `seed`: honoured in serving sessions; overridden in training and
  evaluation, which is reported once per session (header `x-invrl-overridden`). `logit_bias` is
  refused in serving, because the router would drop it.
- ignored, for they change no token: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`,
  `prompt_cache_key`, `prompt_cache_retention`, `verbosity`, `stream_options.include_obfuscation`; in
  messages `name`, `refusal`, `annotations`, `provider_specific_fields` (litellm's); in tools `strict`
  where the model chooses freely.
- refused with 400: see `_REFUSED`; in messages audio, images, files.
Any other field is refused as unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects.dialect import AnswerStream, Asked, Begun
from invrl.gateway.dialects.wire import (
    MOST_CHOICES,
    NO_JSON,
    Count,
    OpenAIDialect,
    Part,
    SamplingFields,
    StreamOptions,
    Top,
    bad,
    check_model,
    check_refused,
    check_tools,
    client_sampling,
    decode,
    digest,
    make_tool,
    plain_choice,
    schema_text,
    sent,
    stop_strings,
    text_of,
    unread,
    unsupported,
    usage,
)
from invrl.gateway.generation import Answer, Piece
from invrl.gateway.message import Message, Tool, ToolCall, ToolChoice
from invrl.gateway.parsing import CallDelta
from invrl.gateway.turns import TurnRequest

_REFUSED = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields not supported, with the values that ask for nothing."""
_REFUSED_IN_MESSAGES = ("function_call", "audio")
_CACHE = ("prompt_cache_key", "prompt_cache_retention")
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity", *_CACHE)
_IGNORED_IN_MESSAGES = ("refusal", "annotations", "provider_specific_fields")
_ROLES = {each: each for each in ("system", "user", "assistant", "tool")} | {"developer": "system"}


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str = ""
    type: str = "function"


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NO_JSON
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Function | None = None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: str
    function: _Named | None = None


class _Schema(msgspec.Struct):
    schema: msgspec.Raw = NO_JSON
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: _Schema | None = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    enable_thinking: bool | None = None


_UnreadOfMessage = unread("_UnreadOfMessage", *_REFUSED_IN_MESSAGES, *_IGNORED_IN_MESSAGES)
_UnreadOfBody = unread("_UnreadOfBody", *_REFUSED, *_IGNORED, base=SamplingFields)


class _Message(_UnreadOfMessage, forbid_unknown_fields=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Body(_UnreadOfBody, forbid_unknown_fields=True):
    messages: list[_Message]
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateOptions | None = None


_DECODER = msgspec.json.Decoder(_Body)


class ChatRequest(Asked, frozen=True, kw_only=True):
    """A parsed chat request, and how its answer is shown."""

    logprobs: bool
    include_usage: bool


class ChatDialect(OpenAIDialect):
    """The wire format of chat completions for one served model."""

    path = "/chat/completions"

    def parse(self, raw: bytes, *, retry: bool | None) -> ChatRequest:
        """SessionError 400 (404 for another model) that names the field."""
        body = decode(_DECODER, raw)
        self._check(body)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        form = body.response_format
        schema = form.json_schema.schema if form and form.json_schema else NO_JSON
        turn = TurnRequest(
            messages=tuple(_message(message, at) for at, message in enumerate(body.messages)),
            tools=check_tools([_tool(tool, at) for at, tool in enumerate(body.tools or ())]),
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            top_logprobs=body.top_logprobs or 0,
            schema=schema_text(form.type, schema, "response_format") if form else "",
            thinking=_thinking(body),
            sampling=client_sampling(body, max_new_tokens=limit, vocab_size=self.vocab_size),
            stop=stop_strings(body.stop),
            stream=bool(body.stream),
            digest=digest(b"chat", raw),
            retry=retry,
        )
        usage = bool(body.stream_options and body.stream_options.include_usage)
        return ChatRequest(turn=turn, n=body.n or 1, logprobs=bool(body.logprobs), include_usage=usage)

    def answer(self, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
        """The body of a whole answer."""
        choices = [
            {
                "index": index,
                "message": _shown(answer.message),
                "logprobs": self.logprobs(answer.pieces) if request.logprobs else None,
                "finish_reason": finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        first = answers[0].turn
        head = self.head("chat.completion", first.id, first.started_at)
        return msgspec.json.encode({**head, "choices": choices, "usage": usage([a.turn for a in answers])})

    def stream(self, request: ChatRequest, begun: Sequence[Begun]) -> AnswerStream:
        return _ChatStream(self, request, begun)

    def models(self, only: str) -> bytes:
        """The answer of `/v1/models`, or of `/v1/models/{only}`: SessionError 404 if that is not ours."""
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "invrl"}
        check_model(only or self.model, self.model)
        return msgspec.json.encode(card if only else {"object": "list", "data": [card]})

    def head(self, kind: str, turn_id: str, created: float) -> dict[str, Any]:
        return {"id": f"chatcmpl-{turn_id}", "object": kind, "created": int(created), "model": self.model}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {"content": self.token_logprobs(pieces), "refusal": None}

    def _check(self, body: _Body) -> None:
        check_model(body.model, self.model)
        check_refused(body, _REFUSED)
        if not body.messages:
            raise bad("`messages` must not be empty", param="messages")
        if body.stream_options is not None and not body.stream:
            raise bad("`stream_options` needs `stream`", param="stream_options")
        if body.top_logprobs and not body.logprobs:
            raise bad("`top_logprobs` needs `logprobs`", param="top_logprobs")


class _ChatStream:
    """One streamed chat answer."""

    keep_alive = b": waiting\n\n"

    def __init__(self, dialect: ChatDialect, request: ChatRequest, begun: Sequence[Begun]) -> None:
        self._dialect, self._request, self._begun = dialect, request, begun
        self._head = dialect.head("chat.completion.chunk", begun[0].turn_id, begun[0].created)

    def head(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(index, first) for index in range(len(self._begun)))

    def piece(self, choice: int, piece: Piece) -> bytes:
        delta, shows_logprobs = piece.delta, self._request.logprobs and len(piece.ids_T)
        if not delta and not shows_logprobs:
            return b""
        told: dict[str, Any] = {}
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.calls:
            told["tool_calls"] = [_call_delta(call) for call in delta.calls]
        if delta.content or not told:
            told["content"] = delta.content
        logprobs = self._dialect.logprobs((piece,)) if shows_logprobs else None
        return self._event(choice, told, logprobs=logprobs)

    def tail(self, answers: Sequence[Answer]) -> bytes:
        ends = [self._event(index, {}, finish=finish_reason(each)) for index, each in enumerate(answers)]
        if self._request.include_usage:
            ends.append(sent({**self._head, "choices": [], "usage": usage([a.turn for a in answers])}))
        return b"".join(ends) + b"data: [DONE]\n\n"

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        shown = {"usage": None} if self._request.include_usage else {}
        return sent({**self._head, "choices": [choice], **shown})


def finish_reason(answer: Answer) -> str:
    """As OpenAI names it: a reply that ended with calls ended because of them."""
    called = answer.message.tool_calls and answer.turn.finish_reason == "stop"
    return "tool_calls" if called else answer.turn.finish_reason


def _shown(message: Message) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["content"] = message.content or None
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return shown


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, **function},
    }


def _message(message: _Message, at: int) -> Message:
    param = f"messages[{at}]"
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise bad(f"{param}.role: {message.role!r} is not one of {known}", param=f"{param}.role")
    for name in _REFUSED_IN_MESSAGES:
        if getattr(message, name) not in (None, [], ""):
            raise unsupported(f"{param}.{name}")
    if message.content is None and role != "assistant":
        raise bad(f"{param}.content must be text", param=f"{param}.content")
    if role == "tool" and not message.tool_call_id:
        raise bad(f"{param}.tool_call_id must say which call this answers", param=f"{param}.tool_call_id")
    if message.tool_calls and role != "assistant":
        raise bad(f"{param}.tool_calls: only the assistant calls", param=f"{param}.tool_calls")
    return Message(
        role,
        text_of(message.content or "", f"{param}.content"),
        message.reasoning_content or message.reasoning or "",
        tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()),
        message.tool_call_id or "",
    )


def _tool(tool: _Tool, at: int) -> Tool:
    param = f"tools[{at}]"
    if tool.type != "function" or tool.function is None:
        raise bad(f"{param}: only functions are supported, not {tool.type!r}", param=param)
    function = tool.function
    place = f"{param}.function"
    return make_tool(function.name, function.description, function.parameters, bool(function.strict), place)


def _tool_choice(choice: str | _Choice | None) -> ToolChoice:
    if plain := plain_choice(choice):
        return plain
    if isinstance(choice, _Choice) and choice.type == "function" and choice.function:
        return ToolChoice(mode="named", name=choice.function.name)
    raise bad("`tool_choice` must be auto, none, required, or name a function", param="tool_choice")


def _thinking(body: _Body) -> bool | None:
    if body.chat_template_kwargs and body.chat_template_kwargs.enable_thinking is not None:
        return body.chat_template_kwargs.enable_thinking
    return None if body.reasoning_effort is None else body.reasoning_effort not in ("none", "minimal")
