"""The tools of a response request, and which of them may be called. Pure.

A function may be in a namespace. The model knows it as `namespace.name`, the client by the two names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import Tool, ToolChoice

_IGNORED_TOOLS = ("web_search", "image_generation")


class ToolField(wire.Function, kw_only=True):
    type: str
    tools: list[ToolField] | None = None
    """The functions of a namespace."""


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


def namespaced_functions(tools: Sequence[ToolField]) -> Mapping[str, tuple[str, str]]:
    """Namespace and name of the functions in namespaces, by the name that the model knows."""
    functions = {}
    for group in tools:
        for tool in group.tools or ():
            model_name = qualified_name(group.name, tool.name)
            functions[model_name] = (group.name, tool.name)
    return functions


def read_tools(tools: Sequence[ToolField], namespace: str = "") -> Iterator[Tool]:
    """The functions among the tools, those in namespaces too. SessionError 400 for a tool that is not
    supported."""
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type == "namespace" and not namespace:
            yield from read_tools(tool.tools or (), tool.name)
        elif tool.type == "function":
            name = qualified_name(namespace, tool.name)
            yield wire.make_tool(tool, param, name)
        elif tool.type not in _IGNORED_TOOLS:
            reason = f"{param}: only functions are supported, not {tool.type!r}"
            raise wire.bad_request(reason, param=param)


def read_tool_choice(choice: str | ToolChoiceField | None) -> ToolChoice:
    plain = wire.plain_choice(choice)
    if plain is not None:
        return plain
    if isinstance(choice, ToolChoiceField):
        if choice.type == "function":
            name = qualified_name(choice.namespace, choice.name)
            return ToolChoice(mode="named", name=name)
        if choice.type == "allowed_tools":
            names = []
            for tool in choice.tools or ():
                if tool.name:
                    names.append(qualified_name(tool.namespace, tool.name))
            return wire.allowed_choice(choice.mode, names)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a function"
    raise wire.bad_request(reason, param="tool_choice")


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
