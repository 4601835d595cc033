"""Anthropic's own tools that the client runs: bash, text editor, memory. Pure.

A request names such a tool only by its type and version, because Anthropic's models
know it. The model here sees it as a function; its calls come back like others. Tools
that Anthropic's servers run (search, code execution) have no counterpart, and
screenshots of a computer are images.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from invrl.gateway.dialects import wire

_VERSIONED = re.compile(r"(?P<family>[a-z_]+)_(?P<version>\d{8})")
_UNDO_UNTIL = "20250124"
"""Last version of the text editor that undoes edits."""
_PROPERTIES: Mapping[str, Mapping[str, object]] = {
    "path": {"type": "string", "description": "absolute path of a file or folder"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: the first and the last line to show",
    },
    "file_text": {
        "type": "string",
        "description": "create: the whole text of the file",
    },
    "old_str": {
        "type": "string",
        "description": "str_replace: the text to replace, which occurs once",
    },
    "new_str": {"type": "string", "description": "str_replace: the new text"},
    "insert_line": {
        "type": "integer",
        "description": "insert: the line after which to insert; 0: before all",
    },
    "insert_text": {"type": "string", "description": "insert: the text to insert"},
    "old_path": {"type": "string", "description": "rename: the present path"},
    "new_path": {"type": "string", "description": "rename: the new path"},
}
_EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
_EDITOR_FIELDS = (
    "path",
    "view_range",
    "file_text",
    "old_str",
    "new_str",
    "insert_line",
    "insert_text",
)
_FAMILIES = ("bash", "text_editor", "memory")


def client_tool(kind: str, name: str, param: str) -> wire.Function:
    """Return the function that represents a tool of this type. Raises SessionError 400
    for a type that the client does not run; it calls the tool `param`."""
    match = _VERSIONED.fullmatch(kind)
    family = ""
    version = ""
    if match is not None:
        family = match["family"]
        version = match["version"]
    if family == "bash":
        description = "Runs a command in a bash shell that stays open between calls, and returns its output."
        properties = {
            "command": {"type": "string", "description": "the command to run"},
            "restart": {
                "type": "boolean",
                "description": "true: start the shell again",
            },
        }
        return _function(name, description, properties, required=())
    if family == "text_editor":
        commands = _EDITOR_COMMANDS
        if version <= _UNDO_UNTIL:
            commands = (*commands, "undo_edit")
        return _file_function(
            name, "Views and edits text files.", commands, _EDITOR_FIELDS, ("path",)
        )
    if family == "memory":
        commands = (*_EDITOR_COMMANDS, "delete", "rename")
        fields = (*_EDITOR_FIELDS, "old_path", "new_path")
        description = "Keeps notes in files of the folder /memories, which later conversations can read."
        return _file_function(name, description, commands, fields, ())
    supported = ", ".join(f"{family}_…" for family in _FAMILIES)
    reason = f"{param}: tools of the type {kind!r} are not supported; custom tools and {supported} are"
    raise wire.bad_request(reason, param=param, code="unsupported_parameter")


def _file_function(
    name: str,
    description: str,
    commands: Sequence[str],
    fields: Sequence[str],
    required: Sequence[str],
) -> wire.Function:
    command = {"type": "string", "enum": list(commands), "description": "what to do"}
    properties = {"command": command, **{field: _PROPERTIES[field] for field in fields}}
    return _function(name, description, properties, required=("command", *required))


def _function(
    name: str,
    description: str,
    properties: Mapping[str, Mapping[str, object]],
    *,
    required: Sequence[str],
) -> wire.Function:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    parameters = msgspec.Raw(msgspec.json.encode(schema))
    return wire.Function(name=name, description=description, parameters=parameters)
