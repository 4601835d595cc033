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
- honoured too, as other servers have them: `enable_thinking`, `thinking.type`, `reasoning.effort` and
  `.enabled`, `chat_template_kwargs.thinking`.
- ignored, for they change no token: `user`, `metadata`, `store`, `service_tier`, `safety_identifier`,
  `prompt_cache_key`, `prompt_cache_retention`, `verbosity`, all of `stream_options` but `include_usage`; in
  messages `name`, `refusal`, `annotations`; in tools `strict` where the model chooses freely.
- refused with 400: see `_TABLE` and `body_fields.py`; in messages audio, images, files.
Any other field, of the body or of a message (`parsed`, `thinking_blocks`, `provider`, ...), is ignored and
counted: `GET /sessions/ID` lists it, the log tells it once."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.choices import ChoicesDialect, ChoicesFields, ChoicesRequest
from invrl.gateway.dialects.dialect import FindTurn, no_turn
from invrl.gateway.types import CallDelta, Delta, Message, Piece, Tool, ToolCall, ToolChoice, TurnRequest

_ROLES = {each: each for each in ("system", "user", "assistant", "tool")} | {"developer": "system"}


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str = ""
    type: str = "function"


class _Tool(msgspec.Struct):
    type: str
    function: wire.Function | None = None


class _Allowed(msgspec.Struct):
    tools: list[_Tool]
    mode: Literal["auto", "required"] = "auto"


class _Choice(msgspec.Struct):
    type: str
    function: wire.Function | None = None
    allowed_tools: _Allowed | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: dict[str, msgspec.Raw] | None = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Others would change the prompt."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class _Thinking(msgspec.Struct):
    type: str = ""


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    enabled: bool | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[wire.Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Body(ChoicesFields, kw_only=True):
    messages: list[_Message]
    max_tokens: wire.Count | None = None
    max_completion_tokens: wire.Count | None = None
    logprobs: bool | None = None
    top_logprobs: wire.Top | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    enable_thinking: bool | None = None
    thinking: _Thinking | bool | None = None
    reasoning: _Reasoning | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={
        "functions": (),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    },
    unsaid=(
        *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention"),
    ),
    entries="messages",
    entry=_Message,
    refused_in_entries=("function_call", "audio", "images", "prefix"),
    unsaid_in_entries=("refusal", "annotations"),
)


class ChatDialect(ChoicesDialect):
    path, ids = "/chat/completions", "chatcmpl-"
    objects = ("chat.completion", "chat.completion.chunk")
    first: ClassVar = {"delta": {"role": "assistant", "content": "", "refusal": None}}
    last: ClassVar = {"delta": {}}

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> ChoicesRequest:
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        if not body.messages:
            raise wire.bad("`messages` must not be empty", param="messages")
        if body.top_logprobs and not body.logprobs:
            raise wire.bad("`top_logprobs` needs `logprobs`", param="top_logprobs")
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        form = body.response_format
        schema = ((form and form.json_schema) or {}).get("schema", wire.NO_JSON)
        turn = TurnRequest(
            messages=_messages(body.messages),
            tools=wire.check_tools([_tool(tool, at) for at, tool in enumerate(body.tools or ())]),
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            top_logprobs=body.top_logprobs or 0,
            schema=wire.schema_text(form.type, schema, "response_format") if form else "",
            thinking=_thinking(body),
            sampling=self.sampling(body, limit),
            stop=wire.stop_strings(body.stop),
            stream=bool(body.stream),
            digest=wire.digest(b"chat", raw),
            ignored=ignored,
            retry=retry,
        )
        return self.asked(body, turn, logprobs=bool(body.logprobs))

    def whole(self, message: Message) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning:
            shown["reasoning_content"] = message.reasoning
        if message.tool_calls:
            shown["content"] = message.content or None
            shown["tool_calls"] = [_shown_call(call) for call in message.tool_calls]
        return {"message": shown}

    def added(self, delta: Delta) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.calls:
            told["tool_calls"] = [{"index": call.index, **_shown_call(call)} for call in delta.calls]
        if delta.content or not told:
            told["content"] = delta.content
        return {"delta": told}

    def logprobs(self, request: ChoicesRequest, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        return {"content": self.token_logprobs(pieces), "refusal": None}

    def models(self, only: str) -> bytes:
        """The answer of `/v1/models`, or of `/v1/models/{only}`: SessionError 404 if that is not ours."""
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "invrl"}
        wire.check_model(only or self.model, self.model)
        return msgspec.json.encode(card if only else {"object": "list", "data": [card]})


def _shown_call(call: ToolCall | CallDelta) -> dict[str, Any]:
    """What comes after the first piece of a call has no name."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _messages(sent: Sequence[_Message]) -> tuple[Message, ...]:
    """A reply's text and its calls, which some clients send back as two messages, are one again."""
    joined = wire.JoinedMessages()
    for at, each in enumerate(sent):
        message = _message(each, at)
        if joined.continues_reply(message):
            joined.join(message)
        else:
            joined.add(message)
    return joined.messages()


def _message(message: _Message, at: int) -> Message:
    param = f"messages[{at}]"
    role = wire.role_of(message.role, _ROLES, param)
    if message.content is None and role != "assistant":
        raise wire.bad(f"{param}.content must be text", param=f"{param}.content")
    if role == "tool" and not message.tool_call_id:
        param = f"{param}.tool_call_id"
        raise wire.bad(f"{param} must say which call this answers", param=param)
    if message.tool_calls and role != "assistant":
        raise wire.bad(f"{param}.tool_calls: only the assistant calls", param=f"{param}.tool_calls")
    calls = []
    for nth, call in enumerate(message.tool_calls or ()):
        place = f"{param}.tool_calls[{nth}].function.arguments"
        arguments = wire.call_arguments(call.function.arguments, place)
        calls.append(ToolCall(call.id, call.function.name, arguments))
    return Message(
        role,
        wire.text_of(message.content or "", f"{param}.content"),
        message.reasoning_content or message.reasoning or "",
        tuple(calls),
        message.tool_call_id or "",
    )


def _tool(tool: _Tool, at: int) -> Tool:
    param = f"tools[{at}]"
    if tool.type != "function" or tool.function is None:
        raise wire.bad(f"{param}: only functions are supported, not {tool.type!r}", param=param)
    return wire.make_tool(tool.function, f"{param}.function")


def _tool_choice(choice: str | _Choice | None) -> ToolChoice:
    if plain := wire.plain_choice(choice):
        return plain
    if isinstance(choice, _Choice) and choice.type == "function" and choice.function:
        return ToolChoice(mode="named", name=choice.function.name)
    if isinstance(choice, _Choice) and choice.type == "allowed_tools" and choice.allowed_tools:
        allowed = choice.allowed_tools
        names = [tool.function.name for tool in allowed.tools if tool.function]
        return wire.allowed_choice(allowed.mode, names)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a function"
    raise wire.bad(reason, param="tool_choice")


def _thinking(body: _Body) -> bool | None:
    """What is said most directly counts."""
    options = body.chat_template_kwargs or _TemplateOptions()
    reasoning = body.reasoning or _Reasoning()
    thinking = body.thinking
    if isinstance(thinking, _Thinking):
        thinking = thinking.type != "disabled"
    for said in (
        options.enable_thinking,
        options.thinking,
        body.enable_thinking,
        thinking,
        reasoning.enabled,
    ):
        if said is not None:
            return said
    effort = body.reasoning_effort or reasoning.effort
    return None if effort is None else effort not in ("none", "minimal")
