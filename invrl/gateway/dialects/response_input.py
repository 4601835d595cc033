"""Input items of a response request, and their conversion to messages. Pure.

Clients send each part of a reply as a separate item, in full or by the id of an output
item. Adjacent items of one reply are joined into one message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.custom_tools import custom_arguments
from invrl.gateway.dialects.dialect import FindTurn
from invrl.gateway.dialects.joined_messages import JoinedMessages
from invrl.gateway.dialects.response_calls import (
    CALL_PREFIXES,
    CLIENT_TOOLS,
    CUSTOM,
    KINDS_BY_ITEM,
    RESULT_TYPES,
)
from invrl.gateway.dialects.response_output import item_place
from invrl.gateway.dialects.response_tools import qualified_name
from invrl.gateway.types import Message, ToolCall

_ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "developer": "system",
}
"""Client's role -> the model's."""


class InputItem(msgspec.Struct):
    """One item of the input. Its fields depend on its type."""

    type: str | None = None
    role: str = ""
    id: str | None = None
    content: str | list[wire.Part] | None = None
    summary: list[wire.Part] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: msgspec.Raw = wire.NO_JSON
    operation: msgspec.Raw = wire.NO_JSON
    output: str | list[OutputPart] | None = None
    status: str | None = None


class OutputPart(wire.Part, kw_only=True):
    """A part of a tool's output. A shell's output has no type."""

    type: str = ""
    stdout: str | None = None
    stderr: str | None = None
    outcome: Outcome | None = None


class Outcome(msgspec.Struct):
    """End of a command: `exit` or `timeout`."""

    type: str
    exit_code: int | None = None


def input_messages(
    items: str | Sequence[InputItem], find: FindTurn
) -> tuple[Message, ...]:
    """Return the messages of an input. Adjacent items of the assistant are one reply,
    until an item comes that begins another. Raises SessionError 400 for an item that
    cannot be read."""
    if isinstance(items, str):
        return (Message("user", items),)
    references = _References(find)
    joined = JoinedMessages()
    last_turn_id = ""
    """Turn that the last item referred to; "" if the item was sent in full."""
    for index, item in enumerate(items):
        param = f"input[{index}]"
        turn_id = ""
        if item.id and _kind(item) == "item_reference":
            message, turn_id = references.resolve(item.id, param)
        else:
            message = _message(item, param, references)
        is_same_turn = turn_id != "" and turn_id == last_turn_id
        if is_same_turn or joined.continues_reply(message):
            joined.join(message)
        else:
            joined.add(message)
        last_turn_id = turn_id
    return joined.messages()


class _References:
    """Resolves items that a request names by their ids: parts of replies of this
    session.

    The text of a reply may have been sent in several items, but the record of the turn
    has it in one piece. The first of these items in a request stands for all of the
    text, the others for none.
    """

    def __init__(self, find: FindTurn) -> None:
        self._find = find
        self._turns_with_text: set[str] = set()
        """Turns whose text was named already."""

    def call_id(self, item_id: str) -> str:
        """Return the id of the call of an output item; the id itself for any other
        item."""
        place = item_place(item_id)
        if place is None or place.prefix not in CALL_PREFIXES:
            return item_id
        node = self._find(place.turn_id)
        if node is None or node.raw or place.place >= len(node.messages[-1].tool_calls):
            return item_id
        return node.messages[-1].tool_calls[place.place].id

    def resolve(self, item_id: str, param: str) -> tuple[Message, str]:
        """Return the item as a message of the assistant, and the id of its turn. Raises
        SessionError 400 for an id that this session did not issue."""
        place = item_place(item_id)
        node = None
        if place is not None:
            node = self._find(place.turn_id)
        if place is None or node is None or node.raw:
            raise _item_not_found(item_id, param)
        turn_id = place.turn_id
        reply = node.messages[-1]
        if place.prefix == "rs":
            return Message("assistant", reasoning=reply.reasoning), turn_id
        if place.prefix == "msg":
            content = ""
            if turn_id not in self._turns_with_text:
                content = reply.content
            self._turns_with_text.add(turn_id)
            return Message("assistant", content), turn_id
        if place.place >= len(reply.tool_calls):
            raise _item_not_found(item_id, param)
        call = reply.tool_calls[place.place]
        return Message("assistant", tool_calls=(call,)), turn_id


def _item_not_found(item_id: str, param: str) -> SessionError:
    reason = f"{param}: Item with id {item_id!r} not found: it is not an output item of this session"
    return wire.bad_request(reason, param=f"{param}.id", code="item_not_found")


def _kind(item: InputItem) -> str:
    """Return the item's type; clients leave out some of them."""
    if item.type:
        return item.type
    if item.role:
        return "message"
    return "item_reference"


def _message(item: InputItem, param: str, references: _References) -> Message:
    """Return the message of an item that was sent in full."""
    kind = _kind(item)
    if kind == "message":
        return _plain_message(item, param)
    if kind == "reasoning":
        content = item.content or item.summary or ""
        text = wire.content_text(content, f"{param}.content")
        return Message("assistant", reasoning=text)
    if kind in KINDS_BY_ITEM:
        call = _tool_call(item, param)
        return Message("assistant", tool_calls=(call,))
    if kind in RESULT_TYPES:
        return _tool_result(item, param, references)
    if kind == "item_reference":
        reason = f"{param}.id: an item reference needs the item's id"
        raise wire.bad_request(reason, param=f"{param}.id")
    reason = f"{param}: items of type {kind!r} are not supported"
    raise wire.bad_request(reason, param=f"{param}.type", code="unsupported_item")


def _plain_message(item: InputItem, param: str) -> Message:
    role = wire.model_role(item.role, _ROLES, param)
    param = f"{param}.content"
    if item.content is None:
        raise wire.bad_request(f"{param} must be text", param=param)
    return Message(role, wire.content_text(item.content, param))


def _tool_call(item: InputItem, param: str) -> ToolCall:
    kind = KINDS_BY_ITEM[item.type or ""]
    item_name = kind.tool_name or item.name
    if not item.call_id or not item_name:
        raise wire.bad_request(f"{param} needs `call_id` and `name`", param=param)
    arguments = item.arguments
    if kind is CUSTOM:
        arguments = custom_arguments(item.input or "")
    elif kind.tool_name:
        tool = CLIENT_TOOLS[kind.tool_name]
        body = item.operation if tool.body_field == "operation" else item.action
        arguments = tool.arguments(body, f"{param}.{tool.body_field}")
    elif arguments is None:
        arguments = "{}"
    wire.call_arguments(arguments, f"{param}.arguments")
    name = qualified_name(item.namespace, item_name)
    return ToolCall(item.call_id, name, arguments)


def _tool_result(item: InputItem, param: str, references: _References) -> Message:
    call_id = item.call_id
    if not call_id and item.id:
        # the result of a local shell names the item
        call_id = references.call_id(item.id)
    output = item.output
    is_patch = item.type == CLIENT_TOOLS["apply_patch"].result_type
    if output is None and is_patch:
        output = ""
    if not call_id or output is None:
        raise wire.bad_request(f"{param} needs `call_id` and `output`", param=param)
    if item.type == CLIENT_TOOLS["shell"].result_type and not isinstance(output, str):
        text = "\n".join(_command_text(part) for part in output)
    else:
        text = wire.content_text(output, f"{param}.output")
    if is_patch:
        text = "\n".join(part for part in (item.status, text) if part)
    return Message("tool", text, tool_call_id=call_id)


def _command_text(part: OutputPart) -> str:
    """Return the model's text of a command that the shell ran."""
    lines = []
    if part.stdout:
        lines.append(part.stdout.removesuffix("\n"))
    if part.stderr:
        lines.append("stderr: " + part.stderr.removesuffix("\n"))
    if part.outcome is not None and part.outcome.type == "timeout":
        lines.append("timed out")
    elif part.outcome is not None:
        lines.append(f"exit code {part.outcome.exit_code}")
    return "\n".join(lines)
