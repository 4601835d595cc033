"""`/v1/messages` and its `count_tokens`, Anthropic's API: only the wire, in both directions. Pure.

Every field of the API stands in exactly one of these lists:
- honoured: `messages` (text, tool_use, tool_result, thinking; of user, assistant, system; the last not
  the assistant's), `system`, `model` (must be ours), `max_tokens` (bounded by the session's max_new_tokens),
  `stop_sequences`, `stream`, `tools` (custom ones), `tool_choice`, `thinking` (enabled, adaptive: thinking,
  and it is shown; disabled: none; absent: the template's default, not shown; `display` omitted: without its
  text), `output_config.format`, `output_format`.
- the run's: `temperature`, `top_p`, `top_k`: as in `chat.py`.
- ignored, for they change no token: `metadata`, `service_tier`, `cache_control`, `context_management` (the
  history is used as it was sent), `diagnostics`, `inference_geo`, `speed`, `user_profile_id`, `workspace_id`,
  `billing_policy`, `fallbacks`, `fallback_credit_token`, `thinking.budget_tokens`, `output_config.effort`;
  in blocks `cache_control`, `citations`, `signature`, `caller`, `is_error` (the content tells it), all of
  redacted_thinking; in tools all but name, description, input_schema, type and strict; the header
  anthropic-beta. System blocks with Claude Code's billing header, which is another in each request.
- refused with 400: see `_TABLE` and `body_fields.py`; images, documents, tools of Anthropic's own (another
  type than custom).
Any other field, of the body or of a message, is ignored and counted.

Text blocks of one message are joined by a newline, the assistant's by nothing, as they were sampled; messages
of one role that follow each other are one. A call whose arguments were cut off shows what of them can be read
(as the clients do while they stream), {} if nothing: it does not match when it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic_core import from_json

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.dialect import AnswerStream, Asked, FindTurn, no_turn
from invrl.gateway.types import (
    Answer,
    AnswerStart,
    ClientSampling,
    Message,
    Piece,
    Tool,
    ToolCall,
    ToolChoice,
    TurnRequest,
)
from invrl.types import Turn

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Blocks that a role's content may have."""
_NEEDED = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",), "redacted_thinking": ()}
"""Fields of a block; of others the one named like the block."""
_BILLING = "x-anthropic-billing-header"
_ERRORS = {401: "authentication", 403: "permission", 404: "not_found", 408: "timeout", 429: "rate_limit"}
_SERVER_ERRORS = {503: "overloaded", 504: "timeout"}


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = wire.NO_JSON
    tool_use_id: str | None = None
    content: str | list[_Block] | None = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


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
    messages: list[_Message]
    model: str
    max_tokens: wire.Count | None = None
    system: str | list[_Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: wire.Format | None = None
    temperature: wire.Unit | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused=dict.fromkeys(("container", "mcp_servers", "compaction", "thread"), ()),
    unsaid=(
        *("metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id", "billing_policy"),
        *("cache_control", "context_management", "diagnostics"),
        *("speed", "fallbacks", "fallback_credit_token"),
    ),
    entries="messages",
    entry=_Message,
    unsaid_in_entries=("id", "type", "model", "stop_reason", "stop_sequence", "usage"),
)


class MessagesRequest(Asked, frozen=True, kw_only=True):
    shows_thinking: bool
    omits_text: bool
    """Of the thinking."""


class MessagesDialect:
    path = "/messages"

    def __init__(self, *, model: str) -> None:
        self.model = model

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> MessagesRequest:
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        if body.max_tokens is None:
            raise wire.bad("max_tokens: Field required", param="max_tokens")
        turn = self._turn(body, raw, retry, ignored)
        omits = body.thinking is not None and body.thinking.display == "omitted"
        return MessagesRequest(turn=turn, shows_thinking=bool(turn.thinking), omits_text=omits)

    def parse_count(self, raw: bytes) -> TurnRequest:
        """A request whose tokens are counted; as `parse`, without `max_tokens`."""
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        return self._turn(body, raw, False, ignored)

    def counted(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def answer(self, request: MessagesRequest, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        reply, blocks = answer.message, []
        if reply.reasoning and request.shows_thinking:
            text = "" if request.omits_text else reply.reasoning
            blocks.append({"type": "thinking", "thinking": text, "signature": _signature(answer.turn.id)})
        if reply.content:
            blocks.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            found = {"id": call.id, "name": call.name, "input": _input(call.arguments)}
            blocks.append({"type": "tool_use", **found})
        shown = self.message(answer.turn.id, blocks, usage(answer.turn), **stop_reason(answer))
        return msgspec.json.encode(shown)

    def stream(self, request: MessagesRequest, begun: Sequence[AnswerStart]) -> AnswerStream:
        return _MessagesStream(self, request, begun[0])

    def error(self, error: SessionError) -> bytes:
        """Clients compact their history when a prompt "is too long"."""
        long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        known, other = (_ERRORS, "invalid_request") if error.status < 500 else (_SERVER_ERRORS, "api")
        kind = known.get(error.status, other) + "_error" if error.status != 413 else "request_too_large"
        detail = {"type": kind, "message": long + error.message}
        return msgspec.json.encode({"type": "error", "error": detail, "request_id": None})

    def models(self, only: str) -> bytes:
        """As `ChatDialect.models`, to an Anthropic client."""
        card = {"type": "model", "id": self.model, "display_name": self.model, "lifecycle": "active"}
        card["created_at"] = "1970-01-01T00:00:00Z"
        wire.check_model(only or self.model, self.model)
        ends = {"has_more": False, "first_id": self.model, "last_id": self.model}
        return msgspec.json.encode(card if only else {"data": [card], **ends})

    def message(self, turn_id: str, content: Sequence[Any], usage: Any, **stop: str | None) -> dict[str, Any]:
        """`stop`: what `stop_reason` tells, once it is known."""
        head = {"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "model": self.model}
        unknown = {"stop_reason": None, "stop_sequence": None}
        return {**head, "content": content, **unknown, **stop, "usage": usage}

    def _turn(self, body: _Body, raw: bytes, retry: bool, ignored: tuple[str, ...]) -> TurnRequest:
        choice, thinking = body.tool_choice, body.thinking
        asked = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k or None}
        form = (body.output_config and body.output_config.format) or body.output_format
        return TurnRequest(
            messages=_messages(body),
            tools=wire.check_tools([_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())]),
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            schema=wire.schema_text(form.type, form.schema, "output_config.format") if form else "",
            thinking=thinking and thinking.type != "disabled",
            sampling=ClientSampling(**asked, max_new_tokens=body.max_tokens),
            stop=wire.stop_strings(body.stop_sequences, "stop_sequences"),
            stream=bool(body.stream),
            digest=wire.digest(b"messages", raw),
            ignored=ignored,
            retry=retry,
        )


class _MessagesStream:
    """One streamed answer: blocks one after another, each begun, added to, stopped."""

    keep_alive = wire.sent({"type": "ping"}, "ping")

    def __init__(self, dialect: MessagesDialect, request: MessagesRequest, begun: AnswerStart) -> None:
        self._dialect, self._request, self._begun = dialect, request, begun
        self._kind = ""
        """Of the block that is open."""
        self._index = -1
        self._calls: dict[int, int] = {}
        """The block of each call."""

    def head(self, cached_tokens: int) -> bytes:
        used = _counted(self._begun.prompt_tokens, cached_tokens, sampled=0)
        message = self._dialect.message(self._begun.turn_id, (), used)
        return _event("message_start", message=message) + self.keep_alive

    def piece(self, choice: int, piece: Piece) -> bytes:
        delta, told = piece.delta, b""
        if delta.reasoning and not self._request.shows_thinking:
            told += self.keep_alive
        elif delta.reasoning:
            told += self._start("thinking", thinking="", signature="")
            if not self._request.omits_text:
                told += self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.content:
            told += self._start("text", text="") + self._delta("text_delta", text=delta.content)
        for call in delta.calls:
            if call.index not in self._calls:
                told += self._stop() + self._start("tool_use", id=call.id, name=call.name, input={})
                self._calls[call.index] = self._index
            if call.arguments:  # those of an earlier call may come late, by its index
                at = self._calls[call.index]
                told += self._delta("input_json_delta", at, partial_json=call.arguments)
        return told

    def tail(self, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        last = _event("message_delta", delta=stop_reason(answer), usage=usage(answer.turn))
        return self._stop() + last + _event("message_stop")

    def error(self, error: SessionError) -> bytes:
        return b"event: error\ndata: " + self._dialect.error(error) + b"\n\n"

    def _start(self, kind: str, **fields: Any) -> bytes:
        if kind == self._kind:
            return b""
        told = self._stop()
        self._kind, self._index = kind, self._index + 1
        return told + _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _delta(self, kind: str, at: int | None = None, **fields: str) -> bytes:
        index = self._index if at is None else at
        return _event("content_block_delta", index=index, delta={"type": kind, **fields})

    def _stop(self) -> bytes:
        kind, self._kind = self._kind, ""
        if not kind:
            return b""
        thought = kind == "thinking"
        signed = self._delta("signature_delta", signature=_signature(self._begun.turn_id)) if thought else b""
        return signed + _event("content_block_stop", index=self._index)


def stop_reason(answer: Answer) -> dict[str, str | None]:
    """As Anthropic names it, with the stop sequence that was met."""
    ended = "stop_sequence" if answer.stop else "tool_use" if answer.message.tool_calls else "end_turn"
    reason = "max_tokens" if answer.turn.finish_reason == "length" else ended
    return {"stop_reason": reason, "stop_sequence": answer.stop or None}


def usage(turn: Turn) -> dict[str, int]:
    return _counted(turn.prompt_tokens, turn.cached_tokens, sampled=len(turn.sampled_ids_T))


def _counted(prompt: int, cached: int, *, sampled: int) -> dict[str, int]:
    """Tokens as Anthropic counts them: `input_tokens` without those read from the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return wire.sent({"type": kind, **fields}, kind)


def _signature(turn_id: str) -> str:
    """Clients want one and hand it back unread."""
    return f"invrl-{turn_id}"


def _input(arguments: str) -> object:
    """A call's arguments as an object, to the letter where they are one."""
    try:
        msgspec.json.decode(arguments, type=dict)
        return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        found = from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _messages(body: _Body) -> tuple[Message, ...]:
    """As the template takes them. SessionError 400 that names the block."""
    if not body.messages or body.messages[-1].role == "assistant":
        reason = "the conversation must end with a user message: a reply begun by the client is not supported"
        raise wire.bad(reason if body.messages else "messages: at least one is required", param="messages")
    joined = wire.JoinedMessages()
    if isinstance(body.system, str):
        body.system = [_Block(type="text", text=body.system)]
    system = [block for block in body.system or () if not (block.text or "").startswith(_BILLING)]
    if text := _text("system", system, "system"):
        joined.add(Message("system", text))
    for at, message in enumerate(body.messages):
        for each in _split(message, f"messages[{at}].content"):
            if each.role == joined.last_role and each.role in ("user", "assistant"):
                joined.join(each, "" if each.role == "assistant" else "\n")
            else:
                joined.add(each)
    return joined.messages()


def _split(message: _Message, param: str) -> list[Message]:
    """One message of the API: the tool results in it, then the rest. `param`: where its content is."""
    role = message.role
    text = _text(role, message.content, param)
    blocks = () if isinstance(message.content, str) else message.content
    uses = [block for block in blocks if block.type == "tool_use"]
    calls = tuple(
        ToolCall(block.id or "", block.name or "", wire.json_object(block.input, f"{param}.input") or "{}")
        for block in uses
    )
    found = [
        Message("tool", _text("system", block.content or (), param), tool_call_id=block.tool_use_id or "")
        for block in blocks
        if block.type == "tool_result"
    ]
    if text or not found:
        found.append(Message(role, text, "".join(block.thinking or "" for block in blocks), calls))
    return found


def _text(role: str, content: str | Sequence[_Block], param: str) -> str:
    """The text of a role's content. SessionError 400 for blocks that it cannot have."""
    if isinstance(content, str):
        return content
    for at, block in enumerate(content):
        place = f"{param}[{at}]"
        if block.type not in _BLOCKS[role]:
            reason = f"{block.type!r} is refused: only {', '.join(_BLOCKS[role])} can stand here, no images"
            raise wire.bad(f"{place}: {reason}", param=place, code="unsupported_content")
        for name in _NEEDED.get(block.type, (block.type,)):
            if getattr(block, name) is None:
                raise wire.bad(f"{place}.{name}: Field required", param=f"{place}.{name}")
    texts = [block.text or "" for block in content if block.type == "text"]
    return ("" if role == "assistant" else "\n").join(texts)


def _tool(tool: _Tool, param: str) -> Tool:
    if tool.type not in (None, "custom"):
        reason = f"{param}: {tool.type!r} is a tool of Anthropic's own; only custom tools are supported"
        raise wire.bad(reason, param=param, code="unsupported_parameter")
    if not wire.json_schema(tool.parameters, f"{param}.input_schema"):
        raise wire.bad(f"{param}.input_schema: Field required", param=f"{param}.input_schema")
    return wire.make_tool(tool, param)


def _tool_choice(choice: _Choice | None) -> ToolChoice:
    kind = choice.type if choice else "auto"
    if plain := wire.plain_choice("required" if kind == "any" else kind):
        return plain
    if not (choice and choice.name):
        raise wire.bad("tool_choice.name: Field required", param="tool_choice.name")
    return ToolChoice(mode="named", name=choice.name)
