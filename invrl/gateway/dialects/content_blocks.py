"""The messages of a request to `/v1/messages`: blocks of content, and the messages that they become. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.joined_messages import JoinedMessages
from invrl.gateway.types import Message, ToolCall

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that the content of a role may have."""
_REQUIRED_FIELDS = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",), "redacted_thinking": ()}
"""The required fields of a block. Any other block requires the field that is named like its type."""
_BILLING_HEADER = "x-anthropic-billing-header"


class Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = wire.NO_JSON
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class SentMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def conversation(system: str | list[Block] | None, messages: Sequence[SentMessage]) -> tuple[Message, ...]:
    """The system prompt and the messages of a body, as the template takes them."""
    if not messages:
        raise wire.bad("messages: at least one is required", param="messages")
    if messages[-1].role == "assistant":
        reason = "the conversation must end with a user message: a reply begun by the client is not supported"
        raise wire.bad(reason, param="messages")
    joined = JoinedMessages()
    system_text = _system_text(system)
    if system_text:
        joined.add(Message("system", system_text))
    for index, sent in enumerate(messages):
        for message in _split(sent, f"messages[{index}].content"):
            if message.role == joined.last_role and message.role in ("user", "assistant"):
                separator = "" if message.role == "assistant" else "\n"
                joined.join(message, separator)
            else:
                joined.add(message)
    return joined.messages()


def _system_text(system: str | list[Block] | None) -> str:
    blocks = system or []
    if isinstance(blocks, str):
        blocks = [Block(type="text", text=blocks)]
    blocks = [block for block in blocks if not (block.text or "").startswith(_BILLING_HEADER)]
    return _text("system", blocks, "system")


def _split(message: SentMessage, param: str) -> list[Message]:
    """The messages that one message of the API stands for: the tool results in it, then the rest. `param` is
    the place of its content."""
    text = _text(message.role, message.content, param)
    blocks: list[Block] = []
    if not isinstance(message.content, str):
        blocks = message.content
    calls = []
    for block in blocks:
        if block.type == "tool_use":
            arguments = wire.json_object(block.input, f"{param}.input") or "{}"
            calls.append(ToolCall(block.id or "", block.name or "", arguments))
    messages = []
    for block in blocks:
        if block.type == "tool_result":
            result = _text("system", block.content or (), param)
            messages.append(Message("tool", result, tool_call_id=block.tool_use_id or ""))
    if text or not messages:
        reasoning = "".join(block.thinking or "" for block in blocks)
        messages.append(Message(message.role, text, reasoning, tuple(calls)))
    return messages


def _text(role: str, content: str | Sequence[Block], param: str) -> str:
    """The text of a role's content. SessionError 400 for a block that the role cannot have."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        place = f"{param}[{index}]"
        if block.type not in _BLOCKS[role]:
            reason = f"{block.type!r} is refused: only {', '.join(_BLOCKS[role])} can stand here, no images"
            raise wire.bad(f"{place}: {reason}", param=place, code="unsupported_content")
        for name in _REQUIRED_FIELDS.get(block.type, (block.type,)):
            if getattr(block, name) is None:
                raise wire.bad(f"{place}.{name}: Field required", param=f"{place}.{name}")
    separator = "" if role == "assistant" else "\n"
    return separator.join(block.text or "" for block in content if block.type == "text")
