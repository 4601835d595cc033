"""The tools of a response request, and which of them may be called. Pure.

A tool may be in a namespace. The model knows it as `namespace.name`, the client by the
two names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.response_calls import (
    CUSTOM,
    FUNCTION,
    LOCAL_SHELL,
    LOCAL_SHELL_NAME,
    CalledTool,
    CallKind,
    CustomFormat,
    custom_function,
    local_shell_function,
)
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import Tool, ToolChoice

_IGNORED_TOOLS = ("web_search", "image_generation")
_KINDS: Mapping[str, CallKind] = {
    "function": FUNCTION,
    "custom": CUSTOM,
    "local_shell": LOCAL_SHELL,
}
"""The kind of a tool's calls, by the tool's type."""


class ToolField(wire.Function, kw_only=True):
    type: str
    tools: list[ToolField] | None = None
    """The tools of a namespace."""
    format: CustomFormat | None = None
    """The text that a custom tool takes."""


class ToolChoiceField(msgspec.Struct):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolChoiceField] | None = None


def qualified_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    if not namespace:
        return name
    return f"{namespace}.{name}"


def called_tools(
    tools: Sequence[ToolField], namespace: str = ""
) -> Mapping[str, CalledTool]:
    """The tools as the client knows them, by the name that the model knows. Functions
    that have one name only are left out."""
    called: dict[str, CalledTool] = {}
    for tool in tools:
        if tool.type == "namespace":
            called |= called_tools(tool.tools or (), tool.name)
        elif tool.type == "local_shell":
            called[LOCAL_SHELL_NAME] = CalledTool(
                name=LOCAL_SHELL_NAME, kind=LOCAL_SHELL
            )
        elif namespace or tool.type == "custom":
            model_name = qualified_name(namespace, tool.name)
            kind = _KINDS.get(tool.type, FUNCTION)
            called[model_name] = CalledTool(
                name=tool.name, namespace=namespace, kind=kind
            )
    return called


def read_tools(tools: Sequence[ToolField], namespace: str = "") -> Iterator[Tool]:
    """The tools as functions, those in namespaces too. SessionError 400 for a tool that
    is not supported."""
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type == "namespace" and not namespace:
            yield from read_tools(tool.tools or (), tool.name)
        elif tool.type == "function":
            name = qualified_name(namespace, tool.name)
            yield wire.make_tool(tool, param, name)
        elif tool.type == "custom":
            name = qualified_name(namespace, tool.name)
            yield wire.make_tool(
                custom_function(name, tool.description, tool.format), param
            )
        elif tool.type == "local_shell":
            yield wire.make_tool(local_shell_function(), param)
        elif tool.type not in _IGNORED_TOOLS:
            reason = (
                f"{param}: only {', '.join(_KINDS)} are supported, not {tool.type!r}"
            )
            raise wire.bad_request(reason, param=param)


def read_tool_choice(choice: str | ToolChoiceField | None) -> ToolChoice:
    plain = wire.plain_choice(choice)
    if plain is not None:
        return plain
    if isinstance(choice, ToolChoiceField):
        if choice.type in _KINDS:
            return ToolChoice(mode="named", name=_chosen_name(choice))
        if choice.type == "allowed_tools":
            names = [_chosen_name(tool) for tool in choice.tools or ()]
            names = [name for name in names if name]
            return wire.allowed_choice(choice.mode, names)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a tool"
    raise wire.bad_request(reason, param="tool_choice")


def _chosen_name(choice: ToolChoiceField) -> str:
    """The name by which the model knows a chosen tool."""
    if choice.type == "local_shell":
        return LOCAL_SHELL_NAME
    return qualified_name(choice.namespace, choice.name)


def tool_fields(tool: Tool) -> Fields:
    """A tool as a response shows it, by the name that the model knows."""
    parameters = tool.parameters or "null"
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": msgspec.Raw(parameters.encode()),
        "strict": tool.strict,
    }
