"""Contents of a request to `generateContent`: conversion to messages. Pure.

Google's calls may have no ids: a result then belongs to the first call of its name that
has none yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.joined_messages import JoinedMessages
from invrl.gateway.types import Message, ToolCall


class FunctionCall(msgspec.Struct):
    name: str
    id: str | None = None
    args: msgspec.Raw = wire.NO_JSON


class FunctionResponse(msgspec.Struct):
    name: str
    id: str | None = None
    response: msgspec.Raw = wire.NO_JSON
    parts: list[msgspec.Raw] | None = None


class Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: msgspec.Raw = wire.NO_JSON
    file_data: msgspec.Raw = wire.NO_JSON
    executable_code: msgspec.Raw = wire.NO_JSON
    thought_signature: str | None = None
    code_execution_result: msgspec.Raw = wire.NO_JSON
    tool_call: msgspec.Raw = wire.NO_JSON
    tool_response: msgspec.Raw = wire.NO_JSON


class Content(msgspec.Struct):
    parts: list[Part] | None = None
    role: Literal["user", "model", "function", "tool"] | None = None


_NOTHING = Part()
"""What is read of a part of an unknown kind."""
_REFUSED_PARTS = {
    "inline_data": "inlineData",
    "file_data": "fileData",
    "executable_code": "executableCode",
    "code_execution_result": "codeExecutionResult",
    "tool_call": "toolCall",
    "tool_response": "toolResponse",
}


def check_last(contents: Sequence[Content]) -> None:
    """Raise SessionError 400 if the conversation, which a reply shall follow, ends with
    one."""
    if contents and contents[-1].role == "model":
        reason = "the conversation must end with the user's content: a reply begun by the client is not supported"
        raise wire.bad_request(reason, param="contents")


def conversation(
    system: Content | None, contents: Sequence[Content]
) -> tuple[Message, ...]:
    """Return the system prompt and the messages of a body, as the template takes
    them."""
    if not contents:
        raise wire.bad_request("contents: at least one is required", param="contents")
    joined = JoinedMessages()
    if system is not None:
        texts = _texts(system.parts or (), "systemInstruction.parts")
        text = "\n".join(texts)
        if text:
            joined.add(Message("system", text))
    calls = _CallIds()
    for index, content in enumerate(contents):
        for message in _messages(content, calls, f"contents[{index}].parts"):
            if message.role != joined.last_role or message.role == "tool":
                joined.add(message)
            elif message.role == "assistant":
                joined.join(message)
            else:
                joined.join(message, "\n")
    return joined.messages()


class _CallIds:
    """Ids of the calls, and the calls that wait for their result. A call without an id
    is numbered by its place in the conversation."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._waiting: set[str] = set()
        self._by_name: dict[str, deque[str]] = {}
        """Ids of the calls of each name, some of which may have their result."""

    def call(self, call: FunctionCall, param: str) -> ToolCall:
        call_id = call.id or f"call_{self._num_calls}"
        self._num_calls += 1
        self._waiting.add(call_id)
        self._by_name.setdefault(call.name, deque()).append(call_id)
        arguments = wire.json_object(call.args, f"{param}.functionCall.args") or "{}"
        return ToolCall(call_id, call.name, arguments)

    def answered(self, response: FunctionResponse) -> str:
        """Return the id of the call that a result answers; "" if there is no such
        call."""
        if response.id:
            self._waiting.discard(response.id)
            return response.id
        ids = self._by_name.get(response.name, deque())
        while ids:
            call_id = ids.popleft()
            if call_id in self._waiting:
                self._waiting.remove(call_id)
                return call_id
        return ""


def _messages(content: Content, calls: _CallIds, param: str) -> list[Message]:
    """Return the messages of one content: the results in it, then the rest."""
    parts = content.parts or []
    texts = _texts(parts, param)
    messages: list[Message] = []
    if content.role == "model":
        thoughts = [part.text or "" for part in parts if part.thought]
        made = [
            calls.call(part.function_call, f"{param}[{index}]")
            for index, part in enumerate(parts)
            if part.function_call is not None
        ]
        reply = Message("assistant", "".join(texts), "".join(thoughts), tuple(made))
        return [reply]
    for index, part in enumerate(parts):
        if part.function_call is not None:
            param = f"{param}[{index}].functionCall"
            raise wire.bad_request(
                f"{param}: only the role `model` makes calls", param=param
            )
        if part.function_response is not None:
            text = _result_text(part.function_response, f"{param}[{index}]")
            call_id = calls.answered(part.function_response)
            messages.append(Message("tool", text, tool_call_id=call_id))
    text = "".join(texts)
    if text or not messages:
        messages.append(Message("user", text))
    return messages


def _texts(parts: Sequence[Part], param: str) -> list[str]:
    """Return the texts that are no thoughts. Raises SessionError 400 for a part that is
    not text, a call or a result."""
    texts = []
    for index, part in enumerate(parts):
        if part == _NOTHING:
            reason = (
                f"{param}[{index}] has none of text, functionCall and functionResponse"
            )
            raise wire.bad_request(reason, param=f"{param}[{index}]")
        for field, name in _REFUSED_PARTS.items():
            if bytes(getattr(part, field)) not in (b"", b"null"):
                reason = f"{param}[{index}].{name} is refused: this model takes text, functionCall and functionResponse"
                raise wire.bad_request(
                    reason,
                    param=f"{param}[{index}].{name}",
                    code="unsupported_content",
                )
        if part.text is not None and not part.thought:
            texts.append(part.text)
    return texts


def _result_text(response: FunctionResponse, param: str) -> str:
    """Return the text of a call's result. An object with one field, `output` (which
    Google's API names) or `result` (into which its clients put a returned value), is
    that value; any other object is shown whole."""
    param = f"{param}.functionResponse"
    if response.parts:
        reason = f"{param}.parts is refused: a result is text"
        raise wire.bad_request(
            reason, param=f"{param}.parts", code="unsupported_content"
        )
    text = wire.json_object(response.response, f"{param}.response")
    if not text:
        return ""
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if len(fields) != 1 or not fields.keys() & {"output", "result"}:
        return text
    [value] = fields.values()
    output = bytes(value)
    if output.startswith(b'"'):
        return msgspec.json.decode(output, type=str)
    return output.decode()
