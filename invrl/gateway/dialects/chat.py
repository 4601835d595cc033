"""`/v1/chat/completions`: the wire format, in both directions. Pure.

Every field of the API is in exactly one of these lists:
- honoured: `messages` (text, also in parts; tool calls and results;
  `reasoning_content`), `model` (any name in training and evaluation, one of the
  server's in serving), `stream`, `stream_options.include_usage`, `max_tokens`,
  `max_completion_tokens` (bounded by the session's max_new_tokens), `stop`, `logprobs`,
  `top_logprobs` (to 20), `n` (to 16), `tools` (functions; custom tools, which the model
  knows as functions of one `input`, and a grammar as a description), `tool_choice`,
  `parallel_tool_calls` (false: calls after the first are not shown), `response_format`,
  `reasoning_effort` (none: no thinking; others: thinking),
  `chat_template_kwargs.enable_thinking`.
- honoured too, as other servers have them: `enable_thinking`, `thinking.type`,
  `reasoning.effort` and `.enabled`, `chat_template_kwargs.thinking`.
- set by the run: `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`,
  `presence_penalty`, `repetition_penalty`, `logit_bias`, `seed`. They are honoured in
  serving sessions. In training and evaluation the run's values are used, which is
  reported once per session (header `x-invrl-overridden`). `logit_bias` is refused in
  serving, because the router would drop it.
- ignored, because they change no token: `user`, `metadata`, `store`, `service_tier`,
  `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`, `verbosity`, all of
  `stream_options` except `include_usage`; in messages `name`, `refusal`, `annotations`;
  in tools `strict` where the model chooses freely.
- refused with 400: see `_TABLE` and `body_fields.py`; in messages audio, images, files.
Any other field of the body or of a message (`parsed`, `thinking_blocks`, `provider`,
...) is ignored and counted: `GET /sessions/ID` lists it, and the log names it once."""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.choices import ChoicesDialect, ChoicesFields, ChoicesRequest
from invrl.gateway.dialects.custom_tools import (
    CustomFormat,
    custom_arguments,
    custom_function,
    custom_input,
)
from invrl.gateway.dialects.dialect import FindTurn, no_turn
from invrl.gateway.dialects.joined_messages import JoinedMessages
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import (
    CallDelta,
    Delta,
    Message,
    Piece,
    Tool,
    ToolCall,
    ToolChoice,
    TurnRequest,
)
from invrl.types.tasks import Json

Struct = TypeVar("Struct", bound=msgspec.Struct)
_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "system",
}
"""Client's role -> the model's."""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _CalledCustom(msgspec.Struct):
    name: str
    input: str = ""


class _Call(msgspec.Struct):
    function: _CalledFunction | None = None
    custom: _CalledCustom | None = None
    id: str = ""
    type: str = "function"


class _CustomTool(msgspec.Struct):
    name: str = ""
    description: str | None = None
    format: CustomFormat | None = None


class _Tool(msgspec.Struct):
    type: str
    function: wire.Function | None = None
    custom: _CustomTool | None = None

    @property
    def name(self) -> str:
        """ "" if it has none."""
        if self.type == "custom" and self.custom is not None:
            return self.custom.name
        return self.function.name if self.function is not None else ""


class _AllowedTools(msgspec.Struct):
    tools: list[_Tool]
    mode: Literal["auto", "required"] = "auto"


class _Choice(_Tool, kw_only=True):
    allowed_tools: _AllowedTools | None = None


class _Format(msgspec.Struct):
    type: str
    json_schema: dict[str, msgspec.Raw] | None = None


class _TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Supported template options. Others would change the prompt, and are refused."""

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
    top_logprobs: wire.TopLogprobs | None = None
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
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    },
    unreported=(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "verbosity",
        "prompt_cache_key",
        "prompt_cache_retention",
    ),
    entries="messages",
    entry=_Message,
    refused_in_entries=("function_call", "audio", "images", "prefix"),
    unreported_in_entries=("refusal", "annotations"),
)


class ChatDialect(ChoicesDialect):
    path = "/chat/completions"
    id_prefix = "chatcmpl-"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"
    first_fields: ClassVar = {
        "delta": {"role": "assistant", "content": "", "refusal": None}
    }
    last_fields: ClassVar = {"delta": {}}

    def parse(
        self, raw: bytes, *, retry: bool, find: FindTurn = no_turn
    ) -> ChoicesRequest:
        body, ignored = wire.decode(_DECODER, raw, _TABLE)
        if not body.messages:
            raise wire.bad_request("`messages` must not be empty", param="messages")
        if body.top_logprobs and not body.logprobs:
            raise wire.bad_request(
                "`top_logprobs` needs `logprobs`", param="top_logprobs"
            )
        max_tokens = body.max_completion_tokens
        if max_tokens is None:
            max_tokens = body.max_tokens
        messages = _messages(body.messages)
        tools = [
            _tool(tool, f"tools[{index}]")
            for index, tool in enumerate(body.tools or ())
        ]
        turn = TurnRequest(
            messages=messages,
            tools=wire.check_tools(tools),
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            top_logprobs=body.top_logprobs or 0,
            schema=_schema(body.response_format),
            thinking=_thinking(body),
            sampling=self.sampling(body, max_tokens),
            stop=wire.stop_strings(body.stop),
            stream=bool(body.stream),
            model=body.model,
            digest=wire.digest(b"chat", raw),
            ignored=ignored,
            retry=retry,
        )
        custom = [tool.name for tool in body.tools or () if tool.type == "custom"]
        return self.make_request(
            body, turn, logprobs=bool(body.logprobs), custom=custom
        )

    def message_fields(self, request: ChoicesRequest, message: Message) -> Fields:
        fields: Fields = {
            "role": "assistant",
            "content": message.content,
            "refusal": None,
        }
        if message.reasoning:
            fields |= _reasoning_fields(message.reasoning)
        if message.tool_calls:
            fields["content"] = message.content or None
            fields["tool_calls"] = [
                _custom_call_fields(call, custom_input(call.arguments))
                if call.name in request.custom
                else _call_fields(call)
                for call in message.tool_calls
            ]
        return {"message": fields}

    def delta_fields(self, request: ChoicesRequest, delta: Delta) -> Fields:
        fields: Fields = {}
        if delta.reasoning:
            fields |= _reasoning_fields(delta.reasoning)
        if delta.calls:
            fields["tool_calls"] = [
                {"index": call.index, **_custom_call_fields(call, "")}
                if call.name in request.custom
                else _call_delta_fields(call)
                for call in delta.calls
            ]
        if delta.content or not fields:
            fields["content"] = delta.content
        return {"delta": fields}

    def input_fields(self, index: int, call: ToolCall) -> Fields:
        custom = {"input": custom_input(call.arguments)}
        return {"delta": {"tool_calls": [{"index": index, "custom": custom}]}}

    def logprobs(
        self,
        request: ChoicesRequest,
        pieces: Sequence[Piece],
        offset: int,
    ) -> Fields:
        return {"content": self.token_logprobs(pieces), "refusal": None}

    def models(self, names: Sequence[str], context_length: int) -> bytes:
        """Return the body of `/v1/models`: the one model, under each of its names."""
        cards = [_model_card(name, context_length) for name in names]
        return msgspec.json.encode({"object": "list", "data": cards})

    def show_model(self, name: str, context_length: int) -> bytes:
        """Return the body of `/v1/models/{name}`."""
        return msgspec.json.encode(_model_card(name, context_length))


def _model_card(name: str, context_length: int) -> Fields:
    """Describe a model like OpenAI, with vLLM's `max_model_len`: the tokens of a prompt
    and its reply."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "invrl",
        "max_model_len": context_length,
    }


def _reasoning_fields(text: str) -> Fields:
    """Return reasoning under both names that clients read: that of DeepSeek, SGLang and
    earlier vLLM, and that of gpt-oss, OpenRouter and later vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _call_fields(call: ToolCall | CallDelta) -> Fields:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _custom_call_fields(call: ToolCall | CallDelta, text: str) -> Fields:
    return {
        "id": call.id,
        "type": "custom",
        "custom": {"name": call.name, "input": text},
    }


def _call_delta_fields(call: CallDelta) -> Fields:
    """Return the fields of a call's piece. Only the first one has a name."""
    if call.name:
        return {"index": call.index, **_call_fields(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _messages(messages: Sequence[_Message]) -> tuple[Message, ...]:
    """Return the messages of a body. Some clients send the text and the calls of one
    reply as two messages: they are joined again."""
    joined = JoinedMessages()
    for index, sent in enumerate(messages):
        message = _message(sent, f"messages[{index}]")
        if joined.continues_reply(message):
            joined.join(message)
        else:
            joined.add(message)
    return joined.messages()


def read_message(fields: Json, param: str) -> Message:
    """Read a message of a file of conversations instead of a request. Raises
    SessionError 400, which calls it `param`, if it is not a message."""
    return _message(_converted(fields, _Message, param), param)


def read_tool(fields: Json, param: str) -> Tool:
    """Read a tool of a conversation in a file, like `read_message`."""
    return _tool(_converted(fields, _Tool, param), param)


def _converted(fields: Json, to: type[Struct], param: str) -> Struct:
    try:
        # By way of JSON, because a schema stays the text that it was written as.
        return msgspec.json.decode(msgspec.json.encode(fields), type=to)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise wire.bad_request(f"{param}: {error}", param=param) from None


def _message(message: _Message, param: str) -> Message:
    role = wire.model_role(message.role, _ROLES, param)
    if message.content is None and role != "assistant":
        reason = f"{param}.content must be text"
        raise wire.bad_request(reason, param=f"{param}.content")
    if role == "tool" and not message.tool_call_id:
        reason = f"{param}.tool_call_id must say which call this answers"
        raise wire.bad_request(reason, param=f"{param}.tool_call_id")
    if message.tool_calls and role != "assistant":
        reason = f"{param}.tool_calls: only the assistant calls"
        raise wire.bad_request(reason, param=f"{param}.tool_calls")
    calls = []
    for call_index, call in enumerate(message.tool_calls or ()):
        calls.append(_tool_call(call, f"{param}.tool_calls[{call_index}]"))
    return Message(
        role,
        content=wire.content_text(message.content or "", f"{param}.content"),
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or "",
    )


def _tool_call(call: _Call, param: str) -> ToolCall:
    if call.type == "custom" and call.custom is not None:
        arguments = custom_arguments(call.custom.input)
        return ToolCall(call.id, call.custom.name, arguments)
    if call.function is None:
        param = f"{param}.{'custom' if call.type == 'custom' else 'function'}"
        raise wire.bad_request(f"{param}: Field required", param=param)
    arguments_param = f"{param}.function.arguments"
    arguments = wire.call_arguments(call.function.arguments, arguments_param)
    return ToolCall(call.id, call.function.name, arguments)


def _tool(tool: _Tool, param: str) -> Tool:
    if tool.type == "custom" and tool.custom is not None:
        param = f"{param}.custom"
        custom = tool.custom
        function = custom_function(
            custom.name, custom.description, custom.format, param
        )
        return wire.make_tool(function, param)
    if tool.type != "function" or tool.function is None:
        reason = (
            f"{param}: a tool has the type function or custom, and its definition in the"
            f" field of that name; this one has the type {tool.type!r}"
        )
        raise wire.bad_request(reason, param=param)
    return wire.make_tool(tool.function, f"{param}.function")


def _tool_choice(choice: str | _Choice | None) -> ToolChoice:
    plain = wire.plain_choice(choice)
    if plain is not None:
        return plain
    if isinstance(choice, _Choice):
        if choice.type in ("function", "custom") and choice.name:
            return ToolChoice(mode="named", name=choice.name)
        if choice.type == "allowed_tools" and choice.allowed_tools:
            names = [tool.name for tool in choice.allowed_tools.tools if tool.name]
            return wire.allowed_choice(choice.allowed_tools.mode, names)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a tool"
    raise wire.bad_request(reason, param="tool_choice")


def _schema(response_format: _Format | None) -> str:
    """Return the JSON schema that the reply must follow; "" for none."""
    if response_format is None:
        return ""
    described = response_format.json_schema or {}
    schema = described.get("schema", wire.NO_JSON)
    return wire.schema_text(response_format.type, schema, "response_format")


def _thinking(body: _Body) -> bool | None:
    """Whether the request asks for thinking. The more direct of two fields takes
    precedence."""
    options = body.chat_template_kwargs or _TemplateOptions()
    reasoning = body.reasoning or _Reasoning()
    thinking = body.thinking
    if isinstance(thinking, _Thinking):
        thinking = thinking.type != "disabled"
    fields = (
        options.enable_thinking,
        options.thinking,
        body.enable_thinking,
        thinking,
        reasoning.enabled,
    )
    for field in fields:
        if field is not None:
            return field
    return wire.wants_thinking(body.reasoning_effort or reasoning.effort)
