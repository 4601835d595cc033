"""`/v1/messages` and its `count_tokens`, Anthropic's API: the wire format of requests.
`messages_output.py` has that of answers. Pure.

Every field of the API is in exactly one of these lists:
- honoured: `messages` (text, tool_use, tool_result, thinking; of user, assistant,
  system; the last one must not be the assistant's), `system`, `model` (as in chat),
  `max_tokens` (bounded by the session's max_new_tokens), `stop_sequences`, `stream`,
  `tools` (custom ones, and `bash_…`, `text_editor_…`, `memory_…`, which the client
  runs), `tool_choice`, `thinking` (enabled, adaptive: thinking, and it is shown;
  disabled: none; absent: the template's default, not shown; `display` omitted: without
  its text), `output_config.format`, `output_format`.
- set by the run: `temperature`, `top_p`, `top_k`, as in `chat.py`.
- ignored, because they change no token: `metadata`, `service_tier`, `cache_control`,
  `context_management` (the history is used as it was sent), `diagnostics`,
  `inference_geo`, `speed`, `user_profile_id`, `workspace_id`, `billing_policy`,
  `fallbacks`, `fallback_credit_token`, `thinking.budget_tokens`,
  `output_config.effort`; in blocks `cache_control`, `citations`, `signature`, `caller`,
  `is_error` (the content says it), all of redacted_thinking; in tools all but name,
  description, input_schema, type and strict; the header anthropic-beta. A system block
  with Claude Code's billing header is dropped: it differs in every request.
- refused with 400: see `_TABLE` and `body_fields.py`; images, documents, tools that
Anthropic runs. Any other field of the body or of a message is ignored and counted.

The text blocks of one message are joined by a newline; the assistant's are joined
without one, as they were sampled. Adjacent messages of one role are one message. A call
whose arguments were cut off shows their readable part (clients do the same while they
stream), or {} if nothing is readable: such a call does not match when it comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.client_tools import client_tool
from invrl.gateway.dialects.content_blocks import Block, SentMessage, conversation
from invrl.gateway.dialects.dialect import (
    FindTurn,
    ResponseParts,
    no_turn,
)
from invrl.gateway.dialects.messages_output import (
    MessagesRequest,
    MessagesStream,
    blocks,
    error_body,
    message_fields,
    stop_fields,
    usage,
)
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import (
    Answer,
    ClientSampling,
    ResponseStart,
    Tool,
    ToolChoice,
    TurnRequest,
)

_TopK = Annotated[int, msgspec.Meta(ge=0)]


class _Tool(wire.Function, kw_only=True):
    type: str | None = None
    parameters: msgspec.Raw = msgspec.field(default=wire.NO_JSON, name="input_schema")


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: wire.Count | None = None
    display: str | None = None


class _OutputConfig(msgspec.Struct):
    format: wire.Format | None = None


class _Body(msgspec.Struct, kw_only=True):
    messages: list[SentMessage]
    model: str | None = None
    max_tokens: wire.Count | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: wire.Format | None = None
    temperature: wire.Unit | None = None
    top_p: wire.TopP | None = None
    top_k: _TopK | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={"container": (), "mcp_servers": (), "compaction": (), "thread": ()},
    unreported=(
        "metadata",
        "service_tier",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "cache_control",
        "context_management",
        "diagnostics",
        "speed",
        "fallbacks",
        "fallback_credit_token",
    ),
    entries="messages",
    entry=SentMessage,
    unreported_in_entries=(
        "id",
        "type",
        "model",
        "stop_reason",
        "stop_sequence",
        "usage",
    ),
)


class MessagesDialect:
    path = "/messages"

    def __init__(self, *, model: str) -> None:
        self.model = model

    def parse(
        self, raw: bytes, *, retry: bool, find: FindTurn = no_turn
    ) -> MessagesRequest:
        body, ignored = wire.decode(_DECODER, raw, _TABLE)
        if body.max_tokens is None:
            raise wire.bad_request("max_tokens: Field required", param="max_tokens")
        turn = _turn_request(body, raw, retry=retry, ignored=ignored)
        thinking = body.thinking
        omits_text = thinking is not None and thinking.display == "omitted"
        return MessagesRequest(
            turn=turn,
            shows_thinking=bool(turn.thinking),
            omits_thinking_text=omits_text,
        )

    def parse_count(self, raw: bytes) -> TurnRequest:
        """Parse a request whose tokens are counted, like `parse`, but without requiring
        `max_tokens`."""
        body, ignored = wire.decode(_DECODER, raw, _TABLE)
        return _turn_request(body, raw, retry=False, ignored=ignored)

    def counted(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def answer(self, request: MessagesRequest, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        turn = answer.turn
        message = message_fields(
            self.model,
            turn.id,
            content=blocks(request, answer),
            usage=usage(turn),
            stop=stop_fields(answer),
        )
        return msgspec.json.encode(message)

    def stream(
        self, request: MessagesRequest, starts: Sequence[ResponseStart]
    ) -> ResponseParts:
        return MessagesStream(self.model, request, starts[0])

    def error(self, error: SessionError) -> bytes:
        return error_body(error)

    def models(self, names: Sequence[str], context_length: int) -> bytes:
        """Return the body of `ChatDialect.models` for an Anthropic client."""
        models = {
            "data": [_model_card(name, context_length) for name in names],
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }
        return msgspec.json.encode(models)

    def show_model(self, name: str, context_length: int) -> bytes:
        """Return the body of `ChatDialect.show_model` for an Anthropic client."""
        return msgspec.json.encode(_model_card(name, context_length))


def _model_card(name: str, context_length: int) -> Fields:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "lifecycle": "active",
        "created_at": "1970-01-01T00:00:00Z",
        "max_input_tokens": context_length,
    }


def _turn_request(
    body: _Body,
    raw: bytes,
    *,
    retry: bool,
    ignored: tuple[str, ...],
) -> TurnRequest:
    messages = conversation(body.system, body.messages)
    tools = []
    for index, tool in enumerate(body.tools or ()):
        tools.append(_tool(tool, f"tools[{index}]"))
    parallel = True
    if body.tool_choice is not None:
        parallel = not body.tool_choice.disable_parallel_tool_use
    thinking = None
    if body.thinking is not None:
        thinking = body.thinking.type != "disabled"
    sampling = ClientSampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        max_new_tokens=body.max_tokens,
    )
    return TurnRequest(
        messages=messages,
        tools=wire.check_tools(tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=parallel,
        schema=_schema(body),
        thinking=thinking,
        sampling=sampling,
        stop=wire.stop_strings(body.stop_sequences, "stop_sequences"),
        stream=bool(body.stream),
        model=body.model,
        digest=wire.digest(b"messages", raw),
        ignored=ignored,
        retry=retry,
    )


def _schema(body: _Body) -> str:
    """Return the JSON schema that the reply must follow; "" for none."""
    output_format = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        output_format = body.output_config.format
    if output_format is None:
        return ""
    return wire.schema_text(
        output_format.type, output_format.schema, "output_config.format"
    )


def _tool(tool: _Tool, param: str) -> Tool:
    if tool.type not in (None, "custom"):
        function = client_tool(tool.type, tool.name, param)
        return wire.make_tool(function, param)
    if not wire.json_schema(tool.parameters, f"{param}.input_schema"):
        param = f"{param}.input_schema"
        raise wire.bad_request(f"{param}: Field required", param=param)
    return wire.make_tool(tool, param)


def _tool_choice(choice: _Choice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice(mode="auto")
    if choice.type == "any":
        return ToolChoice(mode="required")
    if choice.type != "tool":
        return ToolChoice(mode=choice.type)
    if not choice.name:
        raise wire.bad_request(
            "tool_choice.name: Field required", param="tool_choice.name"
        )
    return ToolChoice(mode="named", name=choice.name)
