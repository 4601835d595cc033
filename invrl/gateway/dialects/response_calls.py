"""Kinds of calls that a response may have: of functions, of custom tools, of OpenAI's
own tools that the client runs (shells, patches). Pure.

The model knows all of them as functions. A kind defines the function of a tool, and how
a call is written for the client and read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.custom_tools import custom_input
from invrl.gateway.dialects.wire import Fields

_LOCAL_SHELL_SCHEMA = (
    b'{"type": "object", "properties": {'
    b'"command": {"type": "array", "items": {"type": "string"}, "description": "program and arguments"}, '
    b'"working_directory": {"type": "string"}, '
    b'"timeout_ms": {"type": "integer"}, '
    b'"env": {"type": "object", "additionalProperties": {"type": "string"}}'
    b'}, "required": ["command"]}'
)
_SHELL_SCHEMA = (
    b'{"type": "object", "properties": {'
    b'"commands": {"type": "array", "items": {"type": "string"}, "description": "commands of the shell"}, '
    b'"timeout_ms": {"type": "integer"}, '
    b'"max_output_length": {"type": "integer", "description": "characters to return of each command"}'
    b'}, "required": ["commands"]}'
)
_PATCH_SCHEMA = (
    b'{"type": "object", "properties": {'
    b'"type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}, '
    b'"path": {"type": "string"}, '
    b'"diff": {"type": "string", "description": "V4A diff of the file; not for delete_file"}'
    b'}, "required": ["type", "path"]}'
)


class CallKind:
    """Calls of functions."""

    prefix = "fc"
    item_type = "function_call"
    result_type = "function_call_output"
    tool_name = ""
    """Name of the one tool of this kind, which its items omit; "" if tools have
    names."""
    body_field = "arguments"
    """Field of an item that depends on the call's arguments."""
    streams_text = True
    """Whether the events carry the text of the arguments as it is sampled."""

    def body(self, arguments: str) -> object:
        """Return the value of `body_field`; `arguments` is "" before they are known.
        Unreadable arguments give an empty one: the client reports that to the model."""
        return arguments

    def events(self, arguments: str) -> list[Fields]:
        """Return the events about the body of a whole call."""
        return [
            {"type": "response.function_call_arguments.done", "arguments": arguments}
        ]

    def status(self, status: str) -> str:
        """Return the status of an item, as this kind calls it."""
        return status


class _Custom(CallKind):
    prefix = "ctc"
    item_type = "custom_tool_call"
    result_type = "custom_tool_call_output"
    body_field = "input"
    streams_text = False

    def body(self, arguments: str) -> object:
        return custom_input(arguments)

    def events(self, arguments: str) -> list[Fields]:
        event = "response.custom_tool_call_input"
        text = custom_input(arguments)
        return [
            {"type": f"{event}.delta", "delta": text},
            {"type": f"{event}.done", "input": text},
        ]


class _ClientTool(CallKind):
    """Calls of a tool that needs no definition. The body of an item has the call's
    arguments as its fields."""

    streams_text = False
    description: str
    schema: bytes
    fields: ClassVar[type[msgspec.Struct]]
    empty: ClassVar[Fields]
    """Body without arguments."""

    def body(self, arguments: str) -> Fields:
        try:
            fields = msgspec.json.decode(arguments, type=self.fields)
        except (msgspec.DecodeError, RecursionError):
            return dict(self.empty)
        return {**self.empty, **msgspec.structs.asdict(fields)}

    def events(self, arguments: str) -> list[Fields]:
        return []

    def arguments(self, body: msgspec.Raw, param: str) -> str:
        """Return the arguments of a call, from the body that the client sends back."""
        try:
            fields = msgspec.json.decode(body, type=self.fields)
        except (msgspec.DecodeError, RecursionError) as error:
            raise wire.bad_request(f"{param}: {error}", param=param) from None
        return msgspec.json.encode(fields).decode()

    def function(self) -> wire.Function:
        """Return the function that represents the tool."""
        return wire.Function(
            name=self.tool_name,
            description=self.description,
            parameters=msgspec.Raw(self.schema),
        )


class _LocalAction(msgspec.Struct, omit_defaults=True, kw_only=True):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] = {}
    user: str | None = None


class _LocalShell(_ClientTool):
    prefix = "lsh"
    item_type = "local_shell_call"
    result_type = "local_shell_call_output"
    tool_name = "local_shell"
    body_field = "action"
    description = "Runs a command on the user's machine and returns its output."
    schema = _LOCAL_SHELL_SCHEMA
    fields = _LocalAction
    empty: ClassVar[Fields] = {
        "type": "exec",
        "command": [],
        "env": {},
        "timeout_ms": None,
        "user": None,
        "working_directory": None,
    }


class _ShellAction(msgspec.Struct, omit_defaults=True, kw_only=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class _Shell(_ClientTool):
    prefix = "sh"
    item_type = "shell_call"
    result_type = "shell_call_output"
    tool_name = "shell"
    body_field = "action"
    description = (
        "Runs commands in a shell, one after the other, and returns the output of each."
    )
    schema = _SHELL_SCHEMA
    fields = _ShellAction
    empty: ClassVar[Fields] = {
        "commands": [],
        "timeout_ms": None,
        "max_output_length": None,
    }

    def events(self, arguments: str) -> list[Fields]:
        event = "response.shell_call_command"
        events: list[Fields] = []
        for index, command in enumerate(self.body(arguments)["commands"]):
            place = {"command_index": index}
            events.append({"type": f"{event}.added", "command": "", **place})
            events.append({"type": f"{event}.delta", "delta": command, **place})
            events.append({"type": f"{event}.done", "command": command, **place})
        return events


class _Operation(msgspec.Struct, omit_defaults=True, kw_only=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""


class _ApplyPatch(_ClientTool):
    prefix = "apc"
    item_type = "apply_patch_call"
    result_type = "apply_patch_call_output"
    tool_name = "apply_patch"
    body_field = "operation"
    description = "Creates, updates or deletes a file."
    schema = _PATCH_SCHEMA
    fields = _Operation
    empty: ClassVar[Fields] = {"type": "update_file", "path": "", "diff": ""}

    def body(self, arguments: str) -> Fields:
        operation = super().body(arguments)
        if operation["type"] == "delete_file":
            del operation["diff"]
        return operation

    def events(self, arguments: str) -> list[Fields]:
        event = "response.apply_patch_call_operation_diff"
        diff = self.body(arguments).get("diff")
        if not diff:
            return []
        return [
            {"type": f"{event}.delta", "delta": diff},
            {"type": f"{event}.done", "diff": diff},
        ]

    def status(self, status: str) -> str:
        """Return the status. These items have no incomplete call."""
        return "completed" if status == "completed" else "in_progress"


FUNCTION = CallKind()
CUSTOM = _Custom()
CLIENT_TOOLS: Mapping[str, _ClientTool] = {
    kind.tool_name: kind for kind in (_LocalShell(), _Shell(), _ApplyPatch())
}
"""Kinds by the type of the tool, which is its name."""
KINDS: Mapping[str, CallKind] = {
    "function": FUNCTION,
    "custom": CUSTOM,
    **CLIENT_TOOLS,
}
"""Kind of a tool's calls, by the tool's type."""
CALL_PREFIXES = tuple(kind.prefix for kind in KINDS.values())
KINDS_BY_ITEM = {kind.item_type: kind for kind in KINDS.values()}
RESULT_TYPES = tuple(kind.result_type for kind in KINDS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    kind: CallKind = FUNCTION
