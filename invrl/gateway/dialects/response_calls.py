"""The kinds of calls that a response may have: of functions, of custom tools, of a
local shell. Pure.

The model knows all of them as functions. A kind says which function a tool is shown as,
and how a call is written for the client and read back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.wire import Fields

_LOCAL_SHELL_SCHEMA = (
    b'{"type": "object", "properties": {'
    b'"command": {"type": "array", "items": {"type": "string"}, "description": "program and arguments"}, '
    b'"working_directory": {"type": "string"}, '
    b'"timeout_ms": {"type": "integer"}, '
    b'"env": {"type": "object", "additionalProperties": {"type": "string"}}'
    b'}, "required": ["command"]}'
)
_CUSTOM_SCHEMA = b'{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}'
_NO_ACTION: Mapping[str, Any] = {
    "type": "exec",
    "command": [],
    "env": {},
    "timeout_ms": None,
    "user": None,
    "working_directory": None,
}


class CustomFormat(msgspec.Struct):
    """The text that a custom tool takes: any, or that of a grammar."""

    type: str
    syntax: str = ""
    definition: str = ""


class CallKind:
    """Calls of functions."""

    prefix = "fc"
    """What the ids of its items begin with."""
    item_type = "function_call"
    result_type = "function_call_output"
    text_event = "response.function_call_arguments"
    """The event that carries the text of a call; "" if only the whole item does."""
    text_field = "arguments"
    streams_text = True
    """The text is that of the arguments, so that it can be sent as it is sampled."""

    def text(self, arguments: str) -> str:
        """What the events say of a call with these arguments."""
        return arguments

    def fields(self, arguments: str) -> Fields:
        """The fields of an item that depend on the call's arguments; "" before they are
        known."""
        return {self.text_field: self.text(arguments)}


class _Custom(CallKind):
    prefix = "ctc"
    item_type = "custom_tool_call"
    result_type = "custom_tool_call_output"
    text_event = "response.custom_tool_call_input"
    text_field = "input"
    streams_text = False

    def text(self, arguments: str) -> str:
        """The tool's input; the arguments as they are if the model has not written an
        input."""
        try:
            return msgspec.json.decode(arguments, type=_CustomArguments).input
        except (msgspec.DecodeError, RecursionError):
            return arguments


class _LocalShell(CallKind):
    prefix = "lsh"
    item_type = "local_shell_call"
    result_type = "local_shell_call_output"
    text_event = ""
    streams_text = False

    def fields(self, arguments: str) -> Fields:
        """A command that cannot be read is empty: the client says so to the model."""
        try:
            action = msgspec.json.decode(arguments, type=_Action)
        except (msgspec.DecodeError, RecursionError):
            return {"action": dict(_NO_ACTION)}
        return {"action": {**_NO_ACTION, **msgspec.structs.asdict(action)}}


class _CustomArguments(msgspec.Struct, forbid_unknown_fields=True):
    input: str


class _Action(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a local shell is to run."""

    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] = {}
    user: str | None = None


FUNCTION = CallKind()
CUSTOM = _Custom()
LOCAL_SHELL = _LocalShell()
LOCAL_SHELL_NAME = "local_shell"
"""The name by which the model knows the local shell."""
_KINDS = (FUNCTION, CUSTOM, LOCAL_SHELL)
CALL_PREFIXES = tuple(kind.prefix for kind in _KINDS)
CALL_TYPES = tuple(kind.item_type for kind in _KINDS)
RESULT_TYPES = tuple(kind.result_type for kind in _KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    kind: CallKind = FUNCTION


def custom_function(
    name: str, description: str | None, text_format: CustomFormat | None
) -> wire.Function:
    """The function that a custom tool is shown as. The model is told a grammar, and not
    held to it."""
    lines = []
    if description:
        lines.append(description)
    if text_format is not None and text_format.type == "grammar":
        lines.append(
            f"The input follows this {text_format.syntax} grammar:\n{text_format.definition}"
        )
    return wire.Function(
        name=name,
        description="\n\n".join(lines),
        parameters=msgspec.Raw(_CUSTOM_SCHEMA),
    )


def local_shell_function() -> wire.Function:
    """The function that the local shell is shown as."""
    return wire.Function(
        name=LOCAL_SHELL_NAME,
        description="Runs a command on the user's machine and returns its output.",
        parameters=msgspec.Raw(_LOCAL_SHELL_SCHEMA),
    )


def custom_arguments(text: str) -> str:
    """The arguments of a custom tool's call, from the text that the client sends
    back."""
    return msgspec.json.encode({"input": text}).decode()


def local_shell_arguments(action: msgspec.Raw, param: str) -> str:
    """The arguments of a shell's call, from the action that the client sends back."""
    try:
        return msgspec.json.encode(msgspec.json.decode(action, type=_Action)).decode()
    except (msgspec.DecodeError, RecursionError) as error:
        raise wire.bad_request(f"{param}: {error}", param=param) from None
