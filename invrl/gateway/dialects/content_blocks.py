"""Messages of a request to `/v1/messages`: conversion from blocks of content. Pure."""

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
"""Types of blocks that the content of a role may have."""
_REQUIRED_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
_SEPARATORS = {"user": "\n", "assistant": "", "system": "\n"}
"""Text between two text blocks of a role. The assistant's are joined as they were
sampled."""
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


def conversation(
    system: str | list[Block] | None,
    messages: Sequence[SentMessage],
) -> tuple[Message, ...]:
    """Return the system prompt and the messages of a body, as the template takes
    them."""
    if not messages:
        raise wire.bad_request("messages: at least one is required", param="messages")
    if messages[-1].role == "assistant":
        reason = "the conversation must end with a user message: a reply begun by the client is not supported"
        raise wire.bad_request(reason, param="messages")
    joined = JoinedMessages()
    system_text = _system_text(system)
    if system_text:
        joined.add(Message("system", system_text))
    for index, sent in enumerate(messages):
        param = f"messages[{index}].content"
        for message in _split(sent, param):
            can_be_joined = message.role in ("user", "assistant")
            if can_be_joined and message.role == joined.last_role:
                joined.join(message, _SEPARATORS[message.role])
            else:
                joined.add(message)
    return joined.messages()


def _system_text(system: str | list[Block] | None) -> str:
    """Return the text of the system prompt, without Claude Code's billing header."""
    if system is None:
        return ""
    if isinstance(system, str):
        system = [Block(type="text", text=system)]
    blocks = []
    for block in system:
        text = block.text or ""
        if not text.startswith(_BILLING_HEADER):
            blocks.append(block)
    return _text("system", blocks, "system")


def _split(message: SentMessage, param: str) -> list[Message]:
    """Split one message of the API: the tool results in it, then the rest. `param` is
    the path of its content."""
    text = _text(message.role, message.content, param)
    if isinstance(message.content, str):
        return [Message(message.role, text)]
    messages = []
    thoughts = []
    calls = []
    for block in message.content:
        if block.type == "tool_use":
            calls.append(_tool_call(block, param))
        elif block.type == "tool_result":
            messages.append(_tool_result(block, param))
        thoughts.append(block.thinking or "")
    if text or not messages:
        rest = Message(message.role, text, "".join(thoughts), tuple(calls))
        messages.append(rest)
    return messages


def _tool_call(block: Block, param: str) -> ToolCall:
    arguments = wire.json_object(block.input, f"{param}.input") or "{}"
    return ToolCall(block.id or "", block.name or "", arguments)


def _tool_result(block: Block, param: str) -> Message:
    text = _text("system", block.content or (), param)
    return Message("tool", text, tool_call_id=block.tool_use_id or "")


def _text(role: str, content: str | Sequence[Block], param: str) -> str:
    """Return the text of a role's content. Raises SessionError 400 for a block that the
    role cannot have."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        _check_block(role, block, f"{param}[{index}]")
        if block.type == "text":
            texts.append(block.text or "")
    return _SEPARATORS[role].join(texts)


def _check_block(role: str, block: Block, param: str) -> None:
    allowed = _BLOCKS[role]
    if block.type not in allowed:
        reason = f"{block.type!r} is refused: only {', '.join(allowed)} can stand here, no images"
        raise wire.bad_request(
            f"{param}: {reason}", param=param, code="unsupported_content"
        )
    for name in _REQUIRED_FIELDS[block.type]:
        if getattr(block, name) is None:
            param = f"{param}.{name}"
            raise wire.bad_request(f"{param}: Field required", param=param)
